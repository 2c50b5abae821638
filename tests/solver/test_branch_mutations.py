"""Mutations of the bounds and of the search, each of which the soundness check must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gls_lirpa.base.boxes import margin_spec
from gls_lirpa.solver import facets, tree
from gls_lirpa.solver.ascent import DomainBounds, optimise
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.builder import FormBuilder
from gls_lirpa.solver.domains import Domains, Pass
from gls_lirpa.solver.envelopes import Envelopes, GroupTerms
from gls_lirpa.solver.exact import Optimum, minimise
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.operators import OperatorBounds, OperatorForm
from gls_lirpa.solver.queue import Queue
from gls_lirpa.solver.subsets import Sums
from tests.helpers.branch_problems import PLAIN, Property, near_boundary, random_domains, root_envelopes, search_of


def _mutated_pass(change: Callable[[Domains], Domains]) -> Callable[..., tuple[Pass, GroupTerms | None]]:
    original = SplitBounds.with_terms
    return lambda self, batch, **options: original(self, change(batch), **options)


def _mutated_operators(change: Callable[[Domains], Domains]) -> Callable[..., Pass]:
    original = OperatorBounds._evaluate
    return lambda self, batch, primal: original(self, change(batch), primal)


def _no_operator_intercept(self: OperatorBounds, form: OperatorForm) -> None:
    _OPERATORS(self, form)
    form.__dict__["intercept"] = 0 * form.intercept


def _no_operator_bias(self: OperatorBounds, form: OperatorForm) -> None:
    _OPERATORS(self, form)
    self._constants = {name: 0 * value for name, value in self._constants.items()}


_OPERATORS = OperatorBounds.__init__


def _mutated_init(change: Callable[[SplitBounds], None]) -> Callable[..., None]:
    original = SplitBounds.__init__

    def init(self: SplitBounds, form: SplitForm, **options: Any) -> None:
        original(self, form, **options)
        change(self)

    return init


def _mutated_form(change: Callable[[SplitForm], SplitForm]) -> Callable[..., None]:
    """The bounds are computed on a changed form."""
    original = SplitBounds.__init__
    return lambda self, form, **options: original(self, change(form), **options)


def _layers(form: SplitForm, **changes: Callable[[Tensor], Tensor]) -> SplitForm:
    layers = [replace(layer, **{k: f(getattr(layer, k)) for k, f in changes.items()}) for layer in form.layers]
    return replace(form, layers=tuple(layers))


def _swapped(form: SplitForm) -> SplitForm:
    return replace(form, layers=tuple(replace(la, lower=-la.upper, upper=-la.lower) for la in form.layers))


def _shrunk(form: SplitForm) -> SplitForm:
    inputs = form.inputs
    form = _layers(form, weight=lambda w: torch.cat([0.8 * w[:, :inputs], w[:, inputs:]], 1))
    return replace(form, weight=torch.cat([0.8 * form.weight[:, :inputs], form.weight[:, inputs:]], 1))


def _unsigned(batch: Domains) -> Domains:
    return replace(batch, beta=batch.beta * batch.signs)


def _negative_intercept(bounds: SplitBounds) -> None:
    bounds._intercept = -bounds._intercept


def _no_intercept(bounds: SplitBounds) -> None:
    bounds._intercept = 0 * bounds._intercept


def _steep_upper(bounds: SplitBounds) -> None:
    bounds._upper_slope = 1 - bounds._upper_slope


def _no_bias(bounds: SplitBounds) -> None:
    bounds._offsets = [0 * offset for offset in bounds._offsets]


def _one_child(self: Domains, neurons: Tensor) -> Domains:
    """The first child, twice."""
    both = _CHILDREN(self, neurons)
    return both[torch.arange(len(both)) % (len(both) // 2)]


_CHILDREN = Domains.children
_PUSH = Queue.push


def _forgetful(self: Queue, batch: Domains, ranked: Tensor) -> None:
    _PUSH(self, batch[slice(1, None)], ranked[1:])


_FACET = facets._Neurons.facet


def _opposite_facet(self: facets._Neurons, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each weight of the facet on another input."""
    weight, offset = _FACET(self, values)
    return weight.flip(1), offset


def _low_facet(self: facets._Neurons, values: Tensor) -> tuple[Tensor, Tensor]:
    weight, offset = _FACET(self, values)
    return weight, offset - 0.1 * self.step.sum(1)


_HIGHEST = Sums.highest


def _smallest_subset(self: Sums, slope: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The offset of one subset alone, of no neuron."""
    low, high = (self.low[:, :1], self.low_offset[:, :1]), (self.high[:, :1], self.high_offset[:, :1])
    return _HIGHEST(Sums(*low, *high, self.crossing, self.below), slope, count)


def _unbiased(self: Sums, slope: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return _HIGHEST(replace(self, low_offset=0 * self.low_offset, high_offset=0 * self.high_offset), slope, count)


def _added_slopes(self: Envelopes, head: Tensor, terms: GroupTerms) -> None:
    head.scatter_add_(1, self.groups.index.flatten().expand(len(head), -1), terms.slope.flatten(1))


def _opposite_leaf(form: SplitForm, row: int, *, signs: Tensor, **options: float) -> Optimum:
    return minimise(form, row, signs=-signs, **options)  # type: ignore[arg-type]


def _flipped(batch: Domains) -> Domains:
    return replace(batch, signs=-batch.signs)


MUTATIONS: dict[str, tuple[object, str, object]] = {
    "upper line's intercept with the wrong sign": (SplitBounds, "__init__", _mutated_init(_negative_intercept)),
    "upper line without intercept": (SplitBounds, "__init__", _mutated_init(_no_intercept)),
    "upper line's slope −l/(u−l)": (SplitBounds, "__init__", _mutated_init(_steep_upper)),
    "biases forgotten": (SplitBounds, "__init__", _mutated_init(_no_bias)),
    "lower and upper bounds swapped": (SplitBounds, "__init__", _mutated_form(_swapped)),
    "pre-activation bounds 20 % too narrow": (
        SplitBounds, "__init__", _mutated_form(lambda f: _layers(f, lower=lambda v: 0.8 * v, upper=lambda v: 0.8 * v)),
    ),
    "box 20 % too small": (SplitBounds, "__init__", _mutated_form(_shrunk)),
    "β without the split's sign": (SplitBounds, "with_terms", _mutated_pass(_unsigned)),
    "β with the opposite sign": (SplitBounds, "with_terms", _mutated_pass(lambda b: replace(b, beta=-b.beta))),
    "active and inactive splits swapped": (SplitBounds, "with_terms", _mutated_pass(_flipped)),
    "lower slope above 1": (SplitBounds, "with_terms", _mutated_pass(lambda b: replace(b, alpha=b.alpha + 1))),
    "lower slope below 0": (SplitBounds, "with_terms", _mutated_pass(lambda b: replace(b, alpha=b.alpha - 1))),
    "share of the facets above 1": (SplitBounds, "with_terms", _mutated_pass(lambda b: replace(b, gamma=b.gamma + 1))),
    "facets in the opposite order": (facets._Neurons, "facet", _opposite_facet),
    "facets without the corner's value": (facets._Neurons, "facet", _low_facet),
    "operators: β without the split's sign": (OperatorBounds, "_evaluate", _mutated_operators(_unsigned)),
    "operators: active and inactive splits swapped": (OperatorBounds, "_evaluate", _mutated_operators(_flipped)),
    "operators: lower slope above 1": (
        OperatorBounds, "_evaluate", _mutated_operators(lambda b: replace(b, alpha=b.alpha + 1)),
    ),
    "operators: upper line without intercept": (OperatorBounds, "__init__", _no_operator_intercept),
    "operators: biases forgotten": (OperatorBounds, "__init__", _no_operator_bias),
    "groups with the opposite slopes": (Envelopes, "subtract_slopes", _added_slopes),
    "groups without their subsets": (Sums, "highest", _smallest_subset),
    "groups without their biases": (Sums, "highest", _unbiased),
    "only one child is bounded": (Domains, "children", _one_child),
    "the queue forgets a subproblem": (Queue, "push", _forgetful),
    "the LP of a leaf with the opposite signs": (tree, "minimise", _opposite_leaf),
}  # fmt: skip


def _spec(prop: Property) -> Tensor:
    return margin_spec(prop.samples.labels, 3)[0]


@pytest.fixture(scope="module")
def references() -> list[tuple[Property, SplitForm, Domains, Tensor]]:
    """Properties with random subproblems of their forms and the exact minima of those."""
    found = []
    for kind in ("dense", "conv", "residual"):
        for seed in range(4):
            for prop in near_boundary(kind, seed, 10)[1:]:
                form = FormBuilder(prop.subject.model, prop.samples.x).form(prop.samples.box, _spec(prop))
                batch = random_domains(form, seed, 24)
                exact = [minimise(form, int(r), signs=s).bound for r, s in zip(batch.rows, batch.signs, strict=True)]
                found.append((prop, form, batch, torch.tensor(exact, dtype=torch.float64)))
    return found


def _sound(references: list[tuple[Property, SplitForm, Domains, Tensor]]) -> bool:
    """Every bound ≤ the exact minimum of its domain, optimised or not, and every verdict is right."""
    settings = replace(PLAIN, root_iterations=3, iterations=3)
    for prop, form, batch, exact in references:
        plain = SplitBounds(form, dtype=torch.float64)
        found = facets.facets_of(form, iterations=6)
        faceted = SplitBounds(form, facets=found, dtype=torch.float64)
        grouped = faceted.with_relaxation(root_envelopes(form, found, iterations=6))
        builder = FormBuilder(prop.subject.model, prop.samples.x)
        free = OperatorBounds(builder.operators(builder.stability(prop.samples.box, _spec(prop))))
        root = Domains.roots(form, torch.arange(2), torch.float64)
        tried: list[tuple[DomainBounds, Domains, Tensor]] = [
            *((bounds, batch, exact) for bounds in (plain, faceted, grouped, free)),
            (grouped, root, prop.minima),
        ]
        for bounds, given, least in tried:
            for done in (bounds.evaluate(given), optimise(bounds, given, iterations=5, target=1e9)[1]):
                if not (done.value <= least + 1e-5).all():
                    return False
        outcome = search_of(settings, prop)
        if not (outcome.lower <= prop.minima + 1e-5).all():
            return False
    return True


def test_the_soundness_check_passes_unmutated(
    references: list[tuple[Property, SplitForm, Domains, Tensor]],
) -> None:
    assert len(references) >= 6 and _sound(references)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_soundness_check_notices(
    name: str,
    references: list[tuple[Property, SplitForm, Domains, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, attribute, mutant = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    assert not _sound(references)

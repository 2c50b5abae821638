from __future__ import annotations

import doctest
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.certification import branch, branch_rules
from gls_lirpa.certification.branch import AIM, BranchAndBound, Outcome, Settings
from gls_lirpa.certification.branch_queue import Queue
from gls_lirpa.certification.branch_rules import RULES
from gls_lirpa.certification.exact_lp import Optimum, minimise
from gls_lirpa.certification.milp import ExactOracle
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from gls_lirpa.engine import split_hull
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.boxes import linf_box, margin_spec
from gls_lirpa.engine.split import FormBuilder, SplitForm
from gls_lirpa.engine.split_bounds import Pass, SplitBounds, Subproblems, tightened
from gls_lirpa.engine.split_hull import hull_of
from gls_lirpa.engine.split_lirpa import lirpa_split_bounds
from gls_lirpa.errors import ConfigError
from gls_lirpa.models import build_model
from tests.exact_nets import KINDS, enumerate_minima, margins, problem, random_input, random_net

PLAIN = Settings(
    tightening_iterations=0, hull_iterations=0, attack_starts=0, attack_steps=0, root_iterations=2, iterations=2
)
"""Weak bounds and no descent: the tree must do the work."""


@pytest.mark.parametrize("module", [branch])
def test_docstring_examples(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0 and result.failed == 0


# ---------------------------------------------------------------- bounds of subproblems


def _random_subproblems(form: SplitForm, seed: int, count: int) -> Subproblems:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(count) % len(form.offset)
    start = SplitBounds(form).start(rows)
    signs = torch.randint(-1, 2, start.signs.shape, generator=generator).to(torch.int8)
    return replace(
        start,
        signs=signs,
        alpha=torch.rand(start.alpha.shape, generator=generator),
        beta=torch.rand(start.beta.shape, generator=generator) * 2,
        gamma=torch.rand(start.gamma.shape, generator=generator),
    )


def _form(kind: str, seed: int, *, width: int, eps: float = 0.3) -> tuple[nn.Module, Tensor, SplitForm]:
    model, x = random_net(kind, seed, width=width), random_input(seed)
    return model, x, FormBuilder(model, x).form(linf_box(x, eps), margin_spec(model(x).argmax(1), 3)[0])


@pytest.mark.parametrize("kind", [*KINDS, "cnn3-tiny"])
def test_bounds_equal_those_of_auto_lirpa(kind: str) -> None:
    for seed in range(3):
        if kind == "cnn3-tiny":
            model = build_model(kind, in_shape=(1, 8, 8), mean=(0.2,), std=(0.5,), init="kaiming", seed=seed).eval()
            x = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        else:
            model, x = random_net(kind, seed, width=16), random_input(seed)
        spec = margin_spec(model(x).argmax(1), int(model(x).shape[1]))[0]
        box = linf_box(x, 0.2)
        form = FormBuilder(model, x).form(box, spec)
        batch = _random_subproblems(form, seed, 16)
        ours = SplitBounds(form).evaluate(replace(batch, gamma=0 * batch.gamma)).value
        theirs = lirpa_split_bounds(BoundEngine(model, x), form, box, spec, batch)
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-5), (ours - theirs).abs().max()


def test_gradients_are_the_derivatives() -> None:
    _, _, form = _form("residual", 5, width=20)
    batch = _random_subproblems(form, 0, 8)
    batch = replace(batch, alpha=batch.alpha.double(), beta=batch.beta.double(), gamma=batch.gamma.double())
    bounds = SplitBounds(form, hull=hull_of(form, iterations=3), dtype=torch.float64)
    done = bounds.evaluate(batch)
    free = (batch.signs == 0).double()
    expected = {
        "alpha": free * done.coefficient.clamp(min=0) * done.z,
        "beta": -batch.signs * done.z,
        "gamma": -free * done.coefficient.clamp(max=0) * done.saving,
    }
    step = 1e-7
    assert form.neurons > 4 and float(expected["gamma"].abs().max()) > 1e-3
    for name, gradient in expected.items():
        for i in range(form.neurons):
            moved = getattr(batch, name).clone()
            moved[:, i] += step
            slope = (bounds.evaluate(replace(batch, **{name: moved})).value - done.value) / step
            assert torch.allclose(slope, gradient[:, i], atol=1e-5)


def test_optimised_bounds_reach_the_triangle_relaxation() -> None:
    """On one hidden layer with every sign fixed the relaxation is exact, and so must the bound become."""
    for seed in range(5):
        _, _, form = _form("dense", seed, width=8)
        signs = torch.ones(1, form.neurons, dtype=torch.int8)
        exact = minimise(form, 0, signs=signs[0])
        bounds = SplitBounds(form, dtype=torch.float64)
        start = replace(bounds.start(torch.tensor([0])), signs=signs)
        value = float(bounds.optimise(start, iterations=300, target=1e9)[1].value)
        assert value <= exact.bound + 1e-6
        if exact.status == "optimal":
            assert value > exact.bound - 0.02 * max(1.0, abs(exact.bound))


# ---------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Property:
    """A sample, a radius and the exact minima of its margins."""

    subject: Subject
    samples: OpenSamples
    minima: Tensor


def _minimum(builder: FormBuilder, model: nn.Module, x: Tensor, eps: float) -> float:
    spec = margin_spec(model(x).argmax(1), int(model(x).shape[1]))[0]
    form = builder.form(linf_box(x, eps), spec)
    return min(minimise(form, row).bound for row in range(len(spec)))


def _near_boundary(kind: str, seed: int, width: int) -> list[Property]:
    """The same sample just inside and just outside its robust radius, found by bisection on the MILP."""
    model, x = random_net(kind, seed, width=width), random_input(seed)
    builder, low, high = FormBuilder(model, x), 0.0, 0.7
    if _minimum(builder, model, x, high) > 0:
        return []
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if _minimum(builder, model, x, middle) > 0 else (low, middle)
    subject = problem(model, x, low)[0]
    found = []
    for eps in (low, high):
        samples = problem(model, x, eps, engine=subject.engine)[1]
        spec = margin_spec(samples.labels, 3)[0]
        form = builder.form(samples.box, spec)
        minima = torch.tensor([minimise(form, row).bound for row in range(2)], dtype=torch.float64)
        found.append(Property(subject, samples, minima))
    return found


def _check(prop: Property, found: Findings) -> str:
    """The verdict, after every claim of the stage is compared with the exact minima."""
    lower, counterexample = found.lower[0].double(), found.counterexamples[0]
    assert (lower <= prop.minima + 1e-5).all(), (lower, prop.minima)
    if counterexample is not None:
        box = prop.samples.box
        assert (counterexample >= box.lower[0]).all() and (counterexample <= box.upper[0]).all()
        replayed = float(margins(prop.subject.model, counterexample.unsqueeze(0), prop.samples.labels).min())
        assert replayed < 1e-6 and replayed >= float(prop.minima.min()) - 1e-5
        return "counterexample"
    return "verified" if float(lower.min()) > 0.5 * AIM else "unknown"


def _expected(prop: Property) -> str:
    scale = max(1.0, float(prop.subject.model(prop.samples.x).abs().max()))
    if abs(float(prop.minima.min())) < AIM * scale:
        return "either"
    return "verified" if float(prop.minima.min()) > 0 else "counterexample"


@pytest.mark.parametrize("kind", KINDS)
def test_branch_and_bound_equals_milp_equals_enumeration(kind: str) -> None:
    verdicts = []
    for seed in range(8):
        stages = BranchAndBound(), BranchAndBound(PLAIN), ExactOracle()
        for prop in _near_boundary(kind, seed, 6):
            exhaustive = enumerate_minima(prop.subject.model, prop.samples.box, prop.samples.labels)
            assert torch.allclose(prop.minima, torch.from_numpy(exhaustive), atol=1e-5)
            expected = _expected(prop)
            for stage in stages:
                found = stage(prop.subject, prop.samples, timeout=60.0)
                assert found.exhausted == [False]
                assert expected in ("either", _check(prop, found))
            verdicts.append(expected)
    assert verdicts.count("verified") >= 5 and verdicts.count("counterexample") >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_branch_and_bound_equals_milp_on_wider_networks(kind: str) -> None:
    nodes = properties = 0
    for seed in range(100, 106):
        stages = BranchAndBound(), BranchAndBound(replace(PLAIN, batch_size=16))
        for prop in _near_boundary(kind, seed, 20):
            expected = _expected(prop)
            for stage in stages:
                found = stage(prop.subject, prop.samples, timeout=60.0)
                assert found.exhausted == [False] and expected in ("either", _check(prop, found))
            nodes += _search(stages[1], prop).nodes
            properties += 1
    assert properties >= 8 and nodes > 3 * properties  # the trees were not trivial


def _search(stage: BranchAndBound, prop: Property, known: float = -torch.inf) -> Outcome:
    samples = prop.samples
    spec = margin_spec(samples.labels, 3)[0]
    return stage.search(prop.subject, samples.x[0], samples.box, spec, torch.full((2,), known))


def test_a_margin_at_the_threshold_gets_its_exact_minimum() -> None:
    """Between 0 and the margin that counts as proof, leaves decide: the bound is the LP's optimum."""
    checked = 0
    for seed in range(6):
        model, x = random_net("dense", seed, width=8), random_input(seed)
        builder, low, high = FormBuilder(model, x), 0.0, 0.7
        if _minimum(builder, model, x, high) > 0:
            continue
        for _ in range(22):
            middle = (low + high) / 2
            low, high = (middle, high) if _minimum(builder, model, x, middle) > 0 else (low, middle)
        subject, samples = problem(model, x, low)
        found = BranchAndBound(PLAIN)(subject, samples, timeout=30.0)
        minimum = _minimum(builder, model, x, low)
        assert found.exhausted == [False] and 0 <= minimum < 1e-4
        if found.counterexamples[0] is None:
            assert abs(float(found.lower.min()) - minimum) < 1e-5
            checked += 1
    assert checked >= 2


# ---------------------------------------------------------------- limits


@pytest.fixture(scope="module")
def hard() -> Property:
    """Robust, but not provable without splits."""
    model, x = random_net("dense", 101, width=40), random_input(101)
    subject, samples = problem(model, x, 0.139)
    form = FormBuilder(model, x).form(samples.box, margin_spec(samples.labels, 3)[0])
    minima = torch.tensor([minimise(form, row).bound for row in range(2)], dtype=torch.float64)
    return Property(subject, samples, minima)


WEAK = replace(PLAIN, iterations=1, root_iterations=1, batch_size=8, rule="widest", candidates=1, max_levels=1)


def test_the_node_limit_is_kept_and_gives_a_bound(hard: Property) -> None:
    full = _search(BranchAndBound(WEAK), hard)
    assert full.nodes > 60 and not full.exhausted and float(full.lower.min()) > 0
    previous = -torch.inf
    for limit in (2, 3, 10, 33, 60):
        outcome = _search(BranchAndBound(replace(WEAK, max_nodes=limit)), hard)
        assert outcome.nodes <= limit and outcome.exhausted and outcome.counterexample is None
        assert (outcome.lower <= hard.minima + 1e-5).all()
        assert previous <= float(outcome.lower.min())
        previous = float(outcome.lower.min())


def test_known_bounds_are_kept(hard: Property) -> None:
    outcome = _search(BranchAndBound(replace(WEAK, max_nodes=2)), hard, known=-1e-3)
    assert float(outcome.lower.min()) >= -1e-3 - 1e-9


def test_a_timeout_is_a_value_in_time(hard: Property) -> None:
    stage = BranchAndBound(replace(WEAK, batch_size=2))
    stage(hard.subject, hard.samples, timeout=0.0)  # builds the form's network once
    for limit in (0.0, 0.02):
        started = time.monotonic()
        found = stage(hard.subject, hard.samples, timeout=limit)
        assert time.monotonic() - started < limit + 2.0
        assert found.exhausted == [True] and found.counterexamples == [None]
        assert torch.isfinite(found.lower).all() and (found.lower[0].double() <= hard.minima + 1e-5).all()


def test_the_same_seed_gives_the_same_search(hard: Property) -> None:
    first, second = (_search(BranchAndBound(replace(WEAK, max_nodes=40)), hard) for _ in range(2))
    assert torch.equal(first.lower, second.lower) and first.nodes == second.nodes


def test_a_small_queue_changes_the_order_not_the_verdict(hard: Property, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch, "Queue", lambda max_mib: Queue(max_mib=0.002))
    outcome = _search(BranchAndBound(WEAK), hard)
    assert not outcome.exhausted and float(outcome.lower.min()) > 0


def test_a_radius_of_zero_is_the_network_itself() -> None:
    model, x = random_net("dense", 0, width=6), random_input(0)
    subject, samples = problem(model, x, 0.0)
    for stage in (BranchAndBound(), ExactOracle(decide=False)):
        found = stage(subject, samples, timeout=10.0)
        assert found.exhausted == [False] and found.counterexamples == [None]
        assert torch.allclose(found.lower, margins(model, x, samples.labels), atol=1e-5)


def test_only_open_classes_are_bounded(hard: Property) -> None:
    samples = replace(hard.samples, proven=torch.tensor([[False, True]]))
    found = BranchAndBound()(hard.subject, samples, timeout=30.0)
    assert torch.isfinite(found.lower[0, 0]) and found.lower[0, 1] == -torch.inf


def test_the_model_is_left_as_it_was(hard: Property) -> None:
    model = hard.subject.model
    before = [(p.clone(), p.requires_grad, p.grad) for p in model.parameters()]
    BranchAndBound()(hard.subject, hard.samples, timeout=30.0)
    for parameter, (value, wanted, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value) and parameter.requires_grad == wanted and parameter.grad is gradient


@pytest.mark.parametrize("rule", RULES.names())
def test_every_rule_decides(rule: str, hard: Property) -> None:
    for candidates in (1, 3):
        outcome = _search(BranchAndBound(Settings(rule=rule, candidates=candidates)), hard)
        assert not outcome.exhausted and float(outcome.lower.min()) > 0


def test_settings_are_checked() -> None:
    for wrong in ({"batch_size": 0}, {"iterations": 0}, {"max_nodes": 0}, {"attack_steps": -1}, {"rule": "gapp"}):
        with pytest.raises(ConfigError):
            Settings(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- mutations


def _mutated_evaluate(change: Callable[[Subproblems], Subproblems]) -> Callable[..., Pass]:
    original = SplitBounds.evaluate
    return lambda self, batch, *, primal=True: original(self, change(batch), primal=primal)


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


def _unsigned(batch: Subproblems) -> Subproblems:
    return replace(batch, beta=batch.beta * batch.signs)


def _negative_intercept(bounds: SplitBounds) -> None:
    bounds._intercept = -bounds._intercept


def _no_intercept(bounds: SplitBounds) -> None:
    bounds._intercept = 0 * bounds._intercept


def _steep_upper(bounds: SplitBounds) -> None:
    bounds._upper_slope = 1 - bounds._upper_slope


def _no_bias(bounds: SplitBounds) -> None:
    bounds._offsets = [0 * offset for offset in bounds._offsets]


def _one_child(batch: Subproblems, neurons: Tensor) -> Subproblems:
    both = _CHILDREN(batch, neurons)
    return both[slice(0, len(both) // 2)]


_CHILDREN = branch_rules.children
_PUSH = Queue.push


def _forgetful(self: Queue, batch: Subproblems, ranked: Tensor) -> None:
    _PUSH(self, batch[slice(1, None)], ranked[1:])


_FACET = split_hull._Neurons.facet


def _opposite_facet(self: split_hull._Neurons, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each weight of the facet on another input."""
    weight, offset = _FACET(self, values)
    return weight.flip(1), offset


def _low_facet(self: split_hull._Neurons, values: Tensor) -> tuple[Tensor, Tensor]:
    weight, offset = _FACET(self, values)
    return weight, offset - 0.1 * self.step.sum(1)


def _opposite_leaf(form: SplitForm, row: int, *, signs: Tensor, **options: float) -> Optimum:
    return minimise(form, row, signs=-signs, **options)  # type: ignore[arg-type]


def _flipped(batch: Subproblems) -> Subproblems:
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
    "β without the split's sign": (SplitBounds, "evaluate", _mutated_evaluate(_unsigned)),
    "β with the opposite sign": (SplitBounds, "evaluate", _mutated_evaluate(lambda b: replace(b, beta=-b.beta))),
    "active and inactive splits swapped": (SplitBounds, "evaluate", _mutated_evaluate(_flipped)),
    "lower slope above 1": (SplitBounds, "evaluate", _mutated_evaluate(lambda b: replace(b, alpha=b.alpha + 1))),
    "lower slope below 0": (SplitBounds, "evaluate", _mutated_evaluate(lambda b: replace(b, alpha=b.alpha - 1))),
    "hull above 1": (SplitBounds, "evaluate", _mutated_evaluate(lambda b: replace(b, gamma=b.gamma + 1))),
    "facets of the hull in the opposite order": (split_hull._Neurons, "facet", _opposite_facet),
    "facets of the hull without the corner's value": (split_hull._Neurons, "facet", _low_facet),
    "only one child is bounded": (branch, "children", _one_child),
    "the queue forgets a subproblem": (Queue, "push", _forgetful),
    "the LP of a leaf with the opposite signs": (branch, "minimise", _opposite_leaf),
}  # fmt: skip


@pytest.fixture(scope="module")
def references() -> list[tuple[Property, SplitForm, Subproblems, Tensor]]:
    """Properties with random subproblems of their forms and the exact minima of those."""
    found = []
    for kind in ("dense", "conv", "residual"):
        for seed in range(4):
            for prop in _near_boundary(kind, seed, 10)[1:]:
                spec = margin_spec(prop.samples.labels, 3)[0]
                form = FormBuilder(prop.subject.model, prop.samples.x).form(prop.samples.box, spec)
                batch = _random_subproblems(form, seed, 24)
                exact = [minimise(form, int(r), signs=s).bound for r, s in zip(batch.rows, batch.signs, strict=True)]
                found.append((prop, form, batch, torch.tensor(exact, dtype=torch.float64)))
    return found


def _sound(references: list[tuple[Property, SplitForm, Subproblems, Tensor]]) -> bool:
    """Every bound ≤ the exact minimum of its subproblem, optimised or not, and every verdict is right."""
    stage = BranchAndBound(replace(PLAIN, root_iterations=3, iterations=3))
    for prop, form, batch, exact in references:
        for hull in (None, hull_of(form, iterations=6)):
            bounds = SplitBounds(form, hull=hull, dtype=torch.float64)
            plain = replace(batch, gamma=batch.gamma if hull else 0 * batch.gamma)
            for done in (bounds.evaluate(plain), bounds.optimise(plain, iterations=5, target=1e9)[1]):
                if not (done.value <= exact + 1e-5).all():
                    return False
        outcome = _search(stage, prop)
        if not (outcome.lower <= prop.minima + 1e-5).all():
            return False
    return True


def test_the_soundness_check_passes_unmutated(
    references: list[tuple[Property, SplitForm, Subproblems, Tensor]],
) -> None:
    assert len(references) >= 6 and _sound(references)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_soundness_check_notices(
    name: str,
    references: list[tuple[Property, SplitForm, Subproblems, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, attribute, mutant = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    assert not _sound(references)


def test_the_hull_lies_above_the_network_and_helps() -> None:
    gained = 0
    for seed in range(8):
        _, _, form = _form("dense", seed, width=16, eps=0.4)
        hull = hull_of(form, iterations=30)
        rows = torch.arange(len(form.offset))
        values = []
        for candidate in (None, hull):
            bounds = SplitBounds(form, hull=candidate, dtype=torch.float64)
            values.append(bounds.optimise(bounds.start(rows), iterations=60, target=1e9)[1].value)
        gained += int((values[1] > values[0] + 1e-3).any())
        known = torch.rand(4000, form.inputs, generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
        known[:2000] = known[:2000].sign()
        for k, layer in enumerate(form.layers):
            v = (known @ layer.weight.t() + layer.offset).clamp(min=0)
            for row in rows.tolist():
                above = known @ hull.weights[k][row].t() + hull.offsets[k][row]
                assert (v <= above + 1e-9).all()
            known = torch.cat([known, v], 1)
    assert gained >= 2


def test_tightened_bounds_contain_the_network() -> None:
    for seed in range(5):
        _, _, form = _form("residual", seed, width=20, eps=0.4)
        tight = tightened(form, iterations=20)
        t = torch.rand(2000, form.inputs, generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
        known = t
        for layer in tight.layers:
            z = known @ layer.weight.t() + layer.offset
            assert (z >= layer.lower - 1e-9).all() and (z <= layer.upper + 1e-9).all()
            known = torch.cat([known, z.clamp(min=0)], 1)
        assert torch.allclose(tight.evaluate(t), form.evaluate(t), atol=1e-9)

"""Groups of neurons with common inputs: their inequalities at points, their bounds against the exact minimum."""

from __future__ import annotations

import doctest
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.certification.exact_lp import minimise
from gls_lirpa.engine import ascent, split_groups
from gls_lirpa.engine.boxes import linf_box
from gls_lirpa.engine.split import FormBuilder, SplitForm
from gls_lirpa.engine.split_bounds import SplitBounds
from gls_lirpa.engine.split_groups import grouped
from gls_lirpa.engine.split_hull import hull_of
from gls_lirpa.engine.split_tighten import cuts_of, tightened
from tests.branch_problems import random_subproblems, root_cuts, small_form
from tests.exact_nets import KINDS


@pytest.mark.parametrize("module", [ascent, split_groups])
def test_docstring_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def _positions(form: SplitForm, seed: int) -> Tensor:
    """Points of the box, its centre and many of its corners."""
    t = torch.rand(400, form.inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    return torch.cat([t, t.sign(), torch.zeros_like(t[:1])])


def _pre_activations(form: SplitForm, t: Tensor) -> Tensor:
    known = t
    found = []
    for layer in form.layers:
        found.append(known @ layer.weight.t() + layer.offset)
        known = torch.cat([known, found[-1].clamp(min=0)], 1)
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_hold_in_the_whole_box(kind: str) -> None:
    checked = 0
    for seed in range(4):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        cuts = root_cuts(form, hull_of(form, iterations=5), iterations=20)
        assert cuts is not None
        t = _positions(form, seed)
        first = form.layers[0]
        known = torch.cat([t, (t @ first.weight.t() + first.offset).clamp(min=0)], 1)
        excess = torch.einsum("rcn,pn->rcp", cuts.weight, known) - cuts.offset.unsqueeze(2)
        assert (excess <= 1e-9).all()
        checked += int((cuts.weight != 0).any(2).sum())
    assert checked >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_of_subproblems_hold_and_tighten_them(kind: str) -> None:
    """Cuts made for split subproblems: true in the whole box, and better there than those of the root."""
    gained = 0
    for seed in range(4):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        batch = random_subproblems(form, seed, 12)
        few = torch.rand(batch.signs.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
        batch = replace(batch, signs=batch.signs * few, gamma=0 * batch.gamma)
        exact = torch.tensor(
            [minimise(form, int(r), signs=s).bound for r, s in zip(batch.rows, batch.signs, strict=True)]
        ).double()
        bounds = SplitBounds(form, dtype=torch.float64)
        old = bounds.with_cuts(root_cuts(form, None, iterations=60))
        _, before = old.optimise(replace(batch, kappa=old.start(batch.rows).kappa), iterations=30, target=1e9)
        batch, _ = bounds.optimise(batch, iterations=30, target=1e9)
        found = cuts_of(bounds, batch, iterations=60)
        assert found is not None
        cuts, renewed = found
        assert renewed.family.tolist() == list(range(12)) and torch.equal(renewed.signs, batch.signs)
        t = _positions(form, seed)
        first = form.layers[0]
        known = torch.cat([t, (t @ first.weight.t() + first.offset).clamp(min=0)], 1)
        assert (torch.einsum("rcn,pn->rcp", cuts.weight, known) <= cuts.offset.unsqueeze(2) + 1e-9).all()
        _, after = bounds.with_cuts(cuts).optimise(renewed, iterations=30, target=1e9)
        assert (before.value <= exact + 1e-5).all() and (after.value <= exact + 1e-5).all()
        gained += int((after.value > before.value + 1e-3).sum()) - int((after.value < before.value - 1e-3).sum())
    assert gained >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_over_the_first_layer_a_subproblem_stays_below_its_row(kind: str) -> None:
    """weight · [t; v₁] + constant ≤ row(t) wherever t has the subproblem's signs, and both signs occur."""
    signs_seen = set()
    for seed in range(3):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        bounds = SplitBounds(form, dtype=torch.float64)
        t = _positions(form, seed)[:60]
        batch = random_subproblems(form, seed, 60)
        z = _pre_activations(form, t)
        signs = torch.where(batch.signs != 0, z.sign(), 0).to(torch.int8)
        batch = replace(batch, signs=signs, gamma=0 * batch.gamma)
        weight, constant = bounds.over_first_layer(batch)
        first = len(form.layers[0])
        known = torch.cat([t, z[:, :first].clamp(min=0)], 1)
        values = form.evaluate(t)[torch.arange(60), batch.rows]
        assert ((weight * known).sum(1) + constant <= values + 1e-9).all()
        assert not weight[:, form.inputs :][signs[:, :first] != 0].any()
        signs_seen |= set(signs[:, :first].flatten().tolist())
    assert signs_seen == {-1, 0, 1}


def _one_hidden_layer(seed: int, *, sign: float | None) -> SplitForm:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)).eval()
    if sign is not None:
        last = model[3]
        assert isinstance(last, nn.Linear)
        nn.init.uniform_(last.weight, 0.2, 1.0)
        last.weight.data *= sign
    return FormBuilder(model, torch.zeros(1, 5)).form(linf_box(torch.full((1, 5), 0.5), 0.5), torch.eye(2))


@pytest.mark.parametrize("seed", range(6))
def test_one_group_of_concave_terms_is_exact(seed: int) -> None:
    """−Σ ω max(z, 0) is concave, so the minimum of its envelope is its own."""
    form = _one_hidden_layer(seed, sign=-1.0)
    found = grouped(form.layers[0], form.weight, form.offset, iterations=400)
    assert found is not None and form.neurons >= 3
    exact = torch.tensor([minimise(form, row).bound for row in range(2)], dtype=torch.float64)
    assert (found.value <= exact + 1e-6).all()
    torch.testing.assert_close(found.value, exact, atol=5e-3, rtol=0)


@pytest.mark.parametrize("seed", range(10))
def test_bounds_of_rows_are_sound(seed: int) -> None:
    form = _one_hidden_layer(seed, sign=None)
    exact = torch.tensor([minimise(form, row).bound for row in range(2)], dtype=torch.float64)
    for iterations in (1, 5, 60):
        found = grouped(form.layers[0], form.weight, form.offset, iterations=iterations)
        assert found is not None and (found.value <= exact + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_second_layer_bounds_hold_and_cuts_help(kind: str) -> None:
    gained = 0
    for seed in range(4):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        plain, tight = tightened(form, iterations=10), tightened(form, iterations=10, group_iterations=60)
        t = _positions(form, seed)
        torch.testing.assert_close(tight.evaluate(t), form.evaluate(t), atol=1e-9, rtol=0)
        exact = torch.tensor([minimise(form, row).bound for row in range(len(form.offset))], dtype=torch.float64)
        values = []
        for each, groups in ((plain, 0), (tight, 60)):
            hull = hull_of(each, iterations=20)
            cuts = root_cuts(each, hull, iterations=groups) if groups else None
            bounds = SplitBounds(each, hull=hull, dtype=torch.float64).with_cuts(cuts)
            start = bounds.start(torch.arange(len(form.offset)))
            values.append(bounds.optimise(start, iterations=40, target=1e9)[1].value)
            assert (values[-1] <= exact + 1e-6).all()
        gained += int((values[1] > values[0] + 1e-3).sum())
    assert gained >= 2


def test_groups_with_too_many_subsets_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, form = small_form("dense", 0, width=16, eps=0.4)
    monkeypatch.setattr(split_groups, "LARGEST", 10)
    assert grouped(form.layers[0], form.layers[1].weight, form.layers[1].offset, iterations=3) is None
    assert root_cuts(form, None, iterations=3) is None
    plain, tight = tightened(form, iterations=10), tightened(form, iterations=10, group_iterations=5)
    assert torch.equal(plain.lower, tight.lower) and torch.equal(plain.upper, tight.upper)

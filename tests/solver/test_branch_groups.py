"""Groups of neurons with common inputs: their inequalities at points, their bounds against the exact minimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.solver import SolverSettings, group_ascent
from gls_lirpa.solver import groups as groups_module
from gls_lirpa.solver.ascent import optimise
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.builder import FormBuilder
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.exact import minimise
from gls_lirpa.solver.facets import facets_of
from gls_lirpa.solver.form import SplitForm, UnstableLayer
from gls_lirpa.solver.group_ascent import Ascended, ascend_groups, slopes_for
from gls_lirpa.solver.groups import Groups
from gls_lirpa.solver.subsets import subsets
from gls_lirpa.solver.tighten import tightened
from tests.helpers.branch_problems import random_domains, root_envelopes, small_form
from tests.helpers.exact_nets import KINDS


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
def test_envelopes_lie_above_the_weighted_sums_for_any_weights(kind: str) -> None:
    """Σ ω v ≤ c·t + d in the whole box, for weights and slopes that were not made for each other."""
    checked, joined = 0, 0
    for seed in range(4):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        envelopes = root_envelopes(form, facets_of(form, iterations=5), iterations=20)
        assert envelopes is not None
        groups, first = envelopes.groups, form.layers[0]
        joined += int((groups.members >= 0).sum(1).max()) > 1
        generator = torch.Generator().manual_seed(seed)
        omega = (torch.rand(2, len(first), generator=generator) * 2 - 0.5).clamp(min=0).double()
        terms = envelopes.terms(omega, torch.tensor([0, len(form.offset) - 1]))
        t = _positions(form, seed)
        v = (t @ first.weight.t() + first.offset).clamp(min=0)
        for bucket in terms.buckets:
            for row, group, members in zip(bucket.rows, bucket.groups, bucket.members, strict=True):
                above = t[:, groups.index[group]] @ terms.slope[row, group] + terms.level[row, group]
                assert (v[:, members] @ omega[row, members] <= above + 1e-9).all()
                checked += 1
    assert checked >= 8 and joined >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_of_subproblems_tighten_them(kind: str) -> None:
    """Those made for split subproblems are sound, and better there than those of the root."""
    gained = 0
    for seed in range(4):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        batch = random_domains(form, seed, 12)
        few = torch.rand(batch.signs.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
        batch = replace(batch, signs=batch.signs * few)
        exact = torch.tensor(
            [minimise(form, int(r), signs=s).bound for r, s in zip(batch.rows, batch.signs, strict=True)]
        ).double()
        bounds = SplitBounds(form, dtype=torch.float64)
        root = root_envelopes(form, None, iterations=60)
        assert root is not None
        batch, without = optimise(bounds, batch, iterations=30, target=1e9)
        before = bounds.with_relaxation(root).evaluate(batch)
        found = slopes_for(bounds, batch, root.groups, settings=SolverSettings(group_iterations=60))
        assert found is not None
        envelopes, _, renewed = found
        assert renewed.slopes.tolist() == list(range(12)) and torch.equal(renewed.signs, batch.signs)
        after = bounds.with_relaxation(envelopes).evaluate(renewed)
        for done in (without, before, after):
            assert (done.value <= exact + 1e-5).all()
        gained += int((after.value > before.value + 1e-3).sum()) - int((after.value < before.value - 1e-3).sum())
    assert gained >= 3


@pytest.mark.parametrize("most", [8, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_buckets_of_another_pass_give_sound_bounds(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small buckets, neurons are left outside."""
    outside = 0
    for seed in range(3):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        groups = Groups.of(form.layers[0], torch.ones_like(form.layers[0].offset))
        assert groups is not None
        monkeypatch.setattr(groups_module, "AT_ONCE", most)
        batch = replace(random_domains(form, seed, 6), signs=0 * random_domains(form, seed, 6).signs)
        plain = SplitBounds(form, dtype=torch.float64)
        found = slopes_for(plain, batch, groups, settings=SolverSettings(group_iterations=10))
        assert found is not None
        bounds, batch = plain.with_relaxation(found[0]), found[2]
        _, terms = bounds.with_terms(batch)
        assert terms is not None
        weight = plain.over_first_layer(batch).weight
        outside += int((terms.omega == 0)[weight[:, form.inputs :] < 0].sum())
        exact = torch.tensor([minimise(form, int(r)).bound for r in batch.rows]).double()
        other = replace(batch, alpha=1 - batch.alpha)
        assert (bounds.with_terms(other, buckets=terms.buckets)[0].value <= exact + 1e-6).all()
        monkeypatch.undo()
    assert (outside > 0) == (most == 1)


def test_a_domain_goes_on_where_its_parent_was_and_a_new_one_begins_with_the_triangles() -> None:
    """Sound either way; after few steps the parent's slopes are ahead."""
    few, many = (SolverSettings(group_iterations=n, renewal_iterations=5) for n in (5, 60))
    gained = 0.0
    for seed in range(4):
        _, _, form = small_form("dense", seed, width=24, eps=0.4)
        bounds = SplitBounds(form, dtype=torch.float64)
        roots = Domains.roots(form, torch.arange(2), torch.float64)
        batch, _ = optimise(bounds, roots, iterations=30, target=torch.inf)
        exact = torch.tensor([minimise(form, row).bound for row in range(2)]).double()
        groups = Groups.of(form.layers[0], torch.ones_like(form.layers[0].offset))
        assert groups is not None
        made = slopes_for(bounds, batch, groups, settings=many)
        assert made is not None and len(made[1]) == 2
        values = []
        for start in ([made[1][0], None], [None, None]):
            found = slopes_for(bounds, batch, groups, start, settings=few)
            assert found is not None
            envelopes, _, renewed = found
            values.append(bounds.with_relaxation(envelopes).evaluate(renewed).value)
            assert (values[-1] <= exact + 1e-6).all()
        gained += float(values[0][0] - values[1][0])
    assert gained > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_over_the_first_layer_a_subproblem_stays_below_its_row(kind: str) -> None:
    """weight · [t; v₁] + constant ≤ row(t) wherever t has the subproblem's signs, and both signs occur."""
    signs_seen = set()
    for seed in range(3):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        bounds = SplitBounds(form, dtype=torch.float64)
        t = _positions(form, seed)[:60]
        batch = random_domains(form, seed, 60)
        z = _pre_activations(form, t)
        signs = torch.where(batch.signs != 0, z.sign(), 0).to(torch.int8)
        batch = replace(batch, signs=signs)
        over = bounds.over_first_layer(batch)
        first = len(form.layers[0])
        known = torch.cat([t, z[:, :first].clamp(min=0)], 1)
        values = form.evaluate(t)[torch.arange(60), batch.rows]
        assert ((over.weight * known).sum(1) + over.offset <= values + 1e-9).all()
        assert not over.weight[:, form.inputs :][signs[:, :first] != 0].any()
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


def _ascended(form: SplitForm, *, iterations: int) -> Ascended | None:
    groups = Groups.of(form.layers[0])
    assert groups is not None
    return ascend_groups(form, groups, iterations=iterations)


@pytest.mark.parametrize("seed", range(6))
def test_one_group_of_concave_terms_is_exact(seed: int) -> None:
    """−Σ ω max(z, 0) is concave, so the minimum of its envelope is its own."""
    form = _one_hidden_layer(seed, sign=-1.0)
    found = _ascended(form, iterations=400)
    assert found is not None and form.neurons >= 3
    exact = torch.tensor([minimise(form, row).bound for row in range(2)], dtype=torch.float64)
    assert (found.value <= exact + 1e-6).all()
    torch.testing.assert_close(found.value, exact, atol=5e-3, rtol=0)


@pytest.mark.parametrize("seed", range(10))
def test_bounds_of_rows_are_sound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form = _one_hidden_layer(seed, sign=None)
    groups = Groups.of(form.layers[0])
    assert groups is not None
    exact = torch.tensor([minimise(form, row).bound for row in range(2)], dtype=torch.float64)
    for most in (8, 2):  # of which the second leaves neurons to their triangles
        monkeypatch.setattr(groups_module, "AT_ONCE", most)
        for iterations in (1, 5, 60):
            found = ascend_groups(form, groups, iterations=iterations)
            assert found is not None and (found.value <= exact + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_second_layer_bounds_hold_and_groups_help(kind: str) -> None:
    gained = 0
    for seed in range(10):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        plain, tight = tightened(form, iterations=10), tightened(form, iterations=10, group_iterations=60)
        t = _positions(form, seed)
        torch.testing.assert_close(tight.evaluate(t), form.evaluate(t), atol=1e-9, rtol=0)
        exact = torch.tensor([minimise(form, row).bound for row in range(len(form.offset))], dtype=torch.float64)
        values = []
        for each, groups in ((plain, 0), (tight, 60)):
            facets = facets_of(each, iterations=20)
            envelopes = root_envelopes(each, facets, iterations=groups) if groups else None
            bounds = SplitBounds(each, facets=facets, dtype=torch.float64).with_relaxation(envelopes)
            start = Domains.roots(each, torch.arange(len(form.offset)), torch.float64)
            values.append(optimise(bounds, start, iterations=40, target=1e9)[1].value)
            assert (values[-1] <= exact + 1e-6).all()
        gained += int((values[1] > values[0] + 1e-3).sum())
    assert gained >= 2


def test_groups_with_too_many_subsets_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, form = small_form("dense", 0, width=16, eps=0.4)
    groups = Groups.of(form.layers[0])
    assert groups is not None
    monkeypatch.setattr(group_ascent, "LARGEST", 10)
    assert ascend_groups(form.below(1), groups, iterations=3) is None
    plain, tight = tightened(form, iterations=10), tightened(form, iterations=10, group_iterations=5)
    assert torch.equal(plain.lower, tight.lower) and torch.equal(plain.upper, tight.upper)
    monkeypatch.setattr(groups_module, "LARGEST", 10)
    assert Groups.of(form.layers[0]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_of_similar_rows_are_a_better_start(kind: str) -> None:
    """Sound, and after few steps higher than from the triangles; made into neurons' slopes, Σ ω g = c."""
    gained = 0.0
    for seed in range(4):
        _, _, form = small_form(kind, seed, width=16, eps=0.4)
        first = form.layers[0]
        groups = Groups.of(first, torch.ones_like(first.offset))
        assert groups is not None
        exact = torch.tensor([minimise(form, row).bound for row in range(len(form.offset))]).double()
        bounds = SplitBounds(form, dtype=torch.float64)
        roots = Domains.roots(form, torch.arange(len(exact)), torch.float64)
        batch, _ = optimise(bounds, roots, iterations=30, target=torch.inf)
        rows = bounds.over_first_layer(batch)
        noise = torch.randn(rows.weight.shape, generator=torch.Generator().manual_seed(seed)).double()
        like = replace(rows, weight=rows.weight * (1 + 0.02 * noise))
        before = ascend_groups(like, groups, iterations=100)
        assert before is not None
        omega, g = before.slopes.omega, before.slopes.of_neurons(groups)
        total = torch.zeros_like(before.slopes.slope).index_add_(1, groups.group, omega.unsqueeze(2) * g)
        torch.testing.assert_close(total, before.slopes.slope * (total != 0), atol=1e-9, rtol=0)
        start = before.alpha, before.slopes
        warm, cold = (ascend_groups(rows, groups, iterations=6, start=s) for s in (start, None))
        assert warm is not None and cold is not None
        assert (warm.value <= exact + 1e-6).all()
        gained += float((warm.value - cold.value).sum())
    assert gained > 0.01


def test_highest_goes_through_every_subset() -> None:
    """Values and subsets of overlapping places against all 2ᵏ sums, where halves read inputs of their own."""
    generator = torch.Generator().manual_seed(0)
    rows = 5
    for most, step in ((3, 2), (4, 3), (6, 1), (1, 4)):
        count, width = 2 * most, 4
        weight = torch.zeros(count, step * count + width, dtype=torch.float64)
        for place in range(most):
            window = slice(step * place, step * place + width)
            weight[2 * place : 2 * place + 2, window] = torch.randn(2, width, generator=generator, dtype=torch.float64)
        offset = torch.randn(count, generator=generator, dtype=torch.float64)
        reach = weight.abs().sum(1) + offset.abs()
        layer = UnstableLayer("z", torch.arange(count), weight, offset, -reach, reach)
        groups = Groups.of(layer, torch.ones_like(offset))
        assert groups is not None and len(groups.members) == 1
        slopes = torch.randn(rows, count, groups.weight.shape[1], generator=generator, dtype=torch.float64)
        omega = torch.rand(rows, count, generator=generator, dtype=torch.float64)
        (bucket,) = groups.buckets(omega > 0, slopes, torch.arange(rows))
        assert bucket.crossing < bucket.weight.shape[2] or most == 1
        own = omega[bucket.rows.unsqueeze(1), bucket.members]
        chosen = subsets(count).double()
        slope = torch.randn(rows, bucket.weight.shape[2], generator=generator, dtype=torch.float64)
        sums = chosen @ (own.unsqueeze(2) * bucket.weight)
        values = (sums - slope.unsqueeze(1)).abs().sum(2) + (own * bucket.offset) @ chosen.t()
        expected = values.topk(min(7, 2**count), dim=1)
        best, subset = bucket.sums(own).highest(slope, 7)
        torch.testing.assert_close(best, expected.values, atol=1e-12, rtol=0)
        assert torch.equal(subset, expected.indices)
        torch.testing.assert_close(
            bucket.sums(own).of(subset)[0], sums.gather(1, subset.unsqueeze(2).expand(-1, -1, sums.shape[2]))
        )

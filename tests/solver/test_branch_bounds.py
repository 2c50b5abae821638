"""Bounds of domains: against auto_LiRPA's, their own derivatives, and the network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.models import build_model
from gls_lirpa.solver.ascent import optimise
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.builder import FormBuilder
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.exact import minimise
from gls_lirpa.solver.facets import facets_of
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.operators import OperatorBounds
from gls_lirpa.solver.tighten import tightened
from tests.helpers.branch_problems import random_domains, root_envelopes, small_form
from tests.helpers.exact_nets import KINDS, random_input, random_net
from tests.helpers.lirpa_reference import lirpa_split_bounds


def _network(kind: str, seed: int) -> tuple[nn.Module, Tensor]:
    if kind != "cnn3-tiny":
        return random_net(kind, seed, width=16), random_input(seed)
    model = build_model(kind, in_shape=(1, 8, 8), mean=(0.2,), std=(0.5,), init="kaiming", seed=seed).eval()
    return model.requires_grad_(False), torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [*KINDS, "cnn3-tiny"])
def test_bounds_equal_those_of_auto_lirpa(kind: str) -> None:
    for seed in range(3):
        model, x = _network(kind, seed)
        spec = margin_spec(model(x).argmax(1), int(model(x).shape[1]))[0]
        box = linf_box(x, 0.2)
        form = FormBuilder(model, x).form(box, spec)
        batch = random_domains(form, seed, 16)
        ours = SplitBounds(form).evaluate(batch).value
        theirs = lirpa_split_bounds(BoundEngine(model, x), form, box, spec, batch)
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-5), (ours - theirs).abs().max()


@pytest.mark.parametrize("kind", [*KINDS, "cnn3-tiny"])
def test_the_networks_own_maps_give_the_same_pass(kind: str) -> None:
    """Bounds and the minimising point with z, v and λ, with and without a matrix."""
    for seed in range(3):
        model, x = _network(kind, seed)
        spec = margin_spec(model(x).argmax(1), int(model(x).shape[1]))[0]
        builder = FormBuilder(model, x)
        stable = builder.stability(linf_box(x, 0.2), spec)
        form, operators = builder.split(stable), builder.operators(stable)
        assert torch.equal(form.lower, operators.lower) and torch.equal(form.upper, operators.upper)
        batch = random_domains(form, seed, 16)
        dense = SplitBounds(form, dtype=torch.float64).evaluate(batch)
        free = OperatorBounds(operators).evaluate(batch)
        for name in ("value", "z", "v", "coefficient"):
            torch.testing.assert_close(getattr(free, name), getattr(dense, name), atol=1e-9, rtol=1e-9)
        assert torch.equal(free.t, dense.t) and torch.equal(form.point(free.t), operators.point(free.t))
        part = OperatorBounds(operators).evaluate(batch, primal=False)
        assert torch.equal(part.value, free.value) and part.z.numel() == 0


@pytest.mark.parametrize(("kind", "grouped"), [("residual", False), ("dense", True)])
def test_gradients_are_the_derivatives(kind: str, grouped: bool) -> None:
    _, _, form = small_form(kind, 5, width=20, eps=0.5 if grouped else 0.3)
    batch = random_domains(form, 0, 8)
    few = torch.rand(batch.signs.shape, generator=torch.Generator().manual_seed(1)) < (0.3 if grouped else 1.0)
    batch = replace(batch, signs=batch.signs * few)
    batch = replace(batch, alpha=batch.alpha.double(), beta=batch.beta.double(), gamma=batch.gamma.double())
    bounds = SplitBounds(form, facets=facets_of(form, iterations=3), dtype=torch.float64)
    if grouped:
        bounds = bounds.with_relaxation(root_envelopes(form, facets_of(form, iterations=3), iterations=3))
    # Buckets of another pass, as in later iterations: some of their neurons have weight 0 here.
    _, other = bounds.with_terms(replace(batch, alpha=1 - batch.alpha, beta=2 * batch.beta))
    buckets = None if other is None else other.buckets
    done, terms = bounds.with_terms(batch, buckets=buckets)
    free = (batch.signs == 0).double()
    expected = {
        "alpha": free * done.coefficient.clamp(min=0) * done.z,
        "beta": -batch.signs * done.z,
        "gamma": -free * done.coefficient.clamp(max=0) * done.saving,
    }
    step = 1e-7
    assert form.neurons > 4 and all(float(gradient.abs().max()) > 1e-3 for gradient in expected.values())
    if grouped:
        assert terms is not None and max(bucket.members.shape[1] for bucket in terms.buckets) >= 2
        weights = [terms.omega[each.rows.unsqueeze(1), each.members].flatten() for each in terms.buckets]
        assert (torch.cat(weights) == 0).any() and (torch.cat(weights) > 0).any()
    for name, gradient in expected.items():
        for i in range(gradient.shape[1]):
            moved = getattr(batch, name).clone()
            moved[:, i] += step
            slope = (bounds.with_terms(replace(batch, **{name: moved}), buckets=buckets)[0].value - done.value) / step
            assert torch.allclose(slope, gradient[:, i], atol=1e-5)


def test_optimised_bounds_reach_the_triangle_relaxation() -> None:
    """On one hidden layer with every sign fixed the relaxation is exact, and so must the bound become."""
    for seed in range(5):
        _, _, form = small_form("dense", seed, width=8)
        signs = torch.ones(1, form.neurons, dtype=torch.int8)
        exact = minimise(form, 0, signs=signs[0])
        bounds = SplitBounds(form, dtype=torch.float64)
        start = replace(Domains.roots(form, torch.tensor([0]), torch.float64), signs=signs)
        value = float(optimise(bounds, start, iterations=300, target=1e9)[1].value)
        assert value <= exact.bound + 1e-6
        if exact.status == "optimal":
            assert value > exact.bound - 0.02 * max(1.0, abs(exact.bound))


def test_facets_lie_above_the_network_and_help() -> None:
    gained = 0
    for seed in range(8):
        _, _, form = small_form("dense", seed, width=16, eps=0.4)
        facets = facets_of(form, iterations=30)
        rows = torch.arange(len(form.offset))
        values = []
        for candidate in (None, facets):
            bounds = SplitBounds(form, facets=candidate, dtype=torch.float64)
            roots = Domains.roots(form, rows, torch.float64)
            values.append(optimise(bounds, roots, iterations=60, target=1e9)[1].value)
        gained += int((values[1] > values[0] + 1e-3).any())
        known = torch.rand(4000, form.inputs, generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
        known[:2000] = known[:2000].sign()
        for k, layer in enumerate(form.layers):
            v = (known @ layer.weight.t() + layer.offset).clamp(min=0)
            for row in rows.tolist():
                above = known @ facets.weights[k][row].t() + facets.offsets[k][row]
                assert (v <= above + 1e-9).all()
            known = torch.cat([known, v], 1)
    assert gained >= 2


def _deep_form(seed: int) -> SplitForm:
    torch.manual_seed(seed)
    hidden = [part for _ in range(2) for part in (nn.Linear(10, 10), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 10), nn.ReLU(), *hidden, nn.Linear(10, 3)).eval()
    return FormBuilder(model, torch.zeros(1, 5)).form(linf_box(torch.full((1, 5), 0.5), 0.5), torch.eye(3))


def test_tightened_bounds_contain_the_network() -> None:
    narrower = 0.0
    for seed in range(5):
        form = _deep_form(seed)
        tight = tightened(form, iterations=20)
        t = torch.rand(2000, form.inputs, generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
        known = t
        for layer in tight.layers:
            z = known @ layer.weight.t() + layer.offset
            assert (z >= layer.lower - 1e-9).all() and (z <= layer.upper + 1e-9).all()
            known = torch.cat([known, z.clamp(min=0)], 1)
        assert torch.allclose(tight.evaluate(t), form.evaluate(t), atol=1e-9)
        assert len(form.layers) == 3 and len(form.layers[2])
        before, after = ((each.layers[2].upper - each.layers[2].lower).sum() for each in (form, tight))
        narrower += float(before - after)
    assert narrower > 0.1

"""Multi-neuron slopes in a tree begin with those of the parent, or with the triangles where there are none."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gls_lirpa.solver import SolverSettings
from gls_lirpa.solver.ascent import optimise
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.exact import minimise
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.slope_store import SlopeStore
from tests.helpers.branch_problems import small_form

SETTINGS = SolverSettings(group_iterations=60, renewal_iterations=5, slopes_at_once=4)


def _roots(seed: int) -> tuple[SplitForm, SplitBounds, Domains]:
    _, _, form = small_form("dense", seed, width=24, eps=0.4)
    bounds = SplitBounds(form, dtype=torch.float64)
    batch, _ = optimise(bounds, Domains.roots(form, torch.arange(2), torch.float64), iterations=30, target=torch.inf)
    return form, bounds, batch


def _made(store: SlopeStore, bounds: SplitBounds, batch: Domains, others: set[int]) -> tuple[Tensor, Domains]:
    found = store.make(bounds, batch, others=others)
    assert found is not None
    envelopes, batch = found
    return bounds.with_relaxation(envelopes).evaluate(batch).value, batch


def test_a_domain_goes_on_where_it_was_and_a_new_one_begins_with_the_triangles() -> None:
    gained = 0.0
    for seed in range(4):
        form, bounds, batch = _roots(seed)
        exact = torch.tensor([minimise(form, row).bound for row in range(2)]).double()
        store = SlopeStore(SETTINGS, rows=2)
        first, own = _made(store, bounds, batch[:1], {1})
        waited, other = _made(store, bounds, batch[1:], {int(own.slopes)})
        again, _ = _made(store, bounds, own, {int(other.slopes)})
        assert own.slopes.tolist() == [2] and other.slopes.tolist() == [3]
        for value, row in ((first, 0), (waited, 1), (again, 0)):
            assert float(value) <= float(exact[row]) + 1e-6
        forgotten = SlopeStore(SETTINGS, rows=2)
        _made(forgotten, bounds, batch[:1], set())
        _made(forgotten, bounds, batch[1:], set())
        anew, _ = _made(forgotten, bounds, own, set())
        gained += float(again - anew)
    assert gained > 1e-3


def test_fewer_at_once_live_longer() -> None:
    store = SlopeStore(SETTINGS, rows=1)
    assert store.at_once == 4 and store.lifetime == 1
    store.at_once = 2
    assert store.lifetime == 4
    assert SlopeStore(replace(SETTINGS, group_iterations=0), rows=1).at_once == 0

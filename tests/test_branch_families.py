"""Families: slopes begin with those of the parent, or with the triangles where there are none."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gls_lirpa.certification.branch_families import Families
from gls_lirpa.certification.branch_settings import Settings
from gls_lirpa.certification.exact_lp import minimise
from gls_lirpa.engine.split import SplitForm
from gls_lirpa.engine.split_bounds import SplitBounds, Subproblems
from tests.branch_problems import small_form

SETTINGS = Settings(group_iterations=60, renewal_iterations=5, families=4)


def _roots(seed: int) -> tuple[SplitForm, SplitBounds, Subproblems]:
    _, _, form = small_form("dense", seed, width=24, eps=0.4)
    bounds = SplitBounds(form, dtype=torch.float64)
    batch, _ = bounds.optimise(bounds.start(torch.arange(2)), iterations=30, target=torch.inf)
    return form, bounds, batch


def _made(families: Families, bounds: SplitBounds, batch: Subproblems, others: set[int]) -> tuple[Tensor, Subproblems]:
    found = families.make(bounds, batch, others=others)
    assert found is not None
    envelopes, batch = found
    return bounds.with_envelopes(envelopes).evaluate(batch).value, batch


def test_a_family_goes_on_where_it_was_and_a_new_one_begins_with_the_triangles() -> None:
    gained = 0.0
    for seed in range(4):
        form, bounds, batch = _roots(seed)
        exact = torch.tensor([minimise(form, row).bound for row in range(2)]).double()
        families = Families(SETTINGS, rows=2)
        first, own = _made(families, bounds, batch[:1], {1})
        waited, other = _made(families, bounds, batch[1:], {int(own.family)})
        again, _ = _made(families, bounds, own, {int(other.family)})
        assert own.family.tolist() == [2] and other.family.tolist() == [3]
        for value, row in ((first, 0), (waited, 1), (again, 0)):
            assert float(value) <= float(exact[row]) + 1e-6
        forgotten = Families(SETTINGS, rows=2)
        _made(forgotten, bounds, batch[:1], set())
        _made(forgotten, bounds, batch[1:], set())
        anew, _ = _made(forgotten, bounds, own, set())
        gained += float(again - anew)
    assert gained > 1e-3


def test_fewer_at_once_live_longer() -> None:
    families = Families(SETTINGS, rows=1)
    assert families.at_once == 4 and families.lifetime == 1
    families.at_once = 2
    assert families.lifetime == 4
    assert Families(replace(SETTINGS, group_iterations=0), rows=1).at_once == 0

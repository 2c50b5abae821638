"""The attack whose points exchange windows: stronger than independent starts, inside the box, repeatable."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.attacks import Forward
from gls_lirpa.base.boxes import Box
from gls_lirpa.solver import exchange
from gls_lirpa.solver.exchange import exchange_attack
from tests.helpers.branch_problems import RENEWING, near_boundary, search_of
from tests.helpers.exact_nets import margins as margins_of

ROUNDS = 300


def two_wells(x: Tensor) -> Tensor:
    """Negative only where every 2 × 2 block of the image is near 1; from most starts a block goes down to 0."""
    mean = nn.functional.avg_pool2d(x, 2).flatten(1)
    wells = torch.minimum(-0.6 + 2 * mean, -1 + 4 * (1 - mean))
    return (wells + 1).sum(1, keepdim=True) - 0.2


def attack(margins: Forward, box: Box, *, rounds: int = ROUNDS, seed: int = 0, deadline: float = 1e18) -> Tensor | None:
    generator = torch.Generator().manual_seed(seed)
    return exchange_attack(margins, box, population=32, rounds=rounds, generator=generator, deadline=deadline)


def unit_box(*shape: int) -> Box:
    return Box(torch.zeros(1, *shape), torch.ones(1, *shape))


@pytest.mark.parametrize("seed", range(3))
def test_exchanges_find_what_independent_starts_do_not(seed: int) -> None:
    box = unit_box(1, 8, 8)
    assert attack(two_wells, box, rounds=0, seed=seed) is None
    found = attack(two_wells, box, seed=seed)
    assert found is not None and float(two_wells(found.unsqueeze(0))) < 0
    assert bool((found >= 0).all() and (found <= 1).all())
    again = attack(two_wells, box, seed=seed)
    assert again is not None and torch.equal(found, again)


def test_no_rounds_after_the_deadline() -> None:
    assert attack(two_wells, unit_box(1, 8, 8), deadline=time.monotonic() - 1.0) is None


def test_hopeless_attacks_end_early() -> None:
    assert exchange._hopeful([1.0], 400) and exchange._hopeful([1.0] * 50, 400)
    assert not exchange._hopeful([1.0] * 51, 400)
    falling = [1.0 - 0.004 * step for step in range(51)]  # 0.2 in 50 rounds: 1.4 more in the other 350
    assert exchange._hopeful(falling, 400) and not exchange._hopeful(falling, 240)


def test_inputs_of_radius_zero_stay_and_flat_inputs_have_windows_too() -> None:
    lower, upper = torch.rand(1, 40), torch.ones(1, 40)
    upper[:, ::3] = lower[:, ::3]
    margin = float(upper.sum()) - 1e-3
    found = attack(lambda x: margin - x.sum(1, keepdim=True), Box(lower, upper))
    assert found is not None and torch.equal(found, upper[0])


def test_margins_that_are_not_numbers_are_no_counterexample() -> None:
    assert attack(lambda x: x.flatten(1)[:, :1] * torch.nan, unit_box(1, 4, 4), rounds=3) is None
    assert attack(lambda x: 1 + x.flatten(1)[:, :1], unit_box(1, 4, 4), rounds=3) is None


def test_windows_lie_anywhere_and_span_all_channels() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = exchange._windows(500, (3, 14, 7), torch.zeros(1), generator)
    assert inside.shape == (500, 1, 14, 7)
    covered = inside.float().mean((0, 1))
    assert float(covered.min()) > 0.05 and float(covered.max()) < 0.6
    assert bool(inside.flatten(1).any(1).all()) and not bool(inside.flatten(1).all(1).any())


def test_branch_and_bound_attacks_between_its_trees() -> None:
    """A first tree too small to decide: with rounds the counterexample comes before the second tree."""
    tried = 0
    for seed in range(100, 104):
        for prop in near_boundary("conv", seed, 20):
            first = search_of(replace(RENEWING, max_nodes=2), prop)
            outcome = search_of(replace(RENEWING, exchange_rounds=30), prop)
            minimum = float(prop.minima.min())
            if minimum > 0 and outcome.counterexample is not None:
                raise AssertionError(f"a counterexample where the minimum is {minimum}")
            if minimum < -1e-3 and first.exhausted:
                tried += 1
                assert outcome.counterexample is not None and not outcome.exhausted
                assert outcome.nodes == first.nodes
                replayed = margins_of(prop.subject.model, outcome.counterexample.unsqueeze(0), prop.samples.labels)
                assert float(replayed.min()) < 0
    assert tried >= 2

"""PGPE.ask and tell, and bounds of all layers in one call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from gls_lirpa import PGPE, RELAXATIONS, BoundEngine, GLSError, linf_box


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def test_told_losses_give_the_estimate_of_the_call() -> None:
    one, x, y = network(), torch.rand(7, 3), torch.randint(2, (7,))
    other = copy.deepcopy(one)
    called = PGPE(lambda: nn.functional.cross_entropy(one(x), y), one, sigma=0.05, population=32, seed=3)
    asking = PGPE(None, other, sigma=0.05, population=32, seed=3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        called().backward()
        members = asking.ask()
        assert len(members) == 32
        losses = [float(nn.functional.cross_entropy(functional_call(other, member, (x,)), y)) for member in members]
        told = asking.tell(losses)
        told.backward()
        assert float(told.detach()) == pytest.approx(called.stats["loss"], abs=1e-7)
        for optimizer in optimizers:
            optimizer.step()
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        torch.testing.assert_close(called.sigma, asking.sigma, rtol=1e-4, atol=0)
        assert float(asking.sigma.std()) > 0  # σ has moved


def test_members_are_antithetic_pairs_around_the_weights_of_the_time_they_were_asked_for() -> None:
    model = network()
    asking = PGPE(None, model, sigma=0.5, population=8)
    members = asking.ask()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    for plus, minus in zip(members[::2], members[1::2], strict=True):
        for name, center in before.items():
            torch.testing.assert_close((plus[name] + minus[name]) / 2, center, rtol=0, atol=1e-6)
            assert not torch.equal(plus[name], minus[name])
    torch.testing.assert_close(members[-1], members[7])
    with pytest.raises(IndexError):
        members[8]


def test_tell_needs_what_was_asked() -> None:
    asking = PGPE(None, network(), sigma=0.1, population=8)
    with pytest.raises(GLSError, match="call ask"):
        asking.tell([0.0] * 8)
    asking.ask()
    with pytest.raises(GLSError, match=r"expected 8 losses, one per member, got \(6,\)"):
        asking.tell([0.0] * 6)
    with pytest.raises(GLSError, match="expected finite losses, got nan"):
        asking.tell([0.0] * 7 + [float("nan")])
    assert float(asking.tell([1.0] * 8)) == 1.0  # what was wrong before did not lose the population
    with pytest.raises(GLSError, match="without a loss"):
        asking()


@pytest.mark.parametrize("name", RELAXATIONS.names())
def test_bounds_of_all_layers_hold_at_sampled_points(name: str) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)
    )
    x = torch.rand(3, 1, 4, 4)
    box = linf_box(x, 0.1)
    with torch.no_grad():
        layers = BoundEngine(model, x).layers(box, RELAXATIONS.get(name))
        assert [tuple(lower.shape) for lower, _ in layers] == [(3, 2, 2, 2), (3, 6), (3, 3)]
        points = box.lower + (box.upper - box.lower) * torch.rand(300, *x.shape)
        value, seen = points.flatten(0, 1), []
        for layer in model:
            if isinstance(layer, nn.ReLU):
                seen.append(value)
            value = layer(value)
        for (lower, upper), values in zip(layers, [*seen, value], strict=True):
            values = values.unflatten(0, (300, 3))
            assert bool((values >= lower - 1e-5).all()) and bool((values <= upper + 1e-5).all())
            assert bool((upper - lower > 0).all()) and float((upper - lower).max()) < 10

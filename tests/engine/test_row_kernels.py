"""Compiled kernels: which rows they take, and that they change nothing."""

from __future__ import annotations

import gc
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.engine import row_compiled
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.row_compiled import chain_bounds
from gls_lirpa.engine.row_network import Chain
from gls_lirpa.engine.row_patches import Patch, Rows
from gls_lirpa.engine.row_walk import Relaxed
from gls_lirpa.losses.terms import margin_cross_entropy
from gls_lirpa.relaxations import get_relaxation

pytest.importorskip("numba")


def network(*, channels: int = 3, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Three convolutions whose windows leave the map on all sides, and a dense layer."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, channels, 3, 2, 2), nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, (2, 3), (1, 2), (1, 0)), nn.ReLU(),
        nn.Conv2d(2 * channels, channels, 3, 1, 1), nn.ReLU(),
        nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 4),
    )  # fmt: skip
    model(torch.zeros(1, 2, 9, 8))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale / weight[0].numel() ** 0.5)
    return model.to(dtype)


def samples(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 2, 9, 8, generator=generator)
    return x.to(dtype), torch.randint(4, (count,), generator=generator)


def outcome(model: nn.Module, x: Tensor, y: Tensor, method: str = "crown", eps: float = 0.1) -> list[Tensor]:
    """Margins and gradients."""
    margins = BoundEngine(model, x).margins(linf_box(x, eps), y, get_relaxation(method))
    return [margins.detach(), *torch.autograd.grad(margin_cross_entropy(margins).sum(), list(model.parameters()))]


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_compiled, "kernels", lambda: None)


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows kernels took, a number for every pass."""
    found: list[int] = []

    def counted(over: Relaxed, chain: Chain, patch: Patch, rows: Rows) -> Tensor:
        bounds = chain_bounds(over, chain, patch, rows)
        found.append(bounds.numel())
        return bounds

    monkeypatch.setattr("gls_lirpa.engine.row_walk.chain_bounds", counted)
    return found


@pytest.mark.parametrize("method", ["crown-ibp", "crown"])
@pytest.mark.parametrize("eps", [0.002, 0.05, 0.5])
def test_bounds_and_gradients_are_those_without_kernels(
    method: str, eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, y) = network(scale=2.0), samples(5)
    ours = outcome(model, x, y, method, eps)
    without_kernels(monkeypatch)
    for a, b in zip(ours, outcome(model, x, y, method, eps), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * (1 + float(b.abs().max())))


def test_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = network(dtype=torch.float32), samples(5, torch.float32)
    ours = outcome(model, x, y)
    without_kernels(monkeypatch)
    for a, b in zip(ours, outcome(model, x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * (1 + float(b.abs().max())))


def test_they_take_neurons_of_every_layer_and_the_specification(uses: list[int]) -> None:
    model, (x, y) = network(), samples(2)
    engine, box = BoundEngine(model, x), linf_box(x, 0.1)
    bounds = engine.bounds(box, margin_spec(y, 4, torch.float64), get_relaxation("crown-ibp"))
    intervals = list(bounds.intermediate.values())
    uses.clear()
    engine.margins(box, y, get_relaxation("crown-ibp"))
    assert uses == [2 * 3]
    uses.clear()
    engine.margins(box, y, get_relaxation("crown"))
    # The second layer's intervals are those that CROWN begins with.
    assert len(uses) == 4 and uses[0] == 2 * int(((intervals[1][0] < 0) & (intervals[1][1] > 0)).sum())


@pytest.mark.parametrize("kind", ["wide and alive", "derivatives in the box"])
def test_what_is_left_to_torch(kind: str, uses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = network(), samples(2)
    box = linf_box(x, 0.1)
    if kind == "wide and alive":
        monkeypatch.setattr(row_compiled, "WIDE_CHANNELS", 1)
        monkeypatch.setattr(row_compiled, "ALIVE_SHARE", 0.01)
    else:
        box = Box(box.lower.requires_grad_(), box.upper)
    engine = BoundEngine(model, box.lower.detach())
    engine.route()  # tries the network out
    uses.clear()
    margins = engine.margins(box, y, get_relaxation("crown-ibp"))
    assert not uses and engine.route()[0] == "rows"
    if kind == "derivatives in the box":
        (found,) = torch.autograd.grad(margins.sum(), box.lower)
        theirs = BoundEngine(model, x, route="lirpa").margins(box, y, get_relaxation("crown-ibp"))
        (expected,) = torch.autograd.grad(theirs.sum(), box.lower)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_threads_change_no_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_compiled, "LEAST_ROWS", 2)
    model, (x, y) = network(scale=2.0, dtype=torch.float32), samples(6, torch.float32)
    found = []
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        found.append(outcome(model, x, y))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def test_parts_share_no_sample_and_leave_none_out() -> None:
    sample = np.array([0, 0, 1, 1, 1, 2, 5, 5, 7])
    sizes = np.array([4, 2, 2, 8, 2, 40, 2, 6, 2])
    groups = row_compiled._Groups(np.append(0, np.cumsum(sizes)), sample, np.zeros((9, 2), np.int64))
    for least in (1, 2, 16, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_compiled, "LEAST_ROWS", least)
            parts = row_compiled._Groups(groups.first, groups.sample, groups.place).parts
        assert parts[0][0] == 0 and parts[-1][1] == 9
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in pairwise(parts))
        assert all(sample[a[1] - 1] != sample[b[0]] for a, b in pairwise(parts))
        assert (len(parts) == 1) == (least == 1000)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", [0, 2, 7])
def test_bounds_of_broken_weights_verify_nothing(layer: int, value: float) -> None:
    model, (x, y) = network(), samples(3)
    engine, box = BoundEngine(model, x), linf_box(x, 0.1)
    assert engine.margins(box, y, get_relaxation("crown")).isfinite().all()
    with torch.no_grad():
        model[layer].weight[0] = value
        margins = engine.margins(box, y, get_relaxation("crown-ibp"))
    assert not (margins > 0).all(1).any()


@pytest.mark.parametrize("kernels", [True, False])
def test_nothing_of_a_step_stays_alive(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        without_kernels(monkeypatch)
    model, (x, y) = network(scale=2.0), samples(3)
    engine, box = BoundEngine(model, x), linf_box(x, 0.1)

    def alive() -> int:
        engine.margins(box, y, get_relaxation("crown")).sum().backward()
        gc.collect()
        return sum(type(found) is Tensor for found in gc.get_objects())

    first = [alive() for _ in range(2)][-1]
    assert [alive() for _ in range(3)] == [first] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["crown-ibp", "crown"])
def test_a_broken_weight_at_a_dead_neuron_is_seen(value: float, method: str) -> None:
    """Only its coefficients could tell, and kernels do not visit dead neurons."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias[1] = -100.0
    x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    engine, box = BoundEngine(model, x), linf_box(x, 0.1)
    assert engine.margins(box, y, get_relaxation(method)).isfinite().all()
    with torch.no_grad():
        model[3].weight[0, 5] = value
        assert not engine.margins(box, y, get_relaxation(method)).isfinite().any()

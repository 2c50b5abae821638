"""Bounds against exact minima, closed forms and hand-written references."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.relaxations import RELAXATIONS, get_relaxation
from tests.helpers import networks
from tests.helpers.bounding import assert_below, relaxation
from tests.helpers.oracle import exact_minima

METHODS = RELAXATIONS.names()


def tiny(name: str) -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    if name == "mlp":
        model = networks.mlp((2, 3, 3, 3))
    else:
        model = nn.Sequential(nn.Conv2d(1, 1, 2, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.8, generator=generator)
    return model.eval()


@pytest.mark.parametrize("name", ["mlp", "conv"])
@pytest.mark.parametrize("eps", [0.05, 0.3])
def test_lower_bounds_never_exceed_the_exact_minimum(name: str, eps: float) -> None:
    model = tiny(name)
    shape = (1, 2) if name == "mlp" else (2, 1, 2, 2)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    box, spec = linf_box(x, eps), margin_spec(torch.tensor([0, 2][-len(x) :]), 3)
    exact = torch.tensor(np.stack([exact_minima(model, box[i : i + 1], spec[i]) for i in range(len(x))]))
    engine = BoundEngine(model, x)
    unstable = 0
    for method in METHODS:
        bounds = engine.bounds(box, spec, relaxation(method))
        assert (bounds.lower.detach() <= exact + 1e-5).all(), method
        unstable = sum(int(((low < 0) & (high > 0)).sum()) for low, high in bounds.intermediate.values())
    if eps == 0.3:
        assert unstable > 0  # or the test would say little


@pytest.mark.parametrize("method", [m for m in METHODS if m != "ibp"])
def test_without_unstable_relus_bounds_are_exact(method: str) -> None:
    model = tiny("mlp")
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([4.0, -4.0, 4.0]))
        model[2].bias.copy_(torch.tensor([-9.0, 9.0, 9.0]))
    x, y = torch.tensor([[0.3, 0.7]]), torch.tensor([1])
    box, spec = linf_box(x, 0.2), margin_spec(y, 3)
    bounds = BoundEngine(model, x).bounds(box, spec, relaxation(method))
    assert all(((low >= 0) | (high <= 0)).all() for low, high in bounds.intermediate.values())
    exact = torch.tensor(exact_minima(model, box, spec[0])).float()
    assert torch.allclose(bounds.lower[0], exact, atol=1e-5)


@pytest.mark.parametrize("w", [-0.9, -0.5, -0.01, 0.01, 0.5, 0.9])
def test_one_neuron_example_of_the_paper(w: float) -> None:
    """y = ReLU(x + w) + 1 over [−1, 1]: CROWN's lower bound jumps at w = 0, to 1 + (w − 1)."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    with torch.no_grad():
        for layer, bias in ((model[0], w), (model[2], 1.0)):
            layer.weight.fill_(1.0)
            layer.bias.fill_(bias)
    box = Box(torch.tensor([[-1.0]]), torch.tensor([[1.0]]))
    engine, spec = BoundEngine(model, torch.zeros(1, 1)), torch.ones(1, 1, 1)
    crown = engine.bounds(box, spec, relaxation("crown")).lower.item()
    assert crown == pytest.approx(1 + (w > 0) * (w - 1), abs=1e-6)
    for method in ("ibp", "hbox", "alpha-crown", "alpha-crown-step"):
        assert engine.bounds(box, spec, relaxation(method)).lower.item() == pytest.approx(1.0, abs=1e-6)


def two_layer_step(model: nn.Sequential, box: Box, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(one-step bound, CROWN's bound, final slopes) of ``row`` · f for Linear–ReLU–Linear, written by hand."""
    first, second = model[0], model[2]
    center, radius = box.center[0], ((box.upper - box.lower) / 2)[0]
    middle, spread = first.weight @ center + first.bias, first.weight.abs() @ radius
    low, high = middle - spread, middle + spread
    lam = row @ second.weight
    unstable = (low < 0) & (high > 0)
    upper_slope = high / (high - low)

    def bound(slope: Tensor) -> tuple[Tensor, Tensor]:
        used = torch.where(unstable, torch.where(lam >= 0, slope, upper_slope), (low >= 0).float())
        constant = torch.where(unstable & (lam < 0), -lam * upper_slope * low, torch.zeros(())).sum()
        head = (lam * used) @ first.weight
        value = head @ center - head.abs() @ radius + (lam * used) @ first.bias + constant + row @ second.bias
        return value, center - radius * head.sign()

    _, worst = bound(torch.full_like(low, 0.5))
    slope_gradient = torch.where(unstable, lam.clamp(min=0) * (first.weight @ worst + first.bias), torch.zeros(()))
    slopes = 0.5 + 0.5 * slope_gradient.sign()
    return bound(slopes)[0], bound((high > -low).float())[0], slopes


def test_one_step_slopes_against_a_hand_written_reference() -> None:
    torch.manual_seed(2)
    model = networks.mlp((4, 8, 3))
    x, y = networks.batch("mlp", 3)
    box, spec = linf_box(x, 0.3), margin_spec(y, 3)
    engine = BoundEngine(model, x, route="lirpa")
    by_rows = BoundEngine(model, x).bounds(box, spec, relaxation("alpha-crown-step")).lower
    found = engine.bounds(box, spec, relaxation("alpha-crown-step")).lower
    assert torch.allclose(by_rows, found, atol=1e-5)
    crown = engine.bounds(box, spec, relaxation("crown")).lower
    (wrapped,) = (w for key, w in engine._modules._wrapped.items() if key[0] == "alpha")
    (relu,) = wrapped.bounded.relus
    (alpha,) = relu.alpha.values()  # (2, rows, batch, neurons); the first is for lower bounds
    assert set(alpha.unique().tolist()) <= {0.0, 0.5, 1.0}
    assert {0.0, 1.0} <= set(alpha[0].unique().tolist())
    with torch.no_grad():
        for i, row in itertools.product(range(3), range(2)):
            stepped, plain, slopes = two_layer_step(model, box[i : i + 1], spec[i, row])
            assert crown[i, row].item() == pytest.approx(plain.item(), abs=1e-5)
            assert found[i, row].item() == pytest.approx(max(stepped, plain).item(), abs=1e-5)
            assert torch.equal(alpha[0, row, i], slopes)


@pytest.mark.parametrize("name", ["mlp", "conv", "residual", "batchnorm"])
def test_optimised_slopes_are_never_worse_than_crown_or_fewer_steps(name: str) -> None:
    model = networks.build(name)
    x, y = networks.batch(name, 3)
    engine, box = BoundEngine(model, x), linf_box(x, 0.1)
    crown = engine.margins(box, y, relaxation("crown"))
    short = engine.margins(box, y, get_relaxation("alpha-crown", iterations=1))
    long = engine.margins(box, y, get_relaxation("alpha-crown", iterations=8))
    assert (engine.margins(box, y, relaxation("alpha-crown-step")) >= crown).all()
    assert (short >= crown).all()
    assert (long >= short - 1e-6).all()
    assert (long > crown + 1e-4).any()
    assert_below(long, (margin_spec(y, 3) @ model(x).unsqueeze(-1)).squeeze(-1))

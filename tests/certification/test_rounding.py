"""Rounding: what is verified holds for the network as it runs, in whatever order its sums are taken.

The reference is the network in exact rational arithmetic where it is small and in float64 elsewhere; float32 runs are
made here by hand, with sums in many orders, with and without fused multiply-add, and with subnormals flushed.
Mutations that made a test of this file fail: no forward error, no error of earlier layers carried on, γ without the
length of the sum, no offset in γ, the centre of the box instead of its magnitude, BatchNorm without its mean, no
flushing, a stage's float32 bound accepted without its slack, earlier float32 bounds handed to branch and bound as they
are, overflow ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box
from gls_lirpa.certification.rounding import rounding
from gls_lirpa.models import build_model
from tests.helpers.rounding import mlp, orders, points, run


def exactly(model: nn.Sequential, x: np.ndarray) -> list[Fraction]:
    values = [Fraction(float(v)) for v in x]
    for layer in model:
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.tolist(), layer.bias.tolist()
            rows = [[Fraction(w) for w in row] for row in weight]
            values = [
                sum((w * v for w, v in zip(row, values, strict=True)), Fraction(b))
                for row, b in zip(rows, bias, strict=True)
            ]
        elif isinstance(layer, nn.ReLU):
            values = [max(v, Fraction(0)) for v in values]
    return values


KINDS = {
    "plain": {},
    **{f"cancelling {c:g}": {"cancel": c} for c in (1e3, 1e5, 1e8, 1e10)},
    "huge biases": {"bias": 1e6},
    "tiny": {"scale": 1e-13, "bias": 1e-39},
    "subnormal": {"scale": 1e-20, "bias": 1e-42},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_order_of_summation_exceeds_the_bound(kind: str) -> None:
    for seed in range(4):
        model = mlp(seed, **KINDS[kind])
        box = linf_box(torch.rand(1, 6, generator=torch.Generator().manual_seed(seed)), 0.1)
        label = torch.tensor([seed % 3])
        bound = rounding(model, box, label, classes=3).forward[0]
        assert bool(torch.isfinite(bound).all())
        others = [j for j in range(3) if j != int(label)]
        for x in points(box, 4, seed).numpy():
            true = exactly(model, x)
            for add in orders(seed):
                logits = [Fraction(float(v)) for v in run(model, x, add)]
                for j, limit in zip(others, bound.tolist(), strict=True):
                    error = (logits[int(label)] - logits[j]) - (true[int(label)] - true[j])
                    assert abs(error) <= Fraction(limit)


def equal_terms(*, bias: float = 0.0, after: float | None = None) -> nn.Sequential:
    """Two thousand equal terms, which added in turn lose much, and a second layer that has little to round."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2000, 2))
    with torch.no_grad():
        model[1].weight.fill_(0.1)
        model[1].weight[1] = 0.0
        model[1].bias.copy_(torch.tensor([bias, 0.0]))
        if after is not None:
            model.append(nn.ReLU()).append(nn.Linear(2, 2))
            model[3].weight.copy_(torch.tensor([[after, 0.0], [0.0, 0.0]]))
            model[3].bias.zero_()
    return model


@pytest.mark.parametrize(
    ("model", "signs"),
    [
        (equal_terms(), (1, 1)),
        (equal_terms(), (-1, 1)),  # a box around zero
        (equal_terms(after=1000.0), (1, 1)),
        (equal_terms(bias=1e6), (1, 1)),
    ],
    ids=["equal", "around zero", "carried on", "large bias"],
)
def test_the_bound_is_reached_within_a_factor(model: nn.Sequential, signs: tuple[int, int]) -> None:
    """What is lost by adding in turn is below the bound, and not so far that it would be of no use."""
    x = torch.full((1, 2000), 0.1)
    bound = float(rounding(model, Box(signs[0] * x, signs[1] * x), torch.tensor([0]), classes=2).forward[0, 0])
    true = exactly(model, x[0].numpy())[0]
    lost = max(abs(float(Fraction(float(run(model, x[0].numpy(), add)[0])) - true)) for add in orders(0))
    assert lost <= bound <= 60 * lost


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "convolutions": lambda: [
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, dilation=1),
    ],
    "batchnorm": lambda: [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)],
    "pooling": lambda: [nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)],
    "activations": lambda: [nn.Conv2d(2, 4, 3), nn.LeakyReLU(0.1), nn.Sigmoid(), nn.Tanh(), nn.ReLU(inplace=True)],
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(128, 3)
        self.register_buffer("mean", torch.tensor([0.3, 0.7]).view(1, 2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / 0.3
        x = torch.relu(self.conv(x)) - 0.7 * x + x
        return self.out(x.reshape(len(x), -1))


def _network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "residual":
        return Residual().eval()
    if name == "cnn3":
        return build_model("cnn3", in_shape=(2, 8, 8), mean=(0.3, 0.4), std=(0.2, 0.1)).eval()
    body = nn.Sequential(*LAYERS[name](), nn.Flatten())
    for layer in body:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, 500.0, 50.0)
            nn.init.uniform_(layer.running_var, 1e-4, 2.0)
            nn.init.normal_(layer.weight)
            with torch.no_grad():  # mean and bias cancel
                layer.bias.copy_(layer.weight * layer.running_mean / torch.sqrt(layer.running_var + layer.eps))
    return nn.Sequential(*body, nn.Linear(body.eval()(torch.zeros(1, 2, 8, 8)).shape[1], 3)).eval()


@pytest.mark.parametrize("name", [*LAYERS, "residual", "cnn3"])
def test_layers_against_float64(name: str) -> None:
    """torch's own float32, its inputs in two memory layouts, and with weights in float64 throughout."""
    model = _network(name)
    exact = copy.deepcopy(model).double()
    x = torch.rand(1, 2, 8, 8)
    box = linf_box(x, 0.05)
    classes = model(x).shape[1]
    bound = rounding(model, box, torch.tensor([0]), classes=classes)
    assert bool(torch.isfinite(bound.forward).all()) and not bound.reason
    seen = 0.0
    with torch.no_grad():
        inside = points(box, 64, 0)
        true = exact(inside.double())
        for logits in (model(inside), model(inside.to(memory_format=torch.channels_last)), model(inside[:1])):
            margins = logits.double()[:, :1] - logits.double()[:, 1:]
            error = (margins - (true[:, :1] - true[:, 1:])[: len(logits)]).abs().amax(0)
            assert bool((error <= bound.forward[0]).all())
            seen = max(seen, float((error / bound.forward[0]).max()))
    assert seen > 1e-6  # the bound says something
    assert bool((bound.forward <= bound.bound).all())


def test_trained_like_networks_lose_little() -> None:
    """Rounding of an ordinary network is far below its margins."""
    model = build_model("cnn3", in_shape=(1, 28, 28), mean=(0.13,), std=(0.31,)).eval()
    x = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        size = float(model(x).abs().max())
    bound = rounding(model, linf_box(x, 0.1), torch.zeros(4).long(), classes=10)
    assert float(bound.forward.max()) < 1e-3 * max(1.0, size) and float(bound.bound.max()) < 0.1 * max(1.0, size)


def test_unknown_operations_have_no_bound() -> None:
    class Odd(nn.Module):
        def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
            super().__init__()
            self.layer, self.function = nn.Linear(3, 2), function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.layer, x)

    x = torch.rand(1, 3)
    for function, reason in (
        (lambda layer, x: torch.exp(layer(x)), "exp"),
        (lambda layer, x: layer(x) * layer(x), "depend on the input"),
        (lambda layer, x: nn.functional.linear(x, layer.weight / layer.weight.norm()), "computed in the forward pass"),
        (lambda layer, x: layer(x) * layer.weight.norm(), "computed in the forward pass"),
        (lambda layer, x: torch.zeros(1, 2), "does not depend"),
        (lambda layer, x: (z := layer(x)).view(-1).relu_().view(1, 2) + z, "share"),
    ):
        found = rounding(Odd(function), Box(x, x), torch.tensor([0]), classes=2)
        assert reason in found.reason and bool(torch.isinf(found.forward).all())


def test_overflow_has_no_bound() -> None:
    model = mlp(0)
    with torch.no_grad():
        model[1].weight.fill_(1e30)
        model[3].weight.fill_(1e10)
    x = torch.rand(1, 6)
    assert bool(torch.isinf(rounding(model, Box(x, x), torch.tensor([0]), classes=3).forward).all())

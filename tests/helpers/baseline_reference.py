"""Tiny networks and independent references for the tests of the baselines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.losses import LossInput
from gls_lirpa.relaxations import RELAXATIONS, get_relaxation

IBP = RELAXATIONS.get("ibp")
DIFFERENTIABLE = [name for name in RELAXATIONS if RELAXATIONS.get(name).differentiable]
EXACT = 1e-9  # both sides in float64, the same operations in another order
FLOAT32 = 1e-5


def mlp(*sizes: int, seed: int = 0, scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.ReLU()] if i else []
        layers.append(nn.Linear(n, m))
        nn.init.normal_(layers[-1].weight, std=scale / math.sqrt(n))
    return nn.Sequential(*layers).double()


def batch_of(pixels: int, classes: int, size: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(size, pixels, generator=g, dtype=torch.float64), torch.randint(classes, (size,), generator=g)


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prepared(model: nn.Module, x: Tensor, y: Tensor, eps: float, relaxation: str = "ibp") -> LossInput:
    return LossInput(BoundEngine(model, x), get_relaxation(relaxation), x, y, eps, {}, seeded())


def interval(model: nn.Sequential, box: Box, spec: Tensor, shrinkage: float = 1.0) -> Tensor:
    """The reference: IBP in a few lines, the specification merged into the last layer."""
    low, high = box.lower.flatten(1), box.upper.flatten(1)
    layers = [layer for layer in model if not isinstance(layer, nn.Flatten)]
    for layer in layers[:-1]:
        if isinstance(layer, nn.ReLU):
            high = torch.where((low < 0) & (high > 0), shrinkage * high, high)
            low, high = low.clamp(min=0), high.clamp(min=0)
        else:
            plus, minus = layer.weight.clamp(min=0), layer.weight.clamp(max=0)
            low, high = low @ plus.T + high @ minus.T + layer.bias, high @ plus.T + low @ minus.T + layer.bias
    matrix = spec @ layers[-1].weight
    worst = torch.where(matrix > 0, low.unsqueeze(1), high.unsqueeze(1))
    return (matrix * worst).sum(-1) + spec @ layers[-1].bias


def worst_case(layers: list[nn.Module], low: Tensor, high: Tensor, value: Callable[[Tensor], Tensor]) -> float:
    """The exact maximum of a convex ``value`` of a ReLU network's output over a box in the plane.

    The box is cut along every neuron's zero line. On each piece the network is affine, so the value
    is convex there and takes its maximum at a corner of the piece.
    """
    corners = [(low[0], low[1]), (high[0], low[1]), (high[0], high[1]), (low[0], high[1])]
    start = torch.stack([torch.stack(c) for c in corners])
    pieces = [(start, torch.eye(2, dtype=low.dtype), torch.zeros(2, dtype=low.dtype))]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.detach(), layer.bias.detach()
            pieces = [(p, weight @ a, weight @ b + bias) for p, a, b in pieces]
            continue
        for neuron in range(len(pieces[0][2])):
            pieces = [(part, a, b) for p, a, b in pieces for part in _halves(p, a[neuron], b[neuron]) if len(part) > 2]
        pieces = [(p, a * on[:, None], b * on) for p, a, b in pieces for on in [(p.mean(0) @ a.T + b > 0).to(b)]]
    return max(float(value(p @ a.T + b).max()) for p, a, b in pieces)


def _halves(polygon: Tensor, normal: Tensor, offset: Tensor) -> list[Tensor]:
    sides = polygon @ normal + offset
    halves = []
    for sign in (1.0, -1.0):
        kept = []
        for i in range(len(polygon)):
            j = (i + 1) % len(polygon)
            here, there = sign * sides[i], sign * sides[j]
            if here >= 0:
                kept.append(polygon[i])
            if here * there < 0:
                kept.append(polygon[i] + here / (here - there) * (polygon[j] - polygon[i]))
        halves.append(torch.stack(kept) if kept else polygon[:0])
    return halves


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return torch.cat([g.flatten() for g in found])


def batchnorm_net() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(4)
    layers = [nn.Conv2d(1, 3, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(6, 3)).double()
    for layer in model:
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    return model.train(), torch.rand(7, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])

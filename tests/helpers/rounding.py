"""Sums in every order, and networks to try them on."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box

Sum = Callable[[np.ndarray], np.float32]
f32 = np.float32


def in_turn(terms: np.ndarray) -> np.float32:
    total = f32(0)
    for term in terms:
        total = f32(total + f32(term))
    return total


def pairwise(terms: np.ndarray) -> np.float32:
    if len(terms) <= 2:
        return in_turn(terms)
    return f32(pairwise(terms[: len(terms) // 2]) + pairwise(terms[len(terms) // 2 :]))


def blocked(terms: np.ndarray) -> np.float32:
    return in_turn(np.array([in_turn(terms[i::4]) for i in range(4)]))


def fused(terms: np.ndarray) -> np.float32:
    """Terms are float64 products of float32 numbers, exact; each is added before it is rounded."""
    total = f32(0)
    for term in terms:
        total = f32(np.float64(total) + term)
    return total


def flushing(terms: np.ndarray) -> np.float32:
    tiny = np.finfo(f32).tiny
    total = f32(0)
    for term in terms:
        term = f32(term)
        total = f32(total + (f32(0) if abs(term) < tiny else term))
        total = f32(0) if abs(total) < tiny else total
    return total


def orders(seed: int) -> list[Sum]:
    generator = np.random.default_rng(seed)
    return [
        in_turn,
        lambda terms: in_turn(terms[::-1]),
        lambda terms: in_turn(generator.permutation(terms)),
        lambda terms: in_turn(terms[np.argsort(-np.abs(terms))]),
        lambda terms: in_turn(terms[np.argsort(terms)]),
        pairwise,
        blocked,
        fused,
        lambda terms: fused(terms[::-1]),
        flushing,
    ]


def run(model: nn.Sequential, x: np.ndarray, add: Sum) -> np.ndarray:
    """A network of Linear and ReLU layers, with every sum taken by ``add``; the bias is one of its terms."""
    values = x.astype(f32)
    for layer in model:
        if isinstance(layer, nn.Linear):
            weight, bias = (p.detach().numpy().astype(np.float64) for p in (layer.weight, layer.bias))
            with np.errstate(all="ignore"):
                terms = np.concatenate([weight * values.astype(np.float64), bias[:, None]], 1)
                values = np.array([add(row) for row in terms], dtype=f32)
        elif isinstance(layer, nn.ReLU):
            values = np.maximum(values, f32(0))
    return values


def mlp(
    seed: int, *, scale: float = 1.0, cancel: float = 0.0, bias: float = 0.1, sizes: tuple = (6, 8, 8, 3)
) -> nn.Sequential:
    """``cancel``: pairs of weights ±cancel on equal units, which drop out exactly."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0, scale / layer.in_features**0.5, generator=generator)
                layer.bias.normal_(0, bias, generator=generator)
        if cancel:
            linears = [layer for layer in model if isinstance(layer, nn.Linear)]
            for first, second in itertools.pairwise(linears):
                first.weight[1] = first.weight[0] = first.weight[0].abs()
                first.bias[1] = first.bias[0] = first.bias[0].abs()
                second.weight[:, 0] += cancel
                second.weight[:, 1] = -second.weight[:, 0] + second.weight[:, 2]
    return model


def points(box: Box, number: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(number, *box.lower.shape[1:], generator=generator)
    share = torch.where(torch.rand(share.shape, generator=generator) < 0.5, share.round(), share)
    return torch.minimum(torch.maximum(box.lower + share * (box.upper - box.lower), box.lower), box.upper)

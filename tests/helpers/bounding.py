"""What the tests of bounds share: engines, points of boxes, and plain evaluation."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from gls_lirpa.attacks import pgd_points, random_points
from gls_lirpa.base.boxes import Box, margin_spec
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.relaxations import RELAXATIONS, Relaxation, get_relaxation
from tests.helpers import networks

SMOOTH = [name for name in RELAXATIONS if RELAXATIONS.get(name).differentiable]
"""The relaxations with a gradient."""


def relaxation(name: str) -> Relaxation:
    """By name, with few iterations where there are any: soundness does not depend on their number."""
    return get_relaxation(name, iterations=3 if "iterations" in RELAXATIONS.get(name).options else None)


@functools.cache
def engine(name: str) -> BoundEngine:
    """One engine per reference network for all tests, so that whatever a call leaves behind meets the next."""
    return BoundEngine(networks.build(name), networks.batch(name, 2)[0])


def margins_at(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = model(x)
    return (margin_spec(labels, logits.shape[1], logits.dtype) @ logits.unsqueeze(-1)).squeeze(-1)


def points(model: nn.Module, x: Tensor, labels: Tensor, box: Box) -> list[Tensor]:
    """Random, corner and attacked points of a box, and its centre."""
    generator = torch.Generator().manual_seed(5)
    found = [box.center, box.lower, box.upper]
    for _ in range(15):
        found.append(random_points(box, generator=generator))
        corner = torch.rand(x.shape, generator=generator) > 0.5
        found.append(torch.where(corner, box.lower, box.upper))
    for target in range(networks.CLASSES):

        def toward(logits: Tensor, y: Tensor, target: int = target) -> Tensor:
            return logits[:, target] - logits.gather(1, y.unsqueeze(1)).squeeze(1)

        found.append(pgd_points(model, x, labels, box, steps=10, generator=generator, objective=toward))
    return found


def assert_below(lower: Tensor, value: Tensor, *, tolerance: float = 1e-5) -> None:
    slack = (value - lower) / (1 + value.abs())
    assert torch.isfinite(lower).all()
    assert slack.min() >= -tolerance, f"bound above a value by {-slack.min().item():.2e}"

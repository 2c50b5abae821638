"""α-CROWN over rows: lower slopes of unstable ReLUs chosen for every row of a specification.

Intermediate bounds stay CROWN's. A bound with any slopes in [0, 1] is sound, so the best one met is returned.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gls_lirpa.engine.ascent import adam
from gls_lirpa.engine.row_network import to_inner
from gls_lirpa.engine.row_patches import Patch, Rows
from gls_lirpa.engine.row_walk import Relaxed, lower_bounds

STEP, DECAY = 0.5, 0.98
"""Adam's step for the slopes and its decay, auto_LiRPA's own."""


class RowSlopes:
    """The lower slopes of every unstable ReLU for every row of ``spec``, and the bounds they give."""

    def __init__(self, relaxed: Relaxed, spec: Tensor) -> None:
        self._over = relaxed
        network = relaxed.network
        values = to_inner(spec.flatten(0, 1), network.final.shape).view(*spec.shape[:2], *network.final.shape)
        self._patch = Patch(values, (0, 0), (0, 0))
        self._rows = spec.shape[1]
        self.free: dict[str, Tensor] = {}
        for name, (_, excess, offset) in relaxed.slopes.items():
            unstable = (excess != 0) | (offset != 0)
            if bool(unstable.any()):
                self.free[name] = unstable.unsqueeze(1)

    def start(self, value: float | None) -> dict[str, Tensor]:
        """CROWN's slopes, or ``value`` at unstable neurons."""
        slopes = {}
        for name, free in self.free.items():
            own = self._over.slopes[name][0].unsqueeze(1).expand(-1, self._rows, -1, -1, -1)
            slopes[name] = own.clone() if value is None else torch.where(free, value, own)
        return slopes

    def bounds(self, slopes: dict[str, Tensor]) -> Tensor:
        over = replace(self._over, row_slopes=slopes)
        return lower_bounds(over, self._over.network.final.name, self._patch, Rows())

    def with_gradient(self, slopes: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The bounds, and the derivatives of each in its own slopes, 0 at stable neurons."""
        leaves = {name: slope.detach().requires_grad_() for name, slope in slopes.items()}
        with torch.enable_grad():
            lower = self.bounds(leaves)
            found = torch.autograd.grad(lower.sum(), list(leaves.values()))
        return lower.detach(), {n: g * self.free[n] for n, g in zip(leaves, found, strict=True)}


def optimised(relaxed: Relaxed, spec: Tensor, crown: Tensor, *, iterations: int) -> Tensor:
    """The best bounds met in ``iterations`` steps of Adam from CROWN's slopes."""
    rows = RowSlopes(relaxed, spec)
    if not rows.free:
        return crown
    slopes, best = rows.start(None), crown
    first = {name: torch.zeros_like(slope) for name, slope in slopes.items()}
    second = {name: torch.zeros_like(slope) for name, slope in slopes.items()}
    for step in range(iterations):
        lower, gradient = rows.with_gradient(slopes)
        best = torch.maximum(best, lower)
        for name, slope in slopes.items():
            direction = adam(gradient[name], first[name], second[name], step)
            slope.add_(direction, alpha=STEP * DECAY**step).clamp_(0, 1)
    return torch.maximum(best, rows.bounds(slopes))


def one_step(relaxed: Relaxed, spec: Tensor, crown: Tensor) -> Tensor:
    """Every slope starts at 0.5 and takes one sign step of 0.5; one without a gradient does not matter and stays."""
    rows = RowSlopes(relaxed, spec)
    if not rows.free:
        return crown
    slopes = rows.start(0.5)
    _, gradient = rows.with_gradient(slopes)
    for name, slope in slopes.items():
        slope.add_(gradient[name].sign(), alpha=0.5).clamp_(0, 1)
    return torch.maximum(crown, rows.bounds(slopes))

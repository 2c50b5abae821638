"""The smoothed loss as PGPE sees it: estimated anew at every point of a line, from a population of a given size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gls_lirpa.analysis.landscape import Progress, borrowed_weights, crown_gradient
from gls_lirpa.analysis.plain import numbers, to_plain
from gls_lirpa.base.checks import require
from gls_lirpa.base.figures import new_figure, save_figure, shade
from gls_lirpa.losses.certified import CertifiedLoss


@dataclass(frozen=True)
class Surface:
    """``values``: mean losses over ``positions`` t for each population; ``roughness``: their mean distance from the
    largest's. ``sigma``: of the perturbations.

    The loss at t is that of the weights θ − t · lr · g, g the gradient of the CROWN loss.
    """

    sigma: float
    positions: list[float]
    values: dict[int, list[float]]

    @property
    def roughness(self) -> dict[int, float]:
        best = np.array(self.values[max(self.values)])
        return {size: float(np.abs(np.array(curve) - best).mean()) for size, curve in self.values.items()}

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Surface:
        """From the ``content`` that ``to_dict`` wrote."""
        values = {int(size): numbers(curve) for size, curve in content["values"].items()}
        return cls(content["sigma"], numbers(content["positions"]), values)


def sampled_surface(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    sigma: float,
    populations: Sequence[int],
    points: int = 41,
    step: float = 1 / 50,
    lr: float = 1e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Surface:
    """The CROWN loss smoothed with ``sigma`` along its gradient g, estimated with each of the ``populations``.

    The loss is that of ``model`` on the batch ``x``, ``y`` at radius ``eps``; the line has so many ``points``, ``step``
    apart in units of ``lr`` · g. Every point draws antithetic pairs of its own, as successive steps of PGPE do, so that
    what is left of the noise is seen; smaller populations are the first members of larger ones. ``seed``: of the noise;
    ``progress`` is called with the points done and those in all. Weights are put back bit for bit.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
    >>> found = sampled_surface(model, x, y, eps=0.1, sigma=1e-3, populations=(2, 4), points=3)
    >>> sorted(found.values), len(found.positions)
    ([2, 4], 3)
    """
    usable = points >= 3 and bool(populations) and all(size >= 2 and size % 2 == 0 for size in populations)
    require(usable, "points >= 3 and even populations >= 2", f"{points} and {tuple(populations)}")
    loss = CertifiedLoss(model, "crown", eps=eps)
    positions = [step * (k - (points - 1) // 2) for k in range(points)]
    largest = max(populations)
    table = np.zeros((largest, points))
    with borrowed_weights(model) as (weights, theta, scene):
        gradient = crown_gradient(loss, weights, x, y)
        generator = torch.Generator().manual_seed(seed)
        scene.reset()
        with torch.no_grad(), scene.frozen():
            for k, position in enumerate(positions):
                centre = theta - (position * lr) * gradient
                for pair in range(largest // 2):
                    z = torch.randn(weights.size, generator=generator, dtype=weights.dtype).to(weights.device)
                    for sign in (0, 1):
                        weights.write(torch.add(centre, z, alpha=(1 - 2 * sign) * sigma))
                        scene.reset()
                        table[2 * pair + sign, k] = float(loss(x, y))
                if progress is not None:
                    progress(k + 1, points)
    return Surface(float(sigma), positions, {size: table[:size].mean(0).tolist() for size in populations})


def draw_surface(surface: Surface, file: Path) -> None:
    """One curve of a ``surface`` per population, set apart by an offset, as a picture in ``file``."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    spread = max(max(curve) - min(curve) for curve in surface.values.values()) or 1.0
    for index, (size, curve) in enumerate(sorted(surface.values.items())):
        shifted = [value + index * spread for value in curve]
        axes.plot(surface.positions, shifted, "-", color=shade(index, len(surface.values), light=0.7), linewidth=1.2)
        axes.annotate(f"{size}", (surface.positions[-1], shifted[-1]), xytext=(4, 0), textcoords="offset points")
    axes.set_xlabel("t: steps of the CROWN gradient")
    axes.set_ylabel(f"smoothed loss, σ = {surface.sigma:g}, curves set apart")
    axes.set_title("population", loc="right", fontsize=9)
    axes.grid(alpha=0.3)
    save_figure(figure, file)

"""The loss of each relaxation along the direction of the CROWN gradient, original and smoothed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gls_lirpa.analysis.plain import numbers, to_plain
from gls_lirpa.analysis.scores import Floats, Scores, smoothness_scores
from gls_lirpa.base.checks import require
from gls_lirpa.errors import ConfigError, NumericalError
from gls_lirpa.estimators.weights import Surroundings, Weights
from gls_lirpa.losses.certified import CertifiedLoss
from gls_lirpa.relaxations import Relaxation, drawn_relaxations, get_relaxation

Progress = Callable[[int, int], None]
"""Called with (evaluations done, evaluations in all)."""

SIGMAS = (0.0, 1e-6, 5e-5, 5e-4)


@dataclass(frozen=True)
class Curve:
    """One relaxation's loss along the line, smoothed with one ``sigma`` (0: the loss itself).

    ``losses`` are as measured. ``values`` are divided by the loss at t = 0, ``errors`` are their standard errors:
    0 at t = 0, because numerator and denominator see the same perturbations, NaN where only one was drawn.
    ``scores``: how hard the values are for gradients.
    """

    relaxation: str
    sigma: float
    losses: list[float]
    values: list[float]
    errors: list[float]
    scores: Scores


@dataclass(frozen=True)
class Landscape:
    """``curves`` over ``positions`` t, ``step`` apart, the loss at t being that of the weights θ − t · ``lr`` · g.

    ``eps``: radius of the losses; ``samples``: perturbations a smoothed loss is the mean of; ``batch``: size of the
    batch; ``gradient_norm``: ‖g‖.
    """

    eps: float
    lr: float
    step: float
    samples: int
    batch: int
    gradient_norm: float
    positions: list[float]
    curves: list[Curve]

    def curve(self, relaxation: str, sigma: float) -> Curve:
        """The curve of a ``relaxation``, smoothed with ``sigma``."""
        for curve in self.curves:
            if curve.relaxation == get_relaxation(relaxation).name and curve.sigma == sigma:
                return curve
        raise ConfigError(f"no curve of {relaxation} with sigma={sigma:g} here")

    @property
    def relaxations(self) -> list[str]:
        return list(dict.fromkeys(curve.relaxation for curve in self.curves))

    @property
    def sigmas(self) -> list[float]:
        return list(dict.fromkeys(curve.sigma for curve in self.curves))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a value that is not finite becomes null."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Landscape:
        """From the ``content`` that ``to_dict`` wrote."""
        curves = [
            Curve(
                relaxation=curve["relaxation"],
                sigma=curve["sigma"],
                losses=numbers(curve["losses"]),
                values=numbers(curve["values"]),
                errors=numbers(curve["errors"]),
                scores=Scores.from_dict(curve["scores"]),
            )
            for curve in content["curves"]
        ]
        return cls(**{**content, "curves": curves})


def loss_landscape(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    relaxations: Sequence[str | Relaxation] | None = None,
    sigmas: Sequence[float] = SIGMAS,
    samples: int = 128,
    step: float = 1 / 50,
    steps: int | tuple[int, int] = 50,
    lr: float = 1e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Landscape:
    """L(θ − t·lr·g) and its Gaussian smoothing for every one of the ``relaxations``, at multiples t of ``step``.

    g is the gradient of the CROWN robust loss of the batch ``x``, ``y`` at radius ``eps`` and at the weights θ of
    ``model``, so that t = 1 is one step of plain gradient descent with learning rate ``lr``. ``steps`` is the number of
    points on either side of t = 0, or (behind, ahead). A smoothed loss is the mean over ``samples`` perturbations σ·z
    of the weights; every position, sigma and relaxation sees the same z, drawn from ``seed``, so that differences along
    a curve are not noise of the sampling. The mean of a few draws still has all their jumps, each a fraction of its
    size: ``curvature`` falls to that of the smoothed loss only where a jump's draws lie closer than ``step``.
    ``progress`` is called with the evaluations done and those in all.

    The loss is evaluated R · T · (1 + S · samples) times, for R relaxations, T points and S sigmas above 0 (the 1
    only where sigma 0 is wanted), in the network's current mode: take a small batch. Parameters that need no
    gradient stay where they are, unless none does. Weights, buffers, gradients and flags are put back bit for bit.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
    >>> found = loss_landscape(model, x, y, eps=0.1, sigmas=(0.0, 1e-3), samples=2, steps=1)
    >>> len(found.curves), found.curve("crown", 0.0).values[1]
    (8, 1.0)
    """
    behind, ahead = _sides(steps)
    _check(sigmas, samples=samples, step=step, lr=lr)
    named = drawn_relaxations(differentiable=True) if relaxations is None else relaxations
    chosen = [get_relaxation(relaxation) for relaxation in named]
    losses = [CertifiedLoss(model, relaxation, eps=eps) for relaxation in chosen]
    positions = [step * k for k in range(-behind, ahead + 1)]
    with borrowed_weights(model) as (weights, theta, scene):
        gradient = crown_gradient(CertifiedLoss(model, "crown", eps=eps), weights, x, y)
        scene.reset()
        with torch.no_grad(), scene.frozen():
            line = [theta - (t * lr) * gradient for t in positions]
            table = _Table(weights, scene, losses, x, y, line, sigmas, samples, seed).measured(progress)
    curves = [
        _curve(relaxation.name, float(sigma), table[sigma][:, i], zero=behind, step=step)
        for sigma in dict.fromkeys(sigmas)
        for i, relaxation in enumerate(chosen)
    ]
    norm = float(gradient.norm())
    return Landscape(float(eps), float(lr), float(step), samples, len(x), norm, positions, curves)


@contextmanager
def borrowed_weights(model: nn.Module) -> Iterator[tuple[Weights, Tensor, Surroundings]]:
    """The weights to be moved, their values, and all that is put back whatever happens."""
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    weights = Weights(model, trainable or [name for name, _ in model.named_parameters()])
    theta, scene = weights.flat(), Surroundings([model])
    try:
        yield weights, theta, scene
    finally:
        weights.write(theta)
        scene.restore()


def crown_gradient(loss: CertifiedLoss, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the loss at the weights, flat."""
    with torch.enable_grad():
        for parameter in weights.tensors:
            parameter.requires_grad_(True)
        parts = torch.autograd.grad(loss(x, y), weights.tensors, allow_unused=True)
    pairs = zip(parts, weights.tensors, strict=True)
    flat = torch.cat([(torch.zeros_like(p) if part is None else part).flatten() for part, p in pairs])
    if not bool(torch.isfinite(flat).all()):
        raise NumericalError(
            "the CROWN gradient at the network's weights is not finite: there is no direction to follow"
        )
    return flat.to(weights.dtype)


@dataclass(frozen=True)
class _Table:
    """All evaluations: for every sigma an array (draws, relaxations, positions)."""

    weights: Weights
    scene: Surroundings
    losses: list[CertifiedLoss]
    x: Tensor
    y: Tensor
    line: list[Tensor]
    sigmas: Sequence[float]
    samples: int
    seed: int

    def measured(self, progress: Progress | None) -> dict[float, Floats]:
        draws = {sigma: self.samples if sigma > 0 else 1 for sigma in self.sigmas}
        shape = (len(self.losses), len(self.line))
        table: dict[float, Floats] = {sigma: np.full((n, *shape), np.nan) for sigma, n in draws.items()}
        total, done = sum(draws.values()) * len(self.losses) * len(self.line), 0
        generator = torch.Generator().manual_seed(self.seed)
        for draw in range(max(draws.values())):
            noise = torch.randn(self.weights.size, generator=generator, dtype=self.weights.dtype)
            noise = noise.to(self.weights.device)
            for sigma in (sigma for sigma, n in draws.items() if draw < n):
                for k, point in enumerate(self.line):
                    self.weights.write(torch.add(point, noise, alpha=sigma) if sigma > 0 else point)
                    for i, loss in enumerate(self.losses):
                        self.scene.reset()
                        table[sigma][draw, i, k] = float(loss(self.x, self.y))
                done += len(self.losses) * len(self.line)
                if progress is not None:
                    progress(done, total)
        return table


def _curve(relaxation: str, sigma: float, draws: Floats, *, zero: int, step: float) -> Curve:
    """The mean over draws (rows), relative to its value at position ``zero``."""
    number = len(draws)
    losses = draws.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = losses / losses[zero]
        errors = np.zeros_like(values)
        if sigma > 0:
            # Standard error of a ratio of means over the same draws, to first order.
            residual = draws - values * draws[:, zero : zero + 1]
            spread = residual.std(0, ddof=1) if number > 1 else np.full_like(values, np.nan)
            errors = spread / (abs(losses[zero]) * math.sqrt(number))
    scores = smoothness_scores(values, step=step)
    return Curve(relaxation, sigma, losses.tolist(), values.tolist(), errors.tolist(), scores)


def _sides(steps: int | tuple[int, int]) -> tuple[int, int]:
    behind, ahead = (steps, steps) if isinstance(steps, int) else steps
    require(behind >= 0 and ahead >= 0 and behind + ahead >= 2, "at least 3 points", f"steps={steps}")
    return behind, ahead


def _check(sigmas: Sequence[float], *, samples: int, step: float, lr: float) -> None:
    usable = bool(sigmas) and all(0.0 <= sigma < math.inf for sigma in sigmas)
    require(usable, "sigmas >= 0, at least one", tuple(sigmas))
    require(samples >= 1, "samples >= 1", samples)
    require(0.0 < step < math.inf and 0.0 < lr < math.inf, "step > 0 and lr > 0", f"{step} and {lr}")

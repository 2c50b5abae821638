"""Two one-weight losses that show what smoothing does: to a jump, and to a bad local minimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gls_lirpa.analysis.scores import Floats
from gls_lirpa.base.boxes import Box
from gls_lirpa.base.checks import require
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.relaxations import get_relaxation

_erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclass(frozen=True)
class Toy:
    """A loss over one weight and, for each sigma, its Gaussian smoothing in closed form.

    ``name``: what the loss is; ``original``: its values at the ``weights``; ``smoothed``: the same by sigma.
    """

    name: str
    weights: list[float]
    original: list[float]
    smoothed: dict[float, list[float]]

    def minimum(self, sigma: float = 0.0) -> float:
        """The weight at which the loss, smoothed with ``sigma``, is smallest."""
        curve = self.original if sigma == 0 else self.smoothed[sigma]
        return self.weights[int(np.argmin(curve))]

    def local_minima(self, sigma: float = 0.0) -> list[float]:
        """Weights inside the range where the sampled loss turns from falling to rising."""
        curve = self.original if sigma == 0 else self.smoothed[sigma]
        slopes = np.diff(curve)
        return [self.weights[i + 1] for i in np.flatnonzero((slopes[:-1] < 0) & (slopes[1:] >= 0))]


def jump_toy(*, sigmas: Sequence[float] = (0.25, 0.5, 1.0), points: int = 201, reach: float = 2.0) -> Toy:
    """The CROWN lower bound of ReLU(x + w) + 1 over x in [−1, 1], as computed by the engine, over w.

    CROWN's lower slope of an unstable ReLU is 0 or 1, whichever leaves the smaller area. It changes at w = 0,
    where the bound falls from 1 to 0: l(w) = 1 for w ≤ 0, and w beyond. ``sigmas``: of the smoothed curves;
    ``points``: how many w between −``reach`` and ``reach``.

    >>> toy = jump_toy(points=5)
    >>> toy.weights, toy.original
    ([-2.0, -1.0, 0.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 2.0])
    """
    weights = _grid(points, reach)
    smoothed = {float(s): smoothed_jump(weights, sigma=s).tolist() for s in sigmas}
    return Toy("CROWN bound of ReLU(x + w) + 1", weights.tolist(), _bounds_over_bias(weights), smoothed)


def smoothed_jump(weights: Floats, *, sigma: float) -> Floats:
    """E[l(w + σz)] = 1 + (w − 1) Φ(w/σ) + σ φ(w/σ) for the bound of ``jump_toy``.

    >>> round(float(smoothed_jump(np.array([0.0]), sigma=1.0)[0]), 4)
    0.8989
    """
    require(0.0 < sigma < math.inf, "sigma > 0", sigma)
    return 1.0 + (weights - 1.0) * _normal_cdf(weights / sigma) + sigma * _normal_density(weights / sigma)


def valley_toy(*, sigmas: Sequence[float] = (0.25, 0.5, 1.0), points: int = 421, reach: float = 2.1) -> Toy:
    """A loss with a bad local minimum: gradient descent from the left stays in the basin w in [−1.5, 0].

    The best weight is 1. Smoothing with 0.25 keeps the bad minimum. 0.5 removes it and hardly moves the best
    weight. 1.0 feels the steep wall beyond w = 2 and moves the best weight to where the bad basin ends.
    ``sigmas``: of the smoothed curves; ``points``: how many w between −``reach`` and ``reach``.

    >>> toy = valley_toy()
    >>> [round(toy.minimum(s), 1) for s in (0.0, 0.25, 0.5, 1.0)]
    [1.0, 1.0, 0.9, 0.0]
    """
    weights = _grid(points, reach)
    loss = PiecewiseLinear(corners=(-0.75, 0.0, 1.0, 2.0), slopes=(-1 / 3, 1 / 3, -1.0, 1.0, 8.0), start=0.75)
    smoothed = {float(s): loss.smoothed(weights, sigma=s).tolist() for s in sigmas}
    return Toy("loss with a bad local minimum", weights.tolist(), loss(weights).tolist(), smoothed)


@dataclass(frozen=True)
class PiecewiseLinear:
    """A continuous function with value ``start`` at the first corner and ``slopes`` between the corners.

    >>> absolute = PiecewiseLinear(corners=(0.0,), slopes=(-1.0, 1.0), start=0.0)
    >>> absolute(np.array([-2.0, 3.0])).tolist()
    [2.0, 3.0]
    """

    corners: tuple[float, ...]
    slopes: tuple[float, ...]
    start: float

    def __call__(self, w: Floats) -> Floats:
        return self._sum(w, lambda v: np.maximum(v, 0.0))

    def smoothed(self, w: Floats, *, sigma: float) -> Floats:
        """E[f(w + σz)]: each hinge max(0, v) becomes v Φ(v/σ) + σ φ(v/σ)."""
        require(0.0 < sigma < math.inf, "sigma > 0", sigma)
        return self._sum(w, lambda v: v * _normal_cdf(v / sigma) + sigma * _normal_density(v / sigma))

    def _sum(self, w: Floats, hinge: Callable[[Floats], Floats]) -> Floats:
        total: Floats = self.start + self.slopes[0] * (w - self.corners[0])
        for corner, before, after in zip(self.corners, self.slopes, self.slopes[1:], strict=False):
            total = total + (after - before) * hinge(w - corner)
        return total


def _grid(points: int, reach: float) -> Floats:
    require(points >= 3 and 0.0 < reach < math.inf, "points >= 3 and reach > 0", f"{points} and {reach}")
    # Symmetric to the last bit, and with an odd number of points 0 is one of them.
    half: Floats = np.arange(points, dtype=np.float64) - (points - 1) / 2
    return half * (2 * reach / (points - 1))


def _bounds_over_bias(weights: Floats) -> list[float]:
    """One call for all w: a layer with one neuron for each of them."""
    number = len(weights)
    first, last = nn.Linear(1, number).double(), nn.Linear(number, number).double()
    with torch.no_grad():
        first.weight.fill_(1.0)
        first.bias.copy_(torch.from_numpy(weights))
        last.weight.copy_(torch.eye(number))
        last.bias.fill_(1.0)
        end = torch.ones(1, 1, dtype=torch.float64)
        engine = BoundEngine(nn.Sequential(first, nn.ReLU(), last), end)
        spec = torch.eye(number, dtype=torch.float64).unsqueeze(0)
        values: list[float] = engine.bounds(Box(-end, end), spec, get_relaxation("crown")).lower[0].tolist()
    return values


def _normal_cdf(z: Floats) -> Floats:
    result: Floats = 0.5 * (1.0 + _erf(z / math.sqrt(2.0)))
    return result


def _normal_density(z: Floats) -> Floats:
    return np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)

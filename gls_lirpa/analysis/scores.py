"""How hard a loss is for gradients, from its values along a line: three scores of a sampled curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gls_lirpa.analysis.plain import number, to_plain
from gls_lirpa.base.checks import require
from gls_lirpa.errors import DataError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """The smaller, the easier; all are 0 for a constant curve and NaN for one with a value that is not finite.

    ``max_slope`` (discontinuity): max |f(t+h) − f(t)| / h. A jump of size J gives J / h.
    ``curvature`` (non-smoothness): mean |f(t−h) − 2 f(t) + f(t+h)| / h².
    ``nonconvexity`` (sensitivity): the deviation from convexity max f(λs + (1−λ)t) − λ f(s) − (1−λ) f(t) over the
    sampled points, i.e. the largest height of the curve above a chord. It is in units of f, and 0 where f is convex.
    """

    max_slope: float
    curvature: float
    nonconvexity: float

    def to_dict(self) -> dict[str, float | None]:
        """For JSON."""
        plain: dict[str, float | None] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Scores:
        """From the ``content`` that ``to_dict`` wrote."""
        return cls(**{name: number(value) for name, value in content.items()})


def smoothness_scores(values: Sequence[float] | Floats, *, step: float) -> Scores:
    """The scores of a curve given by its values at equal distances ``step``.

    >>> smoothness_scores([0.0, 0.0, 1.0, 1.0], step=0.5)
    Scores(max_slope=2.0, curvature=4.0, nonconvexity=0.5)
    """
    curve: Floats = np.asarray(values, dtype=np.float64)
    if curve.ndim != 1 or len(curve) < 3:
        raise DataError(f"expected at least 3 values along a line, got shape {curve.shape}")
    require(0.0 < step < math.inf, "a step > 0", step)
    if not np.isfinite(curve).all():
        return Scores(math.nan, math.nan, math.nan)
    return Scores(
        max_slope=float(np.abs(np.diff(curve)).max() / step),
        curvature=float(np.abs(np.diff(curve, 2)).mean() / step**2),
        nonconvexity=float((curve - convex_envelope(curve)).max()),
    )


def convex_envelope(values: Floats) -> Floats:
    """The largest convex curve below one with these values at equal distances.

    On a line the envelope at t is the lowest of all chords over t: one pass over the points finds what trying
    every triple of points would.

    >>> convex_envelope(np.array([0.0, 3.0, 2.0, 3.0])).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    corners: list[int] = []
    for right in range(len(values)):
        while len(corners) > 1 and _above_chord(values, corners[-2], corners[-1], right):
            corners.pop()
        corners.append(right)
    lowest: Floats = np.interp(np.arange(len(values)), corners, values[corners])
    # A corner is on the envelope itself; elsewhere interpolation may round to just above the curve.
    return np.minimum(lowest, values)


def _above_chord(values: Floats, left: int, middle: int, right: int) -> bool:
    rise = (values[middle] - values[left]) * (right - left)
    return bool(rise >= (values[right] - values[left]) * (middle - left))

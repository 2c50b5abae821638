"""Intervals for differences of accuracies, by resampling images and seeds together.

Every quantity is a mean over trained networks and images of a number per network and image: whether it is
certified, or a signed sum of this over networks that were trained with the same seed from the same start and
certified on the same images. A resample draws starts, then seeds within each of them, and images, each with
replacement; images are drawn once for all networks, which keeps the pairing. Where there is one start the
first draw changes nothing, and the interval says nothing about other starts.

Resampling a handful of seeds shows too little of their spread. What the draw of seeds moves is therefore
multiplied by √(n/(n−1)) · t/z, with Student's t of n − 1 degrees of freedom and the normal z at 97.5 %, n the
number of starts, or of seeds where there is one start: where seeds alone vary normally this is Student's
interval, where images alone vary it is the ordinary bootstrap's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import norm
from scipy.stats import t as student

RESAMPLES = 10_000
Numbers = npt.NDArray[np.int64]


class Unit(NamedTuple):
    """What networks that are compared have in common: the network they started from ("": none), and the seed."""

    start: str
    seed: int


@dataclass(frozen=True)
class Interval:
    """A mean in points of per cent with its 95 % interval; none where there is one seed."""

    mean: float
    low: float | None
    high: float | None
    seeds: int
    starts: int
    images: int

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies above or below 0, else 0."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    def __str__(self) -> str:
        mean = f"{round(self.mean, 2) + 0.0:+.2f}"  # no "-0.00"
        return mean if self.low is None else f"{mean} [{self.low:+.2f}, {self.high:+.2f}]"


def paired_interval(
    numbers: Mapping[Unit, npt.ArrayLike], *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval | None:
    """The interval of 100 · the mean of ``numbers[unit][image]``; None where there is nothing.

    >>> gains = {Unit("", seed): [1, 0, 0, seed] for seed in (0, 1)}
    >>> interval = paired_interval(gains)
    >>> interval.mean, interval.sign
    (37.5, 0)
    """
    if not numbers:
        return None
    units = sorted(numbers)
    table = np.stack([np.asarray(numbers[unit], dtype=np.int64) for unit in units])
    mean, images = 100 * float(table.mean()), table.shape[1]
    starts = sorted({unit.start for unit in units})
    groups = [np.flatnonzero([unit.start == start for unit in units]) for start in starts]
    count = len(starts) if len(starts) > 1 else len(units)
    if count == 1:
        return Interval(mean, None, None, len(units), len(starts), images)
    factor = math.sqrt(count / (count - 1)) * float(student.ppf(0.975, count - 1) / norm.ppf(0.975))
    means = 100 * _resampled(table, groups, factor, resamples, np.random.default_rng(seed))
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(mean, float(low), float(high), len(units), len(starts), images)


def _resampled(
    table: Numbers, groups: list[Numbers], factor: float, resamples: int, random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """The mean of each resample, with the seeds' deviation from equal weights times ``factor``.

    Images with the same column are drawn together: their counts in a draw of all images are multinomial, so
    the work grows with the number of different columns, not of images.
    """
    columns, counts = np.unique(table, axis=1, return_counts=True)
    images = random.multinomial(table.shape[1], counts / table.shape[1], size=resamples)
    weights = np.zeros((resamples, len(table)))
    if len(groups) > 1:
        drawn = random.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=resamples)
    else:
        drawn = np.ones((resamples, 1), dtype=np.int64)
    for number, group in enumerate(groups):
        # Each time that a start is drawn, its seeds are drawn anew.
        trials = drawn[:, number] * len(group)
        weights[:, group] = random.multinomial(trials, np.full(len(group), 1 / len(group)))
    equal = 1 / len(table)
    weights = equal + factor * (weights / weights.sum(1, keepdims=True) - equal)
    totals = np.einsum("ru,uc,rc->r", weights, columns.astype(float), images.astype(float), optimize=True)
    return np.asarray(totals / table.shape[1])

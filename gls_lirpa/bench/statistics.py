"""Means with intervals over seeds, and what can honestly be said from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scipy.stats import t as student


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation over seeds; with one seed there is no spread and no interval."""

    mean: float
    std: float | None
    count: int

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % confidence interval of the mean (Student's t)."""
        if self.std is None:
            return None
        return float(student.ppf(0.975, self.count - 1)) * self.std / math.sqrt(self.count)

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies above or below 0, else 0."""
        half = self.half_width
        if half is None or abs(self.mean) <= half:
            return 0
        return 1 if self.mean > 0 else -1

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"

    @property
    def interval(self) -> str:
        half = self.half_width
        mean = round(self.mean, 2) + 0.0  # no "-0.00"
        return f"{mean:+.2f}" + ("" if half is None else f" [{self.mean - half:+.2f}, {self.mean + half:+.2f}]")


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """The mean over what there is; None where there is nothing.

    >>> str(estimate([90.0, 92.0, None]))
    '91.00 ± 1.41'
    """
    found = [value for value in values if value is not None and math.isfinite(value)]
    if not found:
        return None
    return Estimate(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


Values = Mapping[tuple[str, str, int], float]
"""Certified accuracy by relaxation, estimator and seed."""


@dataclass(frozen=True)
class Verdict:
    """What smoothing with one estimator did to the order of the tight and the loose relaxation."""

    estimator: str
    gap: Estimate | None
    shift: Estimate | None
    verdict: str


def paired(values: Values, first: tuple[str, str], second: tuple[str, str]) -> Estimate | None:
    """first − second, seed by seed."""
    seeds = {seed for row, column, seed in values if (row, column) == first}
    both = sorted(seed for seed in seeds if (*second, seed) in values)
    return estimate(values[(*first, seed)] - values[(*second, seed)] for seed in both)


def paradox_verdicts(values: Values, *, tight: str, loose: str, estimators: Iterable[str]) -> list[Verdict]:
    """For each estimator: the gap tight − loose, and its shift against plain gradients.

    *effect*: the 95 % interval of the shift lies above 0, so smoothing helps the tight relaxation more
    than the loose one. *no effect*: it lies below 0. *inconclusive*: it contains 0, or there is one seed.
    """
    verdicts = []
    for estimator in estimators:
        gap = paired(values, (tight, estimator), (loose, estimator))
        shift = None if estimator == "grad" else _shift(values, tight, loose, estimator)
        if estimator == "grad":
            name = "inconclusive" if gap is None else {1: "no paradox", -1: "paradox", 0: "inconclusive"}[gap.sign]
        else:
            name = "inconclusive" if shift is None else {1: "effect", -1: "no effect", 0: "inconclusive"}[shift.sign]
        verdicts.append(Verdict(estimator, gap, shift, name))
    return verdicts


def _shift(values: Values, tight: str, loose: str, estimator: str) -> Estimate | None:
    shifts = []
    for seed in sorted({seed for _, _, seed in values}):
        keys = [(tight, estimator, seed), (loose, estimator, seed), (tight, "grad", seed), (loose, "grad", seed)]
        if all(key in values for key in keys):
            smoothed_tight, smoothed_loose, plain_tight, plain_loose = (values[key] for key in keys)
            shifts.append((smoothed_tight - smoothed_loose) - (plain_tight - plain_loose))
    return estimate(shifts)

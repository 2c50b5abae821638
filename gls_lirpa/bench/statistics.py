"""Means over seeds, paired differences of cells, and what can honestly be said from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gls_lirpa.bench.bootstrap import Interval, Unit, paired_interval

ENOUGH_SEEDS = 5
"""With fewer, a verdict is marked as exploratory."""


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation over seeds; with one seed there is no spread."""

    mean: float
    std: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """The mean over what there is; None where there is nothing.

    >>> str(estimate([90.0, 92.0, None]))
    '91.00 ± 1.41'
    """
    found = [value for value in values if value is not None and math.isfinite(value)]
    if not found:
        return None
    return Estimate(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


Bits = npt.NDArray[np.bool_]
Cell = tuple[str, str]
Cells = Mapping[Cell, Mapping[Unit, Bits]]
"""By relaxation (or method) and estimator, and by seed: which images are certified."""


def contrast(cells: Cells, terms: Sequence[tuple[Cell, int]]) -> Interval | None:
    """Σ sign · certified accuracy, over the seeds that all cells have and the images that all of them have.

    Networks are certified on the first images of a split, so the shorter list is a part of the longer.

    >>> bits = {("crown", "grad"): {Unit("", 0): np.array([True, True])},
    ...         ("ibp", "grad"): {Unit("", 0): np.array([True, False])}}
    >>> contrast(bits, [(("crown", "grad"), 1), (("ibp", "grad"), -1)]).mean
    50.0
    """
    if any(cell not in cells for cell, _ in terms):
        return None
    units = set.intersection(*(set(cells[cell]) for cell, _ in terms))
    if not units:
        return None
    images = min(len(cells[cell][unit]) for cell, _ in terms for unit in units)
    return paired_interval(
        {unit: sum(sign * cells[cell][unit][:images].astype(np.int64) for cell, sign in terms) for unit in units}
    )


@dataclass(frozen=True)
class Verdict:
    """What smoothing with one estimator did to the order of the tight and the loose relaxation."""

    estimator: str
    gap: Interval | None
    shift: Interval | None
    verdict: str


def paradox_verdicts(cells: Cells, *, tight: str, loose: str, estimators: Iterable[str]) -> list[Verdict]:
    """For each estimator: the gap tight − loose, and its shift against plain gradients.

    Under grad: *paradox* if the gap lies below 0, *no paradox* if above. Under others: *effect* if shift and
    gap lie above 0, so that smoothing helps the tight relaxation more than the loose one and the tight one
    leads; *shift without lead* if the shift alone does; *negative shift* if it lies below 0. *undecided*: the
    interval contains 0, or there is none. With fewer than five seeds a verdict is called exploratory.
    """
    verdicts = []
    for estimator in estimators:
        gap_terms = [((tight, estimator), 1), ((loose, estimator), -1)]
        gap = contrast(cells, gap_terms)
        if estimator == "grad":
            word = _words(gap, {1: "no paradox", -1: "paradox"})
            verdicts.append(Verdict(estimator, gap, None, word))
            continue
        shift = contrast(cells, [*gap_terms, ((tight, "grad"), -1), ((loose, "grad"), 1)])
        leads = gap is not None and gap.sign == 1
        word = _words(shift, {1: "effect" if leads else "shift without lead", -1: "negative shift"})
        verdicts.append(Verdict(estimator, gap, shift, word))
    return verdicts


def _words(interval: Interval | None, by_sign: dict[int, str]) -> str:
    if interval is None or interval.sign == 0:
        return "undecided"
    few = f" (exploratory: {interval.seeds} seeds)" if interval.seeds < ENOUGH_SEEDS else ""
    return by_sign[interval.sign] + few

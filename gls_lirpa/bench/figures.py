"""Pictures of a suite's outcomes, readable without colour."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from gls_lirpa.base.figures import HATCHES, MARKERS, new_figure, save_figure, shade
from gls_lirpa.bench.outcomes import Outcome
from gls_lirpa.bench.statistics import estimate


def draw_fronts(outcomes: Sequence[Outcome], file: Path, *, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Natural against certified accuracy: a marker for the relaxation, its filling for the estimator."""
    figure = new_figure(7, 4.6)
    axes = figure.subplots()
    for marker, row in zip(itertools.cycle(MARKERS), rows, strict=False):
        for index, column in enumerate(columns):
            own = [o for o in outcomes if o.done and (o.row, o.column) == (row, column)]
            x, y = estimate(o.natural for o in own), estimate(o.certified for o in own)
            if x is None or y is None:
                continue
            axes.errorbar(
                x.mean,
                y.mean,
                xerr=x.std,
                yerr=y.std,
                fmt=marker,
                markersize=8,
                color="black",
                markerfacecolor=shade(index, len(columns)),
                ecolor="0.6",
                elinewidth=0.9,
                capsize=2,
                label=f"{row} · {column}",
            )
    axes.set_xlabel("natural accuracy [%]")
    axes.set_ylabel("certified accuracy [%]")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, file)


def draw_bars(
    outcomes: Sequence[Outcome],
    file: Path,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    quantity: str = "certified",
) -> None:
    """One group of bars per estimator, one bar per relaxation, whiskers of one standard deviation."""
    figure = new_figure(7, 4.0)
    axes = figure.subplots()
    width = 0.8 / max(len(rows), 1)
    tops: list[float] = []
    lows: list[float] = []
    for index, row in enumerate(rows):
        for position, column in enumerate(columns):
            own = [o for o in outcomes if o.done and (o.row, o.column) == (row, column)]
            value = estimate(getattr(o, quantity) for o in own)
            if value is None:
                continue
            axes.bar(
                position + (index - (len(rows) - 1) / 2) * width,
                value.mean,
                width,
                yerr=value.std,
                capsize=2,
                color=shade(index, len(rows), light=0.92, dark=0.26),
                edgecolor="black",
                hatch=HATCHES[index % len(HATCHES)],
                label=row if row not in axes.get_legend_handles_labels()[1] else None,
            )
            tops.append(value.mean + (value.std or 0.0))
            lows.append(value.mean - (value.std or 0.0))
    if tops:
        margin = max(0.15 * (max(tops) - min(lows)), 0.5)
        axes.set_ylim(max(0.0, min(lows) - margin), min(100.0, max(tops) + margin))
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), title="relaxation")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_ylabel(f"{quantity} accuracy [%], axis cut")
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    save_figure(figure, file)

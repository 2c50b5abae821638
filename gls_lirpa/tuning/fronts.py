"""Studies as tables and pictures: one method's front, and several methods' fronts with the areas they dominate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gls_lirpa.base.figures import LOOKS, MARKERS, new_figure, save_figure
from gls_lirpa.bench.sections import Entry, Table
from gls_lirpa.errors import ConfigError
from gls_lirpa.tuning.pareto import Point, front, hypervolume
from gls_lirpa.tuning.study import Final, load_study


@dataclass(frozen=True)
class MethodFront:
    """A method's finalists, and what the study cost."""

    method: str
    finals: tuple[Final, ...]
    trials: int
    epochs: float
    hours: float

    @property
    def best(self) -> list[Final]:
        """Those that none of the others dominates, by natural accuracy."""
        return [self.finals[i] for i in front([final.mean for final in self.finals])]

    @property
    def points(self) -> list[Point]:
        return [final.mean for final in self.best]


def read_front(folder: Path) -> MethodFront:
    """A finished study's front."""
    content = load_study(folder)
    finals = tuple(
        Final(entry["trial"], entry["values"], tuple((p[0], p[1]) for p in entry["points"]))
        for entry in content["finals"]
    )
    if not finals:
        raise ConfigError(f"study {str(folder)!r} has no finalists yet: continue it with glscert tune")
    hours = sum(entry["seconds"] for entry in content["evaluations"]) / 3600
    return MethodFront(content["method"], finals, len(content["proposed"]), float(content["epochs"]), hours)


def finals_table(found: MethodFront) -> Table:
    """The finalists with their settings; those of the front are bold."""
    names = list(found.finals[0].values)
    best = {final.trial for final in found.best}
    rows = []
    for final in sorted(found.finals, key=lambda final: final.mean):
        mark = "best" if final.trial in best else ""
        spread = [f"{_mean(p):.2f} ± {_deviation(p):.2f}" for p in zip(*final.points, strict=True)]
        settings = [Entry(f"{final.values[name]:.3g}") for name in names]
        rows.append((Entry(f"{final.trial}"), Entry(spread[0]), Entry(spread[1], mark), *settings))
    seeds = len(found.finals[0].points)
    note = f"{found.method}: per cent of held-out images, mean ± standard deviation over {seeds} seeds; bold: front."
    return Table("finalists", ("trial", "natural", "certified", *names), tuple(rows), note=note)


def fronts_table(fronts: Sequence[MethodFront]) -> Table:
    """The area that each front dominates, above the worst of all finalists in each coordinate."""
    every = [final.mean for found in fronts for final in found.finals]
    corner = (float(math.floor(min(p[0] for p in every))), float(math.floor(min(p[1] for p in every))))
    rows = []
    for found in sorted(fronts, key=lambda found: -hypervolume(found.points, corner)):
        most = max(found.points, key=lambda point: point[1])
        cells = (
            found.method,
            f"{hypervolume(found.points, corner):.2f}",
            f"{most[0]:.2f} / {most[1]:.2f}",
            str(len(found.points)),
            str(found.trials),
            f"{found.epochs:.0f}",
            f"{found.hours:.2f}",
        )
        rows.append(tuple(Entry(text) for text in cells))
    header = ("method", "hypervolume", "most certified (nat. / cert.)", "front", "trials", "epochs", "hours")
    seeds = sorted({len(final.points) for found in fronts for final in found.finals})
    note = (
        f"Hypervolume in squared points above natural {corner[0]:g} and certified {corner[1]:g}; held-out images, "
        f"means over {' or '.join(map(str, seeds))} seeds. Epochs: the most that the budget allows."
    )
    if len({(found.trials, found.epochs) for found in fronts}) > 1:
        note += " The budgets differ: not a fair comparison."
    return Table("fronts", header, tuple(rows), note=note)


def draw_fronts(fronts: Sequence[MethodFront], file: Path) -> None:
    """Finalists with whiskers over seeds, filled where none dominates them, and what each front dominates.

    One method's finalists carry the numbers of their trials.
    """
    figure = new_figure(7, 4.6)
    axes = figure.subplots()
    for index, found in enumerate(fronts):
        look = {"color": LOOKS[index % len(LOOKS)][0], "marker": MARKERS[index % len(MARKERS)]}
        best = {final.trial for final in found.best}
        for final in found.finals:
            _draw_final(axes, final, fill=final.trial in best, label=found.method, number=len(fronts) == 1, **look)
    left, low = axes.get_xlim()[0], axes.get_ylim()[0]
    for index, found in enumerate(fronts):
        x, y = zip(*found.points, strict=True)
        colour, line, _ = LOOKS[index % len(LOOKS)]
        axes.step((left, *x, x[-1]), (y[0], *y, low), where="pre", color=colour, linestyle=line, linewidth=1)
    axes.set_xlim(left=left)
    axes.set_ylim(bottom=low)
    axes.set_xlabel("natural accuracy on held-out images [%]")
    axes.set_ylabel("certified accuracy on held-out images [%]")
    axes.set_title("means and standard deviations over seeds; hollow: dominated by another of the method", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, file)


def _draw_final(axes: Any, final: Final, *, color: str, marker: str, fill: bool, label: str, number: bool) -> None:
    (x, y), (wide, high) = final.mean, (_deviation(part) for part in zip(*final.points, strict=True))
    known = axes.get_legend_handles_labels()[1]
    axes.errorbar(
        x,
        y,
        xerr=wide,
        yerr=high,
        fmt=marker,
        markersize=7,
        color=color,
        markerfacecolor=color if fill else "white",
        ecolor="0.65",
        elinewidth=0.8,
        capsize=2,
        label=None if label in known else label,
    )
    if number:
        axes.annotate(f"{final.trial}", (x, y), xytext=(6, 6), textcoords="offset points", fontsize=8)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))

"""A suite is data: cells (one run each, for every seed), how they are certified, and a renderer's name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gls_lirpa.base.checks import require
from gls_lirpa.bench.paper import PaperRow, slug
from gls_lirpa.errors import ConfigError
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.job import make_config
from gls_lirpa.training.presets import RECIPES

Fields = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One cell of a suite's table: what ``glscert train`` is given there.

    ``start`` names the cell whose network this one starts from; a cell with ``once`` is trained with
    the first seed alone and serves all seeds.
    """

    group: str
    row: str
    column: str
    options: Fields
    start: str | None = None
    once: bool = False
    paper: PaperRow | None = None

    @property
    def key(self) -> str:
        return slug(self.group, self.row, self.column)


@dataclass(frozen=True)
class Suite:
    """Cells, seeds, the number of certified test images with the seconds for each, and a renderer.

    ``preset``: the recipe of suites that have a choice of it, ``paper`` by default, else None.
    """

    name: str
    summary: str
    cells: tuple[Cell, ...] = ()
    seeds: tuple[int, ...] = (0,)
    samples: int | None = None
    timeout: float = 60.0
    renderer: str = "table"
    settings: Fields = field(default_factory=dict)
    preset: str | None = None

    def with_preset(self, preset: str | None) -> Suite:
        """The suite under another recipe; the paper's numbers stand beside the paper's recipe alone.

        >>> cell = Cell("mnist 0.1 cnn3", "ibp", "grad", {"dataset": "mnist", "preset": "paper"})
        >>> Suite("s", "", (cell,), preset="paper").with_preset("tuned").cells[0].options["preset"]
        'tuned'
        """
        if preset is None or preset == self.preset:
            return self
        if self.preset is None:
            raise ConfigError(f"suite {self.name!r} has a recipe of its own: remove --preset")
        if preset not in RECIPES:
            raise ConfigError(f"unknown recipe {preset!r}: expected --preset {', '.join(RECIPES)}")
        cells = tuple(
            dataclasses.replace(cell, options={**cell.options, "preset": preset}, paper=None) for cell in self.cells
        )
        return dataclasses.replace(self, cells=cells, preset=preset)


@dataclass(frozen=True)
class Budget:
    """How much of a suite to do; what differs from the suite's own is told in the report."""

    epochs_scale: float = 1.0
    samples: int | None = None
    seeds: int | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(math.isfinite(self.epochs_scale) and self.epochs_scale > 0, "--epochs-scale > 0", self.epochs_scale)
        for name, value in (("--samples", self.samples), ("--seeds", self.seeds)):
            require(value is None or value >= 1, f"{name} >= 1", value)

    def changes(self, suite: Suite) -> list[str]:
        """What is done otherwise than the suite says.

        >>> Budget(seeds=1).changes(Suite("s", "", seeds=(0, 1, 2)))
        ['1 seed instead of 3']
        """
        found = []
        if suite.cells and self.epochs_scale != 1:
            found.append(f"epochs and schedules × {self.epochs_scale:g}")
        if self.samples is not None and self.samples != suite.samples:
            found.append(f"{self.samples} samples instead of {suite.samples or 'the whole split'}")
        if self.seeds is not None and self.seeds != len(suite.seeds):
            found.append(f"{self.seeds} seed{'s' * (self.seeds > 1)} instead of {len(suite.seeds)}")
        if self.only:
            found.append(f"only the cells of {', '.join(self.only)}")
        return found


@dataclass(frozen=True)
class PlannedRun:
    """One train + certify: where it stands in the table, its configuration, and what must precede it."""

    cell: Cell
    seed: int
    config: TrainConfig
    needs: str | None
    samples: int | None
    timeout: float
    split: str = "test"

    @property
    def name(self) -> str:
        return f"{self.cell.key}-s{self.seed}"

    def folder(self, out: Path) -> Path:
        return out / "runs" / self.name


def planned_runs(suite: Suite, budget: Budget, *, out: Path, changes: Fields) -> list[PlannedRun]:
    """All runs of a suite, every one after the run that it starts from.

    ``changes`` are options that apply to every run, such as the data folder and the device.
    """
    seeds = suite.seeds if budget.seeds is None else tuple(range(suite.seeds[0], suite.seeds[0] + budget.seeds))
    by_key = {cell.key: cell for cell in suite.cells}
    return [
        _planned(cell, seed, seeds[0], by_key, suite, budget, out, changes)
        for cell in _ordered(suite)
        for seed in (seeds[:1] if cell.once else seeds)
    ]


def selected(runs: list[PlannedRun], only: tuple[str, ...]) -> list[PlannedRun]:
    """The runs of the named rows, columns or cells (``row-column``), with those they start from; all without names."""
    if not only:
        return runs
    names = {run.name: {run.cell.row, run.cell.column, f"{run.cell.row}-{run.cell.column}"} for run in runs}
    known = set().union(*names.values())
    for text in only:
        if text not in known:
            raise ConfigError(f"no cell {text!r} in this suite: expected --only among {', '.join(sorted(known))}")
    kept = {run.name for run in runs if names[run.name] & set(only)}
    for run in reversed(runs):
        if run.name in kept and run.needs is not None:
            kept.add(run.needs)
    return [run for run in runs if run.name in kept]


def _ordered(suite: Suite) -> Iterator[Cell]:
    starts = {cell.start for cell in suite.cells}
    yield from (cell for cell in suite.cells if cell.key in starts)
    yield from (cell for cell in suite.cells if cell.key not in starts)


def _planned(
    cell: Cell,
    seed: int,
    first: int,
    by_key: dict[str, Cell],
    suite: Suite,
    budget: Budget,
    out: Path,
    changes: Fields,
) -> PlannedRun:
    needs = None
    options = {**cell.options, **changes, "seed": seed}
    if cell.start is not None:
        start = by_key[cell.start]
        needs = f"{start.key}-s{first if start.once else seed}"
        options["init_from"] = str(out / "runs" / needs)
    config = scaled(make_config(options), budget.epochs_scale)
    samples = suite.samples if budget.samples is None else budget.samples
    return PlannedRun(cell, seed, config, needs, samples, suite.timeout)


def scaled(config: TrainConfig, factor: float) -> TrainConfig:
    """The same run with all its times multiplied, and its epochs whole: the schedule keeps its shape.

    >>> short = scaled(TrainConfig(epochs=70, milestones=(50, 60)), 0.1)
    >>> short.epochs, short.milestones
    (7, (5.0, 6.0))
    >>> scaled(TrainConfig(epochs=4, milestones=(2, 3)), 0.4).milestones
    (1.0, 1.5)
    """
    epochs = max(1, round(factor * config.epochs))
    if epochs == config.epochs:
        return config
    factor = epochs / config.epochs
    return dataclasses.replace(
        config,
        epochs=epochs,
        milestones=tuple(factor * epoch for epoch in config.milestones),
        eps_warmup_epochs=factor * config.eps_warmup_epochs,
        eps_anneal_epochs=factor * config.eps_anneal_epochs,
        average_from=None if config.average_from is None else factor * config.average_from,
    )

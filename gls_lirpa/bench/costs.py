"""The paper's training costs beside ours: minutes of an epoch on its GPUs, and on one core of this machine."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from gls_lirpa.bench.probe import step_seconds
from gls_lirpa.bench.sections import Entry, Table
from gls_lirpa.data import DATASETS, Dataset, Split
from gls_lirpa.training.job import make_config

IMAGES = {"mnist": ((1, 28, 28), 60_000, 10), "cifar10": ((3, 32, 32), 50_000, 10)}
IMAGES["tinyimagenet"] = ((3, 64, 64), 100_000, 200)
"""Shape of an image, training images, classes."""
RADII = {"mnist": 0.1, "cifar10": 2 / 255, "tinyimagenet": 1 / 255}
_WHOLE = " (whole training)"


@dataclass(frozen=True)
class CostRow:
    """One row of the paper's two tables of costs; ``minutes`` of an epoch, or of the whole training."""

    dataset: str
    net: str
    method: str
    gpus: str
    minutes: float
    whole: bool

    @property
    def options(self) -> dict[str, Any]:
        """What ``glscert train`` would be given.

        >>> next(row for row in cost_rows() if row.method == "alpha-crown-pgpe").options["relaxation"]
        'alpha-crown-step'
        """
        name = self.method.split(" (")[0]
        given = {"dataset": self.dataset, "net": self.net, "eps": RADII[self.dataset], "preset": "paper"}
        if self.whole:
            loss = {"ibp": {"loss": "robust", "relaxation": "ibp"}}.get(name, {"loss": name})
            return {**given, **loss, "estimator": "grad"}
        relaxation, _, estimator = name.rpartition("-")
        relaxation = {"alpha-crown": "alpha-crown-step"}.get(relaxation, relaxation)
        return {**given, "relaxation": relaxation, "estimator": estimator}


@functools.cache
def cost_rows() -> tuple[CostRow, ...]:
    """The paper's rows.

    >>> len(cost_rows())
    29
    """
    text = resources.files("gls_lirpa.bench").joinpath("costs.csv").read_text()
    return tuple(
        CostRow(
            dataset=line["dataset"],
            net=line["network"],
            method=line["method"].removesuffix(_WHOLE),
            gpus=line["gpus"],
            minutes=float(line["minutes_per_epoch_or_training"]),
            whole=line["method"].endswith(_WHOLE),
        )
        for line in csv.DictReader(text.splitlines())
    )


def epoch_minutes(row: CostRow, *, sizes: tuple[int, int]) -> tuple[float, int]:
    """Minutes of an epoch on one core, and the recipe's epochs.

    Steps of ``sizes`` random images give the cost of a step and of an image in it.
    """
    shape, size, classes = IMAGES[row.dataset]
    small, large = (_step(row, batch, shape, classes) for batch in sizes)
    config = make_config(row.options)
    an_image = max(large - small, 0.0) / (sizes[1] - sizes[0])
    a_step = large + (config.batch_size - sizes[1]) * an_image
    return a_step * math.ceil(size / config.batch_size) / 60, config.epochs


def _step(row: CostRow, batch: int, shape: tuple[int, ...], classes: int) -> float:
    generator = torch.Generator().manual_seed(0)
    split = Split(torch.rand(batch, *shape, generator=generator), torch.arange(batch) % classes)
    source = DATASETS.get(row.dataset)
    names = tuple(str(i) for i in range(classes))
    dataset = Dataset(row.dataset, split, split, split, names, source.mean, source.std)
    return step_seconds(make_config({**row.options, "batch_size": batch}), dataset)


def measured_costs(
    rows: Sequence[CostRow], *, sizes: tuple[int, int], progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """For each row its number in the table and our minutes."""
    found = []
    for number, row in enumerate(rows, start=1):
        minutes, epochs = epoch_minutes(row, sizes=sizes)
        found.append({"index": cost_rows().index(row), "minutes": minutes, "epochs": epochs})
        progress(number, len(rows))
    return found


def cost_table(measured: Sequence[dict[str, Any]]) -> Table:
    """The paper's minutes beside ours; whole trainings are divided by the recipe's epochs."""
    rows = []
    for entry in measured:
        row = cost_rows()[entry["index"]]
        paper = row.minutes / (entry["epochs"] if row.whole else 1)
        ours = entry["minutes"]
        texts = (row.dataset, row.net, row.method, row.gpus, f"{paper:.2g}", f"{ours:.2g}", f"{ours / paper:.1f}")
        rows.append(tuple(Entry(text) for text in texts))
    header = ("dataset", "network", "method", "paper's GPUs", "paper", "one core here", "ratio")
    note = (
        "Minutes of an epoch. Ours: from steps of two small sizes on random images at full radius with untrained "
        "weights, most of whose ReLUs are unstable; PGPE with four members, times its population. Trained networks "
        "are faster under CROWN. Rows of plain gradients: the paper's whole training over its epochs."
    )
    return Table("costs", header, tuple(rows), labels=4, note=note)

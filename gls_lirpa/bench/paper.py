"""The paper's tables as data, and what each of their rows means as options of a run."""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from gls_lirpa.losses import LOSSES

_LOSSES = {"crown-ibp-lf": ("robust-fused", "crown-ibp"), "mtl-ibp": ("mtl", "ibp")}
_RELAXATIONS = {"alpha-crown": "alpha-crown-step"}
"""The paper's α-CROWN takes one step from slope 0.5 to 0 or 1."""

_CTBENCH_NET, _CTBENCH_METHODS = "cnn7-bn", ("ibp", "taps", "mtl-ibp")


@dataclass(frozen=True)
class PaperRow:
    """One row of one table, accuracies in per cent; adv is None where the table has none."""

    table: str
    dataset: str
    eps: str
    net: str
    method: str
    estimator: str
    natural: float
    certified: float
    adversarial: float | None

    @property
    def setting(self) -> str:
        return f"{self.dataset} {self.eps} {self.net}"

    @property
    def from_ibp(self) -> bool:
        """Whether training starts from IBP-trained weights."""
        return "(from ibp)" in self.method

    @property
    def recipe(self) -> str:
        """Whose training the numbers are of: ``literature`` where the paper took them from CTBench.

        >>> [row.recipe for row in paper_rows("cnn7") if row.net == "cnn7-bn" and row.dataset == "mnist"]
        ['literature', 'paper', 'paper', 'literature']
        """
        return "literature" if self.net == _CTBENCH_NET and self.method in _CTBENCH_METHODS else "paper"

    @property
    def options(self) -> dict[str, Any]:
        """What ``glscert train`` would be given for this row.

        >>> row = next(row for row in paper_rows("sam") if row.estimator == "sam-0.01")
        >>> row.options["estimator"], row.options["rho"]
        ('sam', 0.01)
        """
        name = self.method.split(" (")[0]
        loss, relaxation = _LOSSES.get(name, ("robust", name))
        if name in LOSSES:
            loss, relaxation = name, "ibp"
        estimator, _, number = self.estimator.partition("-")
        options: dict[str, Any] = {
            "dataset": self.dataset,
            "eps": _radius(self.eps),
            "net": self.net,
            "loss": loss,
            "relaxation": _RELAXATIONS.get(relaxation, relaxation),
            "estimator": estimator,
        }
        if estimator == "sam":
            options["rho"] = float(number)
        if estimator == "pgpe" and number:
            options["population"] = int(number)
        return options


def _radius(text: str) -> float:
    first, _, second = text.partition("/")
    return float(first) / float(second or 1)


@functools.cache
def all_paper_rows() -> tuple[PaperRow, ...]:
    """Every row of every table."""
    text = resources.files("gls_lirpa.bench").joinpath("paper.csv").read_text()
    rows = []
    for line in csv.DictReader(text.splitlines()):
        rows.append(
            PaperRow(
                table=line["table"],
                dataset=line["dataset"],
                eps=line["eps"] or "0.1",
                net=line["network"],
                method=line["relaxation_or_loss"],
                estimator=line["estimator"],
                natural=float(line["nat"]),
                certified=float(line["cert"]),
                adversarial=float(line["adv"]) if line["adv"] else None,
            )
        )
    return tuple(rows)


def paper_rows(table: str) -> list[PaperRow]:
    """The rows of one of the paper's tables.

    >>> len(paper_rows("nondiff"))
    4
    """
    return [row for row in all_paper_rows() if row.table == table]


def slug(*parts: str) -> str:
    """A name that serves as a folder: lower case, digits, dots and dashes.

    >>> slug("cifar10 2/255 cnn3", "crown (from ibp)")
    'cifar10-2-255-cnn3-crown-from-ibp'
    """
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(p for p in parts if p).lower()).strip("-")

"""Training curves of finished runs side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gls_lirpa.analysis.plain import numbers, to_plain
from gls_lirpa.errors import CheckpointError, ConfigError
from gls_lirpa.training.runs import RunFolder


@dataclass(frozen=True)
class RunCurve:
    """One run, named ``label``, over its ``epochs``: mean training ``loss`` and radius ``eps``.

    ``natural`` and ``certified``: accuracies in per cent on ``held_out`` samples.
    """

    label: str
    epochs: list[float]
    loss: list[float]
    eps: list[float]
    natural: list[float]
    certified: list[float]
    held_out: str

    @property
    def annealed(self) -> float:
        """The first epoch that ended with the largest radius: only from here on losses of runs are comparable."""
        full = (1 - 1e-3) * max(self.eps)
        return next((epoch for epoch, eps in zip(self.epochs, self.eps, strict=True) if eps >= full), self.epochs[-1])


@dataclass(frozen=True)
class Dynamics:
    """The runs to be compared, in the order in which they were named."""

    runs: list[RunCurve]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain: dict[str, Any] = to_plain(self)
        return plain


def training_dynamics(paths: Sequence[Path], *, labels: Sequence[str] | None = None) -> Dynamics:
    """Read the metrics of the run folders ``paths``, finished or not.

    A run is labelled by its method (``robust·crown·rgs``), followed by its folder's name where two have the same,
    unless ``labels`` are given.

    >>> import tempfile
    >>> from gls_lirpa.training.config import TrainConfig
    >>> path = Path(tempfile.mkdtemp()) / "run"
    >>> folder = RunFolder(path)
    >>> folder.create(TrainConfig())
    >>> folder.append_metrics({"epoch": 1, "loss": 2.0, "eps": 0.1, "natural": 90.0, "certified": 50.0})
    >>> training_dynamics([path]).runs[0].certified
    [50.0]
    """
    if not paths:
        raise ConfigError("expected at least one run folder, got none")
    if labels is not None and len(labels) != len(paths):
        raise ConfigError(f"expected one label for each of {len(paths)} runs, got {len(labels)}")
    chosen = _labels(paths) if labels is None else labels
    return Dynamics([_read(path, label) for path, label in zip(paths, chosen, strict=True)])


def _labels(paths: Sequence[Path]) -> list[str]:
    methods = [RunFolder(path).config().method for path in paths]
    counts = Counter(methods)
    return [
        method if counts[method] == 1 else f"{method} ({path.name})"
        for method, path in zip(methods, paths, strict=True)
    ]


def _read(path: Path, label: str) -> RunCurve:
    rows = RunFolder(path).metrics()
    if not rows:
        raise CheckpointError(f"run {str(path)!r} has no metrics yet: expected at least one finished epoch")
    columns: dict[str, list[float]] = {}
    for name in ("epoch", "loss", "eps", "natural", "certified"):
        try:
            columns[name] = numbers(row[name] for row in rows)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"metrics of run {str(path)!r} have no number {name!r} in some row") from error
    return RunCurve(
        label=label,
        epochs=columns["epoch"],
        loss=columns["loss"],
        eps=columns["eps"],
        natural=columns["natural"],
        certified=columns["certified"],
        held_out=str(rows[-1].get("held_out", "held-out data")),
    )

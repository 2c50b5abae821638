"""What became of a run, on disk and in a table that scripts can read."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from gls_lirpa.base.files import replace_file
from gls_lirpa.bench.suite import PlannedRun

FILE = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """Accuracies in per cent on the certified test images, or the reason of a failure.

    ``verdicts``: a letter per image, packed; see :mod:`gls_lirpa.bench.letters`.
    """

    name: str
    group: str
    row: str
    column: str
    seed: int
    status: str
    natural: float | None = None
    adversarial: float | None = None
    certified: float | None = None
    unknown: int | None = None
    samples: int | None = None
    requested: int | None = None
    epochs: int | None = None
    train_seconds: float | None = None
    certify_seconds: float | None = None
    reason: str = ""
    verdicts: str = ""

    @property
    def done(self) -> bool:
        return self.status == "done"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())


def without_result(run: PlannedRun, reason: str, *, status: str = "failed") -> Outcome:
    """The outcome of a run that could not be finished, or that was not run yet."""
    cell = run.cell
    return Outcome(run.name, cell.group, cell.row, cell.column, run.seed, status, reason=reason)


def read_outcome(run: PlannedRun, out: Path) -> Outcome | None:
    """A run's stored outcome for the same number of samples, if it was finished."""
    try:
        outcome = Outcome(**json.loads((run.folder(out) / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return outcome if not outcome.done or outcome.requested == run.samples else None


def outcomes_csv(outcomes: Iterable[Outcome]) -> str:
    """One row per run."""
    text = io.StringIO()
    columns = [name for name in Outcome.__dataclass_fields__ if name != "verdicts"]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for outcome in outcomes:
        writer.writerow({key: "" if value is None else value for key, value in asdict(outcome).items()})
    return text.getvalue()

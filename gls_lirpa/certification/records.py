"""What is known of each sample, kept in files that survive a kill at any moment."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from gls_lirpa.base.files import replace_file, take_lock
from gls_lirpa.errors import CheckpointError, ConfigError

VERDICTS = ("verified", "falsified", "misclassified", "unknown")
REASONS = ("time", "nodes", "memory", "numerical", "error", "bound")
"""Why a sample is unknown: a limit; a bound that rounding may account for; a stage that failed; no stage reached."""


@dataclass(frozen=True)
class Record:
    """The verdict on one sample.

    ``index``: the sample's number in the split; ``label``: its class.
    ``prediction``: −1 where the logits are not finite. ``stage``: which one decided, or was the last
    to try. ``bound``: proven lower bound of the worst margin, None where there is none. ``spent``:
    seconds in each stage, a batch's time shared equally. ``exhausted``: a limit of time or nodes
    ended the search. ``counterexample``: its file, where one was written; ``adversarial``: itself.
    ``reason``: why it is unknown, one of ``REASONS``, ``detail`` in more words; ``covers``: the arithmetic for
    which it is verified; ``errors``: what stages that failed on it said. Older records have none of these.

    >>> Record(7, 3, 3, "verified", "ibp", 0.5, {"ibp": 0.01}).seconds
    0.01
    """

    index: int
    label: int
    prediction: int
    verdict: str
    stage: str
    bound: float | None
    spent: dict[str, float]
    exhausted: bool = False
    counterexample: str | None = None
    adversarial: Tensor | None = field(default=None, compare=False, repr=False)
    reason: str = ""
    detail: str = ""
    covers: str = ""
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.spent.values())

    def to_json(self) -> str:
        """One line, without the line end.

        >>> record = Record(7, 3, 3, "unknown", "crown", -0.25, {"ibp": 0.5, "crown": 1.0})
        >>> Record.from_json(record.to_json()) == record
        True
        """
        return json.dumps(
            {
                "index": self.index,
                "label": self.label,
                "prediction": self.prediction,
                "verdict": self.verdict,
                "stage": self.stage,
                "bound": self.bound,
                "seconds": self.seconds,
                "spent": self.spent,
                "exhausted": self.exhausted,
                "counterexample": self.counterexample,
                "reason": self.reason,
                "detail": self.detail,
                "covers": self.covers,
                "errors": self.errors,
            },
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, line: str | bytes) -> Record:
        """The record that ``to_json`` wrote as this ``line``."""
        content = json.loads(line)
        del content["seconds"]
        record = cls(**content)
        if record.verdict not in VERDICTS or not isinstance(record.index, int):
            raise ValueError(f"no verdict {record.verdict!r} of sample {record.index!r}")
        if record.reason not in ("", *REASONS):
            raise ValueError(f"no reason {record.reason!r} for sample {record.index!r}")
        return record


class RecordFolder:
    """``settings.json``, ``records.jsonl`` and ``counterexamples/`` of one certification, in the folder ``path``.

    Opening a folder with records made under the same settings resumes it: ``done`` holds them. A
    last line that was cut short by a kill is dropped, and its sample is due again.

    >>> import tempfile
    >>> with RecordFolder(Path(tempfile.mkdtemp()) / "out", {"eps": 0.1}) as folder:
    ...     _ = folder.add(Record(0, 1, 1, "verified", "ibp", 0.5, {"ibp": 0.01}))
    ...     list(folder.done)
    [0]
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.done: dict[int, Record] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "counterexamples").mkdir(exist_ok=True)
            self._check_settings(settings)
            self._file: BinaryIO = (path / "records.jsonl").open("ab")
        except OSError as error:
            raise ConfigError(f"output folder {str(path)!r} cannot be written: {error.strerror}") from error
        try:
            take_lock(self._file, busy=f"another process is certifying into {str(self.path)!r}")
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RecordFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, record: Record) -> Record:
        """Append the ``record`` of a sample; its counterexample is written first, so no line lacks its file."""
        if record.index in self.done:
            raise ConfigError(f"sample {record.index} already has a record in {str(self.path)!r}")
        if record.adversarial is not None:
            name = f"counterexamples/{record.index}.npy"
            buffer = io.BytesIO()
            np.save(buffer, record.adversarial.detach().cpu().numpy())
            replace_file(self.path / name, buffer.getvalue())
            record = replace(record, counterexample=name)
        self._file.write(record.to_json().encode() + b"\n")
        self._file.flush()
        self.done[record.index] = record
        return record

    def _check_settings(self, settings: dict[str, Any]) -> None:
        file = self.path / "settings.json"
        content = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        if not file.exists():
            records = self.path / "records.jsonl"
            if records.exists() and records.stat().st_size:
                raise CheckpointError(f"{str(self.path)!r} holds records without settings.json: choose another --out")
            replace_file(file, (json.dumps(content, indent=2) + "\n").encode())
            return
        try:
            stored = json.loads(file.read_text())
        except ValueError as error:
            raise CheckpointError(f"{str(file)!r} is damaged: {error}") from error
        for key in sorted(content.keys() | stored.keys()):
            if content.get(key) != stored.get(key):
                raise ConfigError(f"{str(self.path)!r} holds records {_made_with(key, stored, content)}")

    def _read(self) -> None:
        file = self.path / "records.jsonl"
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = Record.from_json(line)
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(f"line {number} of {str(file)!r} is damaged: {error}") from error
            if record.index in self.done:
                raise CheckpointError(f"sample {record.index} occurs twice in {str(file)!r}")
            self.done[record.index] = record
        if len(whole) < len(content):
            self._file.truncate(len(whole))


@dataclass(frozen=True)
class StageSummary:
    """How many samples a stage decided, the seconds it spent on all it saw, and how many it failed on."""

    verified: int = 0
    falsified: int = 0
    misclassified: int = 0
    seconds: float = 0.0
    errors: int = 0

    @property
    def decided(self) -> int:
        return self.verified + self.falsified + self.misclassified


@dataclass(frozen=True)
class Summary:
    """Accuracies as shares of all samples: natural ≥ adversarial ≥ certified.

    Adversarial: classified correctly and not falsified. Certified: verified. ``reasons``: how many are
    unknown for which reason; ``gaps``: the median bound of their worst margins, which a proof needs above zero, where
    there are any. ``covers``: what the verified are verified for. ``seconds``: of all samples and stages together.
    ``stages``: what each decided, and in what time.

    >>> Summary.of([Record(0, 1, 1, "verified", "ibp", 0.5, {"ibp": 0.25}),
    ...             Record(1, 1, 1, "unknown", "ibp", -0.5, {"ibp": 0.25})]).certified
    0.5
    """

    samples: int
    natural: float
    adversarial: float
    certified: float
    unknown: int
    seconds: float
    stages: dict[str, StageSummary]
    reasons: dict[str, int] = field(default_factory=dict)
    covers: str = ""
    gaps: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Summary:
        """The summary of some records."""
        rows = list(records)
        number = max(len(rows), 1)
        correct = [r for r in rows if r.prediction == r.label]
        stages: dict[str, dict[str, float]] = {}
        for record in rows:
            for stage, seconds in record.spent.items():
                entry = stages.setdefault(stage, {})
                entry["seconds"] = entry.get("seconds", 0.0) + seconds
            for stage in record.errors:
                entry = stages.setdefault(stage, {})
                entry["errors"] = entry.get("errors", 0) + 1
            if record.verdict != "unknown":
                entry = stages.setdefault(record.stage, {})
                entry[record.verdict] = entry.get(record.verdict, 0) + 1
        return cls(
            samples=len(rows),
            natural=len(correct) / number,
            adversarial=sum(r.verdict != "falsified" for r in correct) / number,
            certified=sum(r.verdict == "verified" for r in correct) / number,
            unknown=sum(r.verdict == "unknown" for r in rows),
            seconds=math.fsum(r.seconds for r in rows),
            stages={name: StageSummary(**entry) for name, entry in stages.items()},  # type: ignore[arg-type]
            reasons=dict(Counter(r.reason for r in rows if r.verdict == "unknown" and r.reason)),
            covers="; ".join(sorted({r.covers or "not recorded" for r in rows if r.verdict == "verified"})),
            gaps={reason: median(bounds) for reason in REASONS if (bounds := _open_bounds(rows, reason))},
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            **{key: value for key, value in vars(self).items() if key != "stages"},
            "stages": {name: {"decided": s.decided, **vars(s)} for name, s in self.stages.items()},
        }

    def write(self, path: Path) -> None:
        """``summary.json`` in ``path``, and ``summary.csv`` with one row, so that those of many runs can be joined."""
        content = self.to_dict()
        replace_file(path / "summary.json", (json.dumps(content, indent=2) + "\n").encode())
        row = {key: value for key, value in content.items() if key not in ("stages", "reasons", "gaps")}
        row |= {f"unknown: {reason}": self.reasons.get(reason, 0) for reason in REASONS}
        for name, stage in self.stages.items():
            row |= {f"{name} decided": stage.decided, f"{name} seconds": stage.seconds}
        text = io.StringIO()
        writer = csv.DictWriter(text, list(row))
        writer.writeheader()
        writer.writerow(row)
        replace_file(path / "summary.csv", text.getvalue().encode())


def _made_with(key: str, stored: dict[str, Any], content: dict[str, Any]) -> str:
    """How stored settings differ from the given ones in ``key``, and what to do."""
    old, new = stored.get(key), content.get(key)
    if key == "weights":
        return f"of other weights ({old}): the network was trained since; delete that folder, or choose another --out"
    if isinstance(old, dict) and isinstance(new, dict):
        names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        key, old, new = names[0], old.get(names[0]), new.get(names[0])
    return f"made with {key} {old}, not {new}: repeat those settings to resume, or choose another --out"


def _open_bounds(records: Iterable[Record], reason: str) -> list[float]:
    return [r.bound for r in records if r.verdict == "unknown" and r.reason == reason and r.bound is not None]

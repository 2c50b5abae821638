"""What ``certify`` returns: the records, and what one does with them next."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gls_lirpa.base.extras import optional
from gls_lirpa.certification.records import VERDICTS, Record, RecordFolder, Summary
from gls_lirpa.errors import CheckpointError, ConfigError

COLUMNS = (
    *("index", "label", "prediction", "verdict", "stage", "bound", "seconds", "exhausted", "reason", "detail"),
    *("covers", "counterexample"),
)


class Certification(list[Record]):
    """One record per sample, in order: a list, with accuracies and ways to keep it.

    ``records``: what it holds.
    ``settings``: what the verdicts depend on (radius, stages, limits, seed), as plain values. Accuracies are shares
    of all samples in [0, 1]: ``natural`` ≥ ``adversarial`` (correct and not falsified) ≥ ``certified`` (verified).
    ``unusable``: stages that were left out, and why.

    >>> result = Certification([Record(0, 1, 1, "verified", "ibp", 0.5, {"ibp": 0.25}),
    ...                         Record(1, 1, 1, "unknown", "ibp", -0.5, {"ibp": 0.25}, reason="bound")])
    >>> result.certified, result.adversarial, result.reasons, result[0].verdict
    (0.5, 1.0, {'bound': 1}, 'verified')
    """

    def __init__(
        self,
        records: Iterable[Record] = (),
        *,
        settings: dict[str, Any] | None = None,
        unusable: dict[str, str] | None = None,
    ) -> None:
        super().__init__(records)
        self.settings = dict(settings or {})
        self.unusable = dict(unusable or {})

    @cached_property
    def summary(self) -> Summary:
        """Accuracies, what each stage decided, and why samples are unknown."""
        return Summary.of(self)

    @property
    def natural(self) -> float:
        return self.summary.natural

    @property
    def adversarial(self) -> float:
        return self.summary.adversarial

    @property
    def certified(self) -> float:
        return self.summary.certified

    @property
    def reasons(self) -> dict[str, int]:
        """How many samples are unknown for which reason."""
        return self.summary.reasons

    def verdicts(self, verdict: str) -> Tensor:
        """Where the verdict is this one: a boolean tensor (n,), for indexing the inputs.

        >>> Certification([Record(0, 1, 1, "verified", "ibp", 0.5, {})]).verdicts("verified")
        tensor([True])
        """
        if verdict not in VERDICTS:
            raise ConfigError(f"unknown verdict {verdict!r}: expected one of {', '.join(VERDICTS)}")
        return torch.tensor([record.verdict == verdict for record in self], dtype=torch.bool)

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per sample; needs the extra ``pandas``."""
        pandas = optional("pandas", extra="pandas", feature="to_dataframe()")
        return pandas.DataFrame([[getattr(record, column) for column in COLUMNS] for record in self], columns=COLUMNS)

    def save(self, path: str | Path) -> Path:
        """Write records.jsonl, records.csv, summary.json, summary.csv and counterexamples/ into a new folder ``path``.

        The same files as ``glscert certify`` writes; ``Certification.load`` reads them. Raises ConfigError where the
        folder holds records already.
        """
        from gls_lirpa.certification.report import write_table

        folder = Path(path)
        if (folder / "records.jsonl").exists():
            raise ConfigError(f"{str(folder)!r} holds records already: choose another folder")
        with RecordFolder(folder, self.settings) as records:
            for record in self:
                records.add(record)
            write_table(records.done.values(), folder / "records.csv")
        self.summary.write(folder)
        return folder

    @classmethod
    def load(cls, path: str | Path) -> Certification:
        """Read the folder ``path`` that ``save`` or ``glscert certify`` wrote.

        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "a"
        >>> result = Certification([Record(0, 1, 1, "verified", "ibp", 0.5, {})], settings={"eps": 0.1})
        >>> Certification.load(result.save(folder)) == result
        True
        """
        file = Path(path) / "settings.json"
        if not file.is_file():
            raise CheckpointError(f"{str(path)!r} is not a folder of records: it has no settings.json")
        try:
            settings = json.loads(file.read_text())
        except ValueError as error:
            raise CheckpointError(f"{str(file)!r} is damaged: {error}") from error
        with RecordFolder(Path(path), settings) as folder:
            return cls([folder.done[index] for index in sorted(folder.done)], settings=settings)

    def __str__(self) -> str:
        names = ("natural", "adversarial", "certified")
        shares = ", ".join(f"{name} {100 * getattr(self, name):.2f} %" for name in names)
        return f"{len(self)} samples: {shares}, {self.summary.unknown} unknown"

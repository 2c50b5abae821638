"""The verdicts on all images of one certification as one short text: a letter per image, compressed."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gls_lirpa.bench.statistics import Bits
from gls_lirpa.certification.records import Record
from gls_lirpa.errors import CheckpointError

LETTERS = {"verified": "v", "falsified": "f", "misclassified": "m", "unknown": "u"}
"""``x`` instead of ``u`` where an unknown sample is not classified correctly either (logits that are not finite)."""


def verdict_letters(records: Iterable[Record]) -> str:
    """A letter for each of the first images of a split, in their order.

    >>> verdict_letters([Record(1, 3, 3, "unknown", "bab", None, {}), Record(0, 1, 1, "verified", "ibp", 0.5, {})])
    'vu'
    """
    rows = sorted(records, key=lambda record: record.index)
    if not rows or [record.index for record in rows] != list(range(len(rows))):
        raise CheckpointError("expected records of the first images of a split without gaps: finish the certification")
    return "".join("x" if r.verdict == "unknown" and r.prediction != r.label else LETTERS[r.verdict] for r in rows)


def read_letters(folder: Path) -> str:
    """The letters of a certification's folder."""
    try:
        lines = (folder / "records.jsonl").read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} holds no records: expected a folder of glscert certify") from error
    try:
        return verdict_letters(Record.from_json(line) for line in lines)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"records in {str(folder)!r} are damaged: {error}") from error


def packed(letters: str) -> str:
    """Letters in a tenth of the characters or fewer.

    >>> unpacked(packed("vvfum")), len(packed("v" * 10_000)) < 60
    ('vvfum', True)
    """
    return base64.b64encode(zlib.compress(letters.encode(), 9)).decode()


def unpacked(text: str) -> str:
    try:
        letters = zlib.decompress(base64.b64decode(text, validate=True)).decode()
    except (binascii.Error, zlib.error, ValueError) as error:
        raise CheckpointError(f"packed verdicts are damaged: {error}") from error
    unknown = set(letters) - {*LETTERS.values(), "x"}
    if unknown:
        raise CheckpointError(f"packed verdicts are damaged: no verdict {sorted(unknown)[0]!r}")
    return letters


def where(letters: str, wanted: str) -> Bits:
    """Which images have one of the wanted letters.

    >>> where("vfv", "v").tolist()
    [True, False, True]
    """
    return np.isin(np.array(list(letters)), list(wanted))


def natural(letters: str) -> Bits:
    """Classified correctly."""
    return where(letters, "vfu")


def adversarial(letters: str) -> Bits:
    """Classified correctly and not falsified."""
    return where(letters, "vu")


def certified(letters: str) -> Bits:
    return where(letters, "v")

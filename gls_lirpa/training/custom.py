"""Runs on data or networks that no name stands for: what such a run folder remembers of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gls_lirpa.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from gls_lirpa.data import Dataset

CUSTOM = "custom"
"""The ``dataset`` or ``net`` of a configuration whose data or network was passed as an object."""

FILE = "data.json"


@dataclass(frozen=True)
class DataRecord:
    """Of data passed as an object: the shape of a sample, the number of classes, sizes and a fingerprint.

    >>> DataRecord((1, 2, 2), 3, 10, 0, 5, "ab").in_shape
    (1, 2, 2)
    """

    in_shape: tuple[int, ...]
    classes: int
    train: int
    val: int
    test: int
    sha256: str

    @classmethod
    def of(cls, dataset: Dataset) -> DataRecord:
        """What is remembered of a dataset; the fingerprint is that of the training split."""
        digest = sha256()
        for tensor in (dataset.train.images, dataset.train.labels):
            digest.update(tensor.contiguous().numpy().tobytes())
        sizes = (len(dataset.train), len(dataset.val), len(dataset.test))
        return cls(tuple(dataset.in_shape), dataset.classes, *sizes, digest.hexdigest())

    @classmethod
    def read(cls, folder: Path) -> DataRecord:
        try:
            content: Any = json.loads((folder / FILE).read_text())
            return cls(**{**content, "in_shape": tuple(content["in_shape"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{str(folder / FILE)!r} is missing or damaged: pass the run's dataset=") from error


def require_same(folder: Path, dataset: Dataset) -> None:
    """Refuse to go on with a run on other data than it was begun with."""
    if DataRecord.read(folder) != DataRecord.of(dataset):
        raise ConfigError(f"run {str(folder)!r} was begun with other data: resume it with the same dataset=")

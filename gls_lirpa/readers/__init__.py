"""Readers of data files, one function per layout: ``read(root, download=, limit=) -> Parts``.

A reader returns what the files hold and says in one DataError line what is wrong with them. Splitting
off validation data, cutting to a limit and checking labels is done once, in :mod:`gls_lirpa.data`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Arrays:
    """``images`` N×C×H×W, uint8 in 0…255 or float in [0, 1], and int64 ``labels``."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Parts:
    """What a dataset's files hold: ``train`` and ``test``, and ``val`` only where the files themselves separate it.

    ``class_names``: what label 0, 1, … stand for.
    """

    train: Arrays
    test: Arrays
    class_names: tuple[str, ...]
    val: Arrays | None = None


class Reader(Protocol):
    """How the files of one layout are read."""

    def __call__(self, root: Path, *, download: bool, limit: int | None) -> Parts:
        """Read the files under ``root``; of each split only the first ``limit`` samples are needed.

        ``download``: whether missing files may be fetched, where they can be.
        """

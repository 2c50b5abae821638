"""Datasets by name, kept compact in memory, and batches in a reproducible order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gls_lirpa.base.checks import require
from gls_lirpa.base.registry import Registry
from gls_lirpa.base.sampling import Augmentation, permutation, stratified_split
from gls_lirpa.errors import ConfigError, DataError
from gls_lirpa.readers import Arrays, Parts, Reader
from gls_lirpa.readers.arrays import read_cifar10, read_digits, read_mnist
from gls_lirpa.readers.images import read_folder, read_tinyimagenet

__all__ = ["DATASETS", "Augmentation", "Dataset", "Parts", "Source", "Split", "batches", "load_dataset"]


@dataclass(frozen=True, eq=False)
class Split:
    """Images N×C×H×W or features N×F (uint8, or float in [0, 1]) and their int64 labels, in main memory.

    >>> split = Split(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([0, 1, 1]))
    >>> x, y = split.batch([2, 0])
    >>> x.max().item(), y.tolist()
    (1.0, [1, 0])
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dim() not in (2, 4) or not (images.dtype == torch.uint8 or images.dtype.is_floating_point):
            got = f"{tuple(images.shape)} {images.dtype}"
            raise DataError(f"expected images NxCxHxW or features NxF of uint8 or float, got {got}")
        if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
            raise DataError(
                f"expected {len(images)} int64 labels, one per image, got {tuple(labels.shape)} {labels.dtype}"
            )
        # A NaN fails both comparisons.
        if images.dtype.is_floating_point and not bool(((images >= 0) & (images <= 1)).all()):
            raise DataError("expected float images in [0, 1], got values outside")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor | Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(x float32 in [0, 1], y) of some samples."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return _to_float(_take(self.images, chosen), device), _take(self.labels, chosen).to(device)

    def subset(self, indices: Tensor | Sequence[int]) -> Split:
        """A split of its own with some of the samples, in the given order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return Split(_take(self.images, chosen), _take(self.labels, chosen))


def _take(source: Tensor, indices: Tensor) -> Tensor:
    return torch.from_numpy(source.numpy()[indices.numpy()])


def _to_float(images: Tensor, device: torch.device | str) -> Tensor:
    """Pixels in [0, 1] on a device; bytes travel as bytes."""
    if images.dtype != torch.uint8:
        return images.to(device, torch.float32)
    if torch.device(device).type == "cpu":
        return torch.from_numpy(np.divide(images.numpy(), np.float32(255), dtype=np.float32))
    return images.to(device).to(torch.float32).div_(255)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Three splits (``val`` may be empty) and what a network and a training loop need to know of them."""

    name: str
    train: Split
    val: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augmentation: Augmentation | None = None

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def in_shape(self) -> tuple[int, ...]:
        return tuple(self.train.images.shape[1:])

    def split(self, name: str) -> Split:
        """A split by its name; an empty one is an error here, because somebody asked for it."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        if name not in splits:
            raise ConfigError(f"unknown split {name!r}: expected one of {', '.join(splits)}")
        if len(splits[name]) == 0:
            how = "load it with val_fraction > 0" if name == "val" else f"pass {name}=(x, y) with dataset=, or x and y"
            raise DataError(f"{self.name} has no {name} split here; {how}")
        return splits[name]


@dataclass(frozen=True)
class Source:
    """How a named dataset is read, normalised and augmented."""

    read: Reader
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augmentation: Augmentation | None = None


DATASETS: Registry[Source] = Registry("dataset")
DATASETS.register("digits", Source(read_digits))
DATASETS.register("mnist", Source(read_mnist))
DATASETS.register(
    "cifar10",
    Source(
        read_cifar10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        augmentation=Augmentation(flip=True, pad=2),
    ),
    aliases=("cifar-10", "cifar"),
)
DATASETS.register(
    "tinyimagenet",
    Source(
        read_tinyimagenet,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2302, 0.2265, 0.2262),
        augmentation=Augmentation(flip=True, pad=4),
    ),
    aliases=("tiny-imagenet", "tin"),
)
DATASETS.register("folder", Source(read_folder))


def load_dataset(
    name: str,
    *,
    root: str | Path = "data",
    val_fraction: float = 0.1,
    seed: int = 0,
    download: bool = True,
    limit: int | None = None,
) -> Dataset:
    """Read a dataset; see ``DATASETS.names()``.

    Validation samples are a stratified ``val_fraction`` of the training files, chosen by ``seed``; 0
    leaves none, and a validation folder of the user's own takes precedence. ``limit`` uses only the
    first samples of the training and of the test files (and of a validation folder).

    >>> digits = load_dataset("digits", val_fraction=0.1)
    >>> digits.in_shape, digits.classes, len(digits.train), len(digits.val), len(digits.test)
    ((1, 8, 8), 10, 1294, 144, 359)
    """
    name = DATASETS.canonical(name)
    source = DATASETS.get(name)
    require(0 <= val_fraction < 1, "0 <= val_fraction < 1", val_fraction)
    require(limit is None or limit >= 1, "limit >= 1", limit)
    try:
        parts = source.read(Path(root).expanduser(), download=download, limit=limit)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error}") from error
    classes = len(parts.class_names)
    train = _checked(parts.train, f"{name} training", classes, limit)
    test = _checked(parts.test, f"{name} test", classes, limit)
    if parts.val is not None:
        val = _checked(parts.val, f"{name} validation", classes, limit)
    else:
        rest, chosen = stratified_split(train.labels, val_fraction, seed=seed)
        train, val = (train if len(chosen) == 0 else train.subset(rest)), train.subset(chosen)
    for part in (val, test):
        if part.images.shape[1:] != train.images.shape[1:]:
            shapes = f"{tuple(part.images.shape[1:])} and {tuple(train.images.shape[1:])}"
            raise DataError(f"{name}: images of the splits differ in size, {shapes}")
    return Dataset(name, train, val, test, parts.class_names, source.mean, source.std, source.augmentation)


def _checked(arrays: Arrays, what: str, classes: int, limit: int | None) -> Split:
    split = Split(arrays.images[:limit], arrays.labels[:limit])
    if len(split) == 0:
        raise DataError(f"{what} data is empty")
    outside = ((split.labels < 0) | (split.labels >= classes)).nonzero()
    if len(outside):
        sample = int(outside[0])
        raise DataError(
            f"{what} sample {sample} has label {int(split.labels[sample])}, outside the {classes} classes "
            f"0…{classes - 1}; the file is damaged or belongs to another dataset"
        )
    return split


def batches(
    split: Split,
    *,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    augmentation: Augmentation | None = None,
    device: torch.device | str = "cpu",
    start: int = 0,
    drop_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(x, y, indices) over one epoch, from batch number ``start`` on.

    Order and augmentation follow from (seed, epoch, sample index) alone, so a resumed epoch equals
    the rest of an uninterrupted one. ``drop_last`` leaves out a smaller last batch.

    >>> split = Split(torch.rand(5, 1, 2, 2), torch.arange(5))
    >>> [len(y) for _, y, _ in batches(split, batch_size=2, seed=0, epoch=0)]
    [2, 2, 1]
    """
    for name, value, least in (("batch_size", batch_size, 1), ("epoch", epoch, 0), ("start", start, 0)):
        require(value >= least, f"{name} >= {least}", value)
    size = len(split)
    order = torch.from_numpy(permutation(size, seed=seed, epoch=epoch)) if shuffle else torch.arange(size)
    number = size // batch_size if drop_last else math.ceil(size / batch_size)

    def generate() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for position in range(start, number):
            indices = order[position * batch_size : (position + 1) * batch_size]
            images = _take(split.images, indices)
            if augmentation is not None:
                images = augmentation(images, seed=seed, epoch=epoch, indices=indices)
            yield _to_float(images, device), _take(split.labels, indices).to(device), indices

    return generate()

"""A user's own data, as tensors, a torch Dataset or a DataLoader, in the form the training loop takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gls_lirpa.base.checks import require
from gls_lirpa.base.sampling import Augmentation, stratified_split
from gls_lirpa.data import Dataset, Split
from gls_lirpa.errors import DataError
from gls_lirpa.training.custom import CUSTOM

Data = Any
"""(x, y), a torch Dataset of such pairs, or a DataLoader of batches of them."""


def own_split(data: Data, *, what: str = "training data") -> Split:
    """Everything in ``data``, read once into memory.

    ``data``: a pair (x, y) of tensors or arrays, a map-style Dataset whose items are (x, y), or any iterable of
    batches (x, y) such as a DataLoader. x is uint8, or floating-point in [0, 1]; y are integer class numbers. Random
    augmentation inside a Dataset is drawn once and then stays: leave it to ``augmentation=`` of ``own_dataset``.
    Raises DataError for anything else.

    >>> split = own_split((torch.rand(5, 1, 2, 2), torch.tensor([0, 1, 1, 0, 2])))
    >>> len(split), split.images.shape
    (5, torch.Size([5, 1, 2, 2]))
    """
    x, y = _tensors(data, what)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"{what}: expected integer labels, got {y.dtype}")
    try:
        split = Split(x if x.dtype == torch.uint8 else x.float(), y.long())
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
    if len(split) == 0:
        raise DataError(f"{what} is empty")
    return split


def own_dataset(
    train: Data,
    *,
    val: Data | None = None,
    test: Data | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    classes: int | Sequence[str] | None = None,
    augmentation: Augmentation | None = None,
) -> Dataset:
    """A Dataset of the user's own splits; see :func:`own_split` for what each may be.

    ``val`` None: a stratified ``val_fraction`` of ``train``, chosen by ``seed``. ``test`` None: none. ``classes``:
    their number or their names, by default as many as the labels show.

    >>> data = own_dataset((torch.rand(20, 1, 2, 2), torch.arange(20) % 2), val_fraction=0.2)
    >>> len(data.train), len(data.val), len(data.test), data.classes
    (16, 4, 0, 2)
    """
    whole = own_split(train)
    require(0 <= val_fraction < 1, "0 <= val_fraction < 1", val_fraction)
    held_out = None if val is None else own_split(val, what="validation data")
    tested = whole.subset([]) if test is None else own_split(test, what="test data")
    parts = {"training data": whole, "validation data": held_out, "test data": tested}
    names = _class_names(classes, [part for part in parts.values() if part is not None])
    for what, part in parts.items():
        if part is not None and part.images.shape[1:] != whole.images.shape[1:]:
            shapes = f"{tuple(part.images.shape[1:])} and {tuple(whole.images.shape[1:])}"
            raise DataError(f"{what} and training data differ in the shape of a sample, {shapes}")
    if held_out is None:
        rest, chosen = stratified_split(whole.labels, val_fraction, seed=seed)
        whole, held_out = (whole if len(chosen) == 0 else whole.subset(rest)), whole.subset(chosen)
    return Dataset(CUSTOM, whole, held_out, tested, names, augmentation=augmentation)


def _class_names(classes: int | Sequence[str] | None, parts: list[Split]) -> tuple[str, ...]:
    labels = torch.cat([part.labels for part in parts])
    number = int(labels.max()) + 1
    if isinstance(classes, Sequence):
        names = tuple(classes)
    else:
        names = tuple(map(str, range(max(number, 2) if classes is None else classes)))
    if int(labels.min()) < 0 or number > len(names):
        raise DataError(f"expected labels 0…{len(names) - 1}, got {int(labels.min())}…{int(labels.max())}")
    return names


def _tensors(data: Data, what: str) -> tuple[Tensor, Tensor]:
    if isinstance(data, Split):
        return data.images, data.labels
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(hasattr(part, "shape") for part in data):
        x, y = (torch.as_tensor(part).detach().cpu() for part in data)
        return x, y
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        pairs = [_pair(data[i], what) for i in range(len(data))]
        if not pairs:
            raise DataError(f"{what} is empty")
        return torch.stack([x for x, _ in pairs]), torch.stack([y.reshape(()) for _, y in pairs])
    if isinstance(data, Iterable):
        pairs = [_pair(batch, what) for batch in data]
        if not pairs:
            raise DataError(f"{what} is empty")
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    raise DataError(f"{what}: expected (x, y), a torch Dataset or a DataLoader, got {type(data).__name__}")


def _pair(item: Any, what: str) -> tuple[Tensor, Tensor]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"{what}: expected items (x, y), got {type(item).__name__}")
    try:
        x, y = (torch.as_tensor(part).detach().cpu() for part in item)
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = " and ".join(type(part).__name__ for part in item)
        hint = "add a transform such as ToTensor"
        raise DataError(f"{what}: expected tensors or numbers, got {kinds} ({hint})") from error
    return x, y

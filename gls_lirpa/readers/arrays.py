"""Datasets stored as arrays: scikit-learn's digits, MNIST (IDX), CIFAR-10 (pickled and binary)."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gls_lirpa.base.sampling import stratified_split
from gls_lirpa.errors import DataError
from gls_lirpa.readers import Arrays, Parts
from gls_lirpa.readers.download import download as fetch

_DIGITS_TEST_FRACTION = 0.2
_TEN = tuple("0123456789")

_MNIST_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

_CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_CIFAR_RECORD = 1 + 3 * 32 * 32


def read_digits(root: Path, *, download: bool, limit: int | None) -> Parts:
    """scikit-learn's 1,797 digits of 8×8 pixels, which come with the package.

    The test part is the same for every seed, so that results can be compared.
    """
    del root, download, limit
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(np.asarray(bunch.images, dtype=np.float32) / 16).unsqueeze(1)
    labels = torch.from_numpy(np.asarray(bunch.target, dtype=np.int64))
    train, test = stratified_split(labels, _DIGITS_TEST_FRACTION, seed=0)
    return Parts(Arrays(images[train], labels[train]), Arrays(images[test], labels[test]), _TEN)


def read_mnist(root: Path, *, download: bool, limit: int | None) -> Parts:
    """The four IDX files, plain or gzipped, in MNIST/raw (torchvision's folder) or in ``root`` itself."""
    del limit
    expected = [name for names in _MNIST_FILES.values() for name in names]
    folder = _locate("mnist", {root / "MNIST" / "raw": expected, root: expected}, root, "MNIST" if download else None)
    parts = {}
    for part, (images, labels) in _MNIST_FILES.items():
        pixels, targets = _read_idx(folder / images, dims=3), _read_idx(folder / labels, dims=1)
        if len(pixels) != len(targets):
            raise DataError(f"{folder / images} holds {len(pixels)} images but {labels} {len(targets)} labels")
        parts[part] = Arrays(torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(targets.astype(np.int64)))
    return Parts(parts["train"], parts["test"], _TEN)


def _read_idx(path: Path, *, dims: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An IDX file of bytes: 0, 0, 8, number of dimensions, each size as a big-endian int32, then the data."""
    raw = _read_bytes(path)
    header = 4 + 4 * dims
    if len(raw) < header or raw[:4] != bytes((0, 0, 8, dims)):
        raise DataError(f"{path} is not an IDX file of {dims}-dimensional bytes; delete it and fetch it again")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", dims, offset=4))
    expected = header + math.prod(shape)
    if len(raw) != expected:
        raise DataError(f"{path} has {len(raw)} bytes, expected {expected}; delete it and fetch it again")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy()


def read_cifar10(root: Path, *, download: bool, limit: int | None) -> Parts:
    """cifar-10-batches-py (torchvision's layout) or cifar-10-batches-bin (the official binary files)."""
    del limit
    python, binary = root / "cifar-10-batches-py", root / "cifar-10-batches-bin"
    layouts = {python: list(_CIFAR_BATCHES), binary: [f"{name}.bin" for name in _CIFAR_BATCHES]}
    folder = _locate("cifar10", layouts, root, "CIFAR10" if download else None)
    read = _read_cifar_binary if folder == binary else _read_cifar_pickle
    *train, test = [read(folder / name) for name in layouts[folder]]
    images, labels = torch.cat([a.images for a in train]), torch.cat([a.labels for a in train])
    return Parts(Arrays(images, labels), test, _CIFAR_CLASSES)


def _read_cifar_binary(file: Path) -> Arrays:
    raw = np.frombuffer(_read_bytes(file), dtype=np.uint8)
    if raw.size == 0 or raw.size % _CIFAR_RECORD:
        raise DataError(
            f"{file} has {raw.size} bytes, expected a multiple of {_CIFAR_RECORD}; delete it and fetch it again"
        )
    records = raw.reshape(-1, _CIFAR_RECORD)
    images = records[:, 1:].reshape(-1, 3, 32, 32).copy()
    return Arrays(torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64)))


class _ArrayUnpickler(pickle.Unpickler):
    """Loads numpy arrays and plain containers, and refuses everything else a pickle could execute."""

    _ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "encode"})
    _MODULES = frozenset({"numpy", "numpy.core.multiarray", "numpy._core.multiarray", "_codecs"})

    def find_class(self, module: str, name: str) -> Any:
        if module not in self._MODULES or name not in self._ALLOWED:
            raise pickle.UnpicklingError(f"refused to load {module}.{name}")
        return super().find_class(module, name)


def _read_cifar_pickle(file: Path) -> Arrays:
    raw = _read_bytes(file)
    try:
        batch = _ArrayUnpickler(io.BytesIO(raw), encoding="latin1").load()
        images = np.asarray(batch["data"], dtype=np.uint8).reshape(-1, 3, 32, 32).copy()
        labels = np.asarray(batch["labels"], dtype=np.int64)
    except Exception as error:  # a damaged pickle can raise almost anything
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{file} is not a CIFAR-10 batch ({type(error).__name__}: {reason}); delete it and fetch it again"
        ) from error
    if len(images) == 0 or labels.shape != (len(images),):
        raise DataError(f"{file} holds {len(images)} images but {labels.size} labels")
    return Arrays(torch.from_numpy(images), torch.from_numpy(labels))


def _plain_or_gz(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def _read_bytes(path: Path) -> bytes:
    file = _plain_or_gz(path) or path
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}; delete it and fetch it again") from error


def _locate(name: str, layouts: Mapping[Path, Sequence[str]], root: Path, downloadable: str | None) -> Path:
    """The first folder that holds all its files, after a download by that torchvision class if none does."""

    def look() -> dict[Path, list[str]]:
        return {p: [file for file in files if _plain_or_gz(p / file) is None] for p, files in layouts.items()}

    found = look()
    reason = "download is off"
    if downloadable is not None and all(found.values()):
        failure = fetch(downloadable, root)
        # What a failed download left behind is not looked at.
        found = found if failure else look()
        reason = f"download failed: {failure or 'files still missing'}"
    for folder, lacking in found.items():
        if not lacking:
            return folder
    for folder, lacking in found.items():
        if len(lacking) < len(layouts[folder]):
            raise DataError(f"{name} is incomplete: {folder} lacks {', '.join(lacking)}; {reason}; add what is missing")
    folders_of: dict[str, list[str]] = {}
    for folder, files in layouts.items():
        folders_of.setdefault(", ".join(files), []).append(str(folder))
    looked = " and ".join(f"in {' and '.join(where)} for {files}" for files, where in folders_of.items())
    raise DataError(f"{name} not found: looked {looked}; {reason}; put the files there or name another data root")

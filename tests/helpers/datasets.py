"""Datasets in the formats of their authors, a few images each."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np

Batches = dict[str, tuple[np.ndarray, np.ndarray]]


rng = np.random.default_rng(0)


def _idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def _mnist_files() -> dict[str, np.ndarray]:
    files = {}
    for part, size in (("train", 40), ("t10k", 20)):
        files[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (size, 28, 28)).astype(np.uint8)
        files[f"{part}-labels-idx1-ubyte"] = (np.arange(size) % 10).astype(np.uint8)
    return files


def make_mnist(root: Path) -> dict[str, np.ndarray]:
    (root / "MNIST" / "raw").mkdir(parents=True)
    files = _mnist_files()
    for name, array in files.items():
        (root / "MNIST" / "raw" / name).write_bytes(_idx(array))
    return files


def _cifar_batches() -> Batches:
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    return {n: (rng.integers(0, 256, (10, 3072)).astype(np.uint8), np.arange(10, dtype=np.uint8)) for n in names}


def make_cifar_binary(root: Path) -> Batches:
    (root / "cifar-10-batches-bin").mkdir(parents=True)
    contents = _cifar_batches()
    for name, (pixels, labels) in contents.items():
        np.concatenate([labels[:, None], pixels], axis=1).tofile(root / "cifar-10-batches-bin" / f"{name}.bin")
    return contents


def make_cifar_python(root: Path) -> Batches:
    (root / "cifar-10-batches-py").mkdir(parents=True)
    contents = _cifar_batches()
    for name, (pixels, labels) in contents.items():
        raw = pickle.dumps({"data": pixels, "labels": labels.tolist()}, protocol=2)
        # The official files were pickled by a numpy that knew this module by its old name.
        raw = raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        (root / "cifar-10-batches-py" / name).write_bytes(raw)
    return contents


def _save_image(path: Path, array: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, quality=95) if path.suffix == ".JPEG" else Image.fromarray(array).save(path)


def _colour(level: int, size: tuple[int, int] = (64, 64)) -> np.ndarray:
    return np.full((*size, 3), level, dtype=np.uint8)


def make_tinyimagenet(root: Path) -> None:
    base = root / "tiny-imagenet-200"
    lines = []
    for label, wnid in enumerate(("n01", "n03", "n02")):
        for k in range(4):
            _save_image(base / "train" / wnid / "images" / f"{wnid}_{k}.JPEG", _colour(int(wnid[1:]) * 50 + k))
        (base / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
        _save_image(base / "val" / "images" / f"val_{label}.JPEG", _colour(int(wnid[1:]) * 50))
        lines.append(f"val_{label}.JPEG\t{wnid}\t0\t0\t62\t62")
    lines.append("val_99.JPEG\tn77\t0\t0\t1\t1")
    _save_image(base / "train" / "n01" / "images" / "n01_9.JPEG", np.full((64, 64), 50, dtype=np.uint8))
    (base / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")


def make_folder(root: Path, *, parts: tuple[str, ...] = ("train", "test"), grey: bool = True) -> None:
    for part in parts:
        for label, name in enumerate(("cat", "dog")):
            for k in range(5):
                level = 100 * label + k
                array = np.full((6, 9), level, dtype=np.uint8) if grey else _colour(level, (6, 9))
                _save_image(root / part / name / f"{k}.png", array)

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from gls_lirpa.data import Augmentation, load_dataset
from gls_lirpa.errors import DataError
from tests.helpers.datasets import (
    Batches,
    _colour,
    _idx,
    _mnist_files,
    _save_image,
    make_cifar_binary,
    make_cifar_python,
    make_folder,
    make_mnist,
    make_tinyimagenet,
)

# Prepares a folder and returns the name of the dataset to load from it.
Case = Callable[[Path], str]


# ---------------------------------------------------------------- files in the official layouts


# ---------------------------------------------------------------- reading


def test_mnist(tmp_path: Path) -> None:
    files = make_mnist(tmp_path)
    mnist = load_dataset("mnist", root=tmp_path, val_fraction=0, download=False)
    assert (mnist.in_shape, mnist.classes, len(mnist.val)) == ((1, 28, 28), 10, 0)
    assert mnist.train.images.dtype == torch.uint8
    assert np.array_equal(mnist.train.images[:, 0].numpy(), files["train-images-idx3-ubyte"])
    assert np.array_equal(mnist.test.labels.numpy(), files["t10k-labels-idx1-ubyte"])


def test_mnist_gzipped_and_directly_in_the_root(tmp_path: Path) -> None:
    files = _mnist_files()
    for name, array in files.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(_idx(array)))
    mnist = load_dataset("mnist", root=str(tmp_path), val_fraction=0, download=False)
    assert np.array_equal(mnist.test.images[:, 0].numpy(), files["t10k-images-idx3-ubyte"])


@pytest.mark.parametrize("make", [make_cifar_binary, make_cifar_python])
def test_cifar10_in_both_layouts(tmp_path: Path, make: Callable[[Path], Batches]) -> None:
    contents = make(tmp_path)
    cifar = load_dataset("CIFAR-10", root=tmp_path, val_fraction=0, download=False)
    assert (cifar.name, cifar.in_shape, cifar.classes) == ("cifar10", (3, 32, 32), 10)
    assert cifar.augmentation == Augmentation(flip=True, pad=2)
    assert cifar.mean == (0.4914, 0.4822, 0.4465) and cifar.std == (0.2023, 0.1994, 0.2010)
    assert (len(cifar.train), len(cifar.test)) == (50, 10)
    # A record holds all of red, then green, then blue.
    pixels = contents["data_batch_2"][0][3].reshape(3, 32, 32)
    assert np.array_equal(cifar.train.images[13].numpy(), pixels)
    assert cifar.test.labels.tolist() == list(range(10))


def test_cifar10_falls_back_to_the_complete_layout(tmp_path: Path) -> None:
    make_cifar_python(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    contents = make_cifar_binary(tmp_path)
    cifar = load_dataset("cifar10", root=tmp_path, download=False)
    assert np.array_equal(cifar.test.images[0].numpy(), contents["test_batch"][0][0].reshape(3, 32, 32))


def test_tinyimagenet_with_the_classes_present(tmp_path: Path) -> None:
    make_tinyimagenet(tmp_path)
    tin = load_dataset("tinyimagenet", root=tmp_path, val_fraction=0)
    assert tin.class_names == ("n01", "n02", "n03") and tin.in_shape == (3, 64, 64)
    assert tin.train.images.dtype == torch.uint8 and tin.augmentation == Augmentation(flip=True, pad=4)
    assert len(tin.train) == 13
    # Classes take turns, so that any beginning is balanced; a grey file becomes colour.
    assert tin.train.labels.tolist() == [0, 1, 2] * 4 + [0]
    levels = tin.train.images.float().mean((1, 2, 3)).round().int().tolist()
    assert all(abs(level - expected) <= 2 for level, expected in zip(levels, [50, 100, 150] * 3, strict=False))
    assert tin.test.labels.tolist() == [0, 2, 1]
    short = load_dataset("tinyimagenet", root=tmp_path / "tiny-imagenet-200", val_fraction=0, limit=2)
    assert (len(short.train), len(short.test), short.classes) == (2, 2, 3)


@pytest.mark.parametrize("grey", [True, False])
def test_folder_of_a_user(tmp_path: Path, grey: bool) -> None:
    make_folder(tmp_path, grey=grey)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    found = load_dataset("folder", root=tmp_path, val_fraction=0.2)
    assert found.in_shape == (1 if grey else 3, 6, 9) and found.class_names == ("cat", "dog")
    assert (len(found.train), len(found.val), len(found.test)) == (8, 2, 10)
    assert found.val.labels.tolist() == [0, 1]
    levels = found.test.images[:, 0, 0, 0].tolist()
    assert levels == [100 * label + k for k in range(5) for label in (0, 1)]
    make_folder(tmp_path, parts=("val",), grey=grey)
    separate = load_dataset("folder", root=tmp_path, val_fraction=0)
    assert (len(separate.train), len(separate.val)) == (10, 10)


# ---------------------------------------------------------------- bad files


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploded",)


def _case(dataset: str, place: str, make: Callable[[Path], object], spoil: Callable[[Path], object]) -> Case:
    def prepare(root: Path) -> str:
        make(root)
        spoil(root / place)
        return dataset

    return prepare


_mnist_case = partial(_case, "mnist", "MNIST/raw", make_mnist)
_binary_case = partial(_case, "cifar10", "cifar-10-batches-bin", make_cifar_binary)
_python_case = partial(_case, "cifar10", "cifar-10-batches-py", make_cifar_python)
_tin_case = partial(_case, "tinyimagenet", "tiny-imagenet-200", make_tinyimagenet)
_folder_case = partial(_case, "folder", ".", make_folder)


def _bad_label(place: Path) -> None:
    raw = bytearray((place / "data_batch_1.bin").read_bytes())
    raw[3073 * 4] = 17
    (place / "data_batch_1.bin").write_bytes(raw)


def _empty_arrays(place: Path) -> None:
    (place / "train-images-idx3-ubyte").write_bytes(_idx(np.zeros((0, 28, 28), np.uint8)))
    (place / "train-labels-idx1-ubyte").write_bytes(_idx(np.zeros(0, np.uint8)))


def _truncated_gz(place: Path) -> None:
    (place / "t10k-labels-idx1-ubyte").unlink()
    (place / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(99))[:20])


def _nothing(name: str) -> Case:
    return lambda root: name


BAD = [
    (_nothing("mnist"), r"mnist not found: looked in .*MNIST/raw and .* for train-images-idx3-ubyte,.*download is off"),
    (_nothing("cifar10"), r"cifar10 not found: .*-py for data_batch_1,.*-bin for data_batch_1\.bin"),
    (_nothing("tinyimagenet"), r"tinyimagenet not found: .*val_annotations\.txt; unpack tiny-imagenet-200\.zip"),
    (_nothing("folder"), "train does not exist: expected .*/train/<class>"),
    (_mnist_case(lambda p: (p / "t10k-labels-idx1-ubyte").unlink()), "incomplete: .* lacks t10k-labels-idx1-ubyte;"),
    (_mnist_case(lambda p: os.truncate(p / "train-images-idx3-ubyte", 999)), r"ubyte has 999 bytes, expected 31376"),
    (_mnist_case(lambda p: os.truncate(p / "train-images-idx3-ubyte", 3)), "is not an IDX file"),
    (_mnist_case(lambda p: (p / "train-labels-idx1-ubyte").write_bytes(b"<html>404")), "is not an IDX file"),
    (
        _mnist_case(lambda p: (p / "train-labels-idx1-ubyte").write_bytes(_idx(np.zeros(7, np.uint8)))),
        "holds 40 images but train-labels-idx1-ubyte 7 labels",
    ),
    (_mnist_case(_empty_arrays), "mnist training data is empty"),
    (_mnist_case(_truncated_gz), r"ubyte\.gz cannot be read"),
    (_binary_case(lambda p: os.truncate(p / "data_batch_3.bin", 5000)), "data_batch_3.bin has 5000 bytes"),
    (_binary_case(lambda p: os.truncate(p / "data_batch_3.bin", 0)), "data_batch_3.bin has 0 bytes"),
    (_binary_case(_bad_label), "training sample 4 has label 17, outside the 10 classes 0…9"),
    (_binary_case(lambda p: (p / "data_batch_5.bin").unlink()), "batches-bin lacks data_batch_5.bin"),
    (_python_case(lambda p: os.truncate(p / "test_batch", 500)), "test_batch is not a CIFAR-10 batch"),
    (
        _python_case(lambda p: (p / "test_batch").write_bytes(pickle.dumps({"labels": [1]}))),
        "test_batch is not a CIFAR-10 batch .KeyError",
    ),
    (
        _python_case(lambda p: (p / "test_batch").write_bytes(pickle.dumps(_Bomb()))),
        "test_batch is not a CIFAR-10 batch .UnpicklingError: refused to load",
    ),
    (_tin_case(lambda p: (p / "val" / "val_annotations.txt").write_text("")), "names no image of the 3 classes"),
    (_tin_case(lambda p: (p / "val" / "val_annotations.txt").write_text("val_1.JPEG n01\n")), "line 1 is not"),
    (_tin_case(lambda p: (p / "val" / "images" / "val_1.JPEG").unlink()), r"val_1\.JPEG is not a readable image"),
    (_tin_case(lambda p: os.truncate(p / "train/n02/images/n02_1.JPEG", 300)), r"n02_1\.JPEG is not a readable"),
    (_tin_case(lambda p: [f.unlink() for f in (p / "train/n02/images").iterdir()]), "n02/images holds no images"),
    (_folder_case(lambda p: (p / "train" / "cat" / "1.png").write_text("text")), r"cat/1\.png is not a readable image"),
    (_folder_case(lambda p: (p / "train" / "cat" / "0.png").write_text("text")), r"cat/0\.png is not a readable image"),
    (
        _folder_case(lambda p: _save_image(p / "test" / "dog" / "3.png", np.zeros((5, 9), np.uint8))),
        r"dog/3\.png is 9x5 but .* is 9x6: all images need one size",
    ),
    (
        _folder_case(lambda p: [_save_image(f, np.zeros((5, 9), np.uint8)) for f in (p / "test").glob("*/*.png")]),
        r"images of the splits differ in size, \(1, 5, 9\) and \(1, 6, 9\)",
    ),
    (_folder_case(lambda p: (p / "train" / "eel").mkdir()), "eel holds no images"),
    (_folder_case(lambda p: (p / "test" / "cat").rename(p / "test" / "cow")), "test/cow is not among the 2 classes"),
    (_folder_case(lambda p: (p / "test").rename(p / "tset")), "test does not exist"),
    (_folder_case(lambda p: [(p / "val").mkdir()]), "val holds no class folders"),
    (_folder_case(lambda p: _save_image(p / "train" / "dog" / "2.png", _colour(3, (6, 9)))), "colour image among grey"),
    (
        _folder_case(lambda p: _save_image(p / "train" / "dog" / "2.png", np.full((6, 9), 40000, np.uint16))),
        "more than 8 bits per channel",
    ),
]


@pytest.mark.parametrize(("prepare", "message"), BAD, ids=range(len(BAD)))
def test_bad_files_give_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Case, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = prepare(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(name, root=tmp_path, download=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()

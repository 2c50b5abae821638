"""Datasets stored as image files: TinyImageNet's official folders and a user's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gls_lirpa.errors import DataError
from gls_lirpa.readers import Arrays, Parts

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
_GREY_MODES = frozenset({"1", "L", "LA"})
_DEEP_MODES = ("I", "F")
_CHUNK = 512

Pixels = npt.NDArray[np.uint8]


def read_tinyimagenet(root: Path, *, download: bool, limit: int | None) -> Parts:
    """tiny-imagenet-200 as distributed, with any number of its classes present.

    Classes are the folders under train/, sorted; val/ is the test part, as in the literature, since
    the labels of the official test images were never published.
    """
    del download  # torchvision offers none
    base = next((b for b in (root / "tiny-imagenet-200", root) if (b / "train").is_dir()), None)
    if base is None or not (base / "val" / "val_annotations.txt").is_file():
        raise DataError(
            f"tinyimagenet not found: looked in {root / 'tiny-imagenet-200'} and {root} for "
            "train/<wnid>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt; "
            "unpack tiny-imagenet-200.zip there or name another data root"
        )
    classes = _class_folders(base / "train")
    files = [_images_in(base / "train" / name / "images") for name in classes]
    train_paths, train_labels = _interleave(files)
    test_paths, test_labels = _annotated(base / "val", {name: label for label, name in enumerate(classes)})
    train = _decode(train_paths[:limit], train_labels, grey=False)
    test = _decode(test_paths[:limit], test_labels, grey=False)
    return Parts(train, test, classes)


def _annotated(folder: Path, classes: dict[str, int]) -> tuple[list[Path], list[int]]:
    """Images and labels of val_annotations.txt, in its order, as far as their class is present."""
    paths, labels = [], []
    table = folder / "val_annotations.txt"
    for number, line in enumerate(table.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) < 2:
            raise DataError(f"{table} line {number} is not '<file>TAB<class>…': {line[:40]!r}")
        if fields[1] in classes:
            paths.append(folder / "images" / fields[0])
            labels.append(classes[fields[1]])
    if not paths:
        raise DataError(f"{table} names no image of the {len(classes)} classes in {folder.parent / 'train'}")
    return paths, labels


def read_folder(root: Path, *, download: bool, limit: int | None) -> Parts:
    """A user's images: root/train/<class>/*.png, root/test/<class>/…, and root/val/<class>/… if wanted.

    All images have one size and 8 bits per channel; the first one decides between grey and colour.
    """
    del download
    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise DataError(f"image folder {root / part} does not exist: expected {root / part}/<class>/*.png")
    classes = _class_folders(root / "train")
    grey: bool | None = None
    parts: dict[str, Arrays] = {}
    for part in ("train", "val", "test"):
        folder = root / part
        if not folder.is_dir():
            continue
        unknown = sorted(set(_class_folders(folder)) - set(classes))
        if unknown:
            raise DataError(f"{folder / unknown[0]} is not among the {len(classes)} classes of {root / 'train'}")
        files = [_images_in(folder / name) if (folder / name).is_dir() else [] for name in classes]
        paths, labels = _interleave(files)
        grey = _is_grey(paths[0]) if grey is None else grey
        parts[part] = _decode(paths[:limit], labels, grey=grey)
    return Parts(parts["train"], parts["test"], classes, parts.get("val"))


def _class_folders(folder: Path) -> tuple[str, ...]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise DataError(f"{folder} holds no class folders: expected {folder}/<class>/…")
    return tuple(names)


def _images_in(folder: Path) -> list[Path]:
    names = os.listdir(folder) if folder.is_dir() else []
    files = sorted(n for n in names if os.path.splitext(n)[1].lower() in _SUFFIXES and not n.startswith("."))
    if not files:
        raise DataError(f"{folder} holds no images")
    return [folder / name for name in files]


def _interleave(files: Sequence[Sequence[Path]]) -> tuple[list[Path], list[int]]:
    """The first image of every class, then the second of every class, …: any beginning is balanced."""
    order = sorted((rank, label) for label, paths in enumerate(files) for rank in range(len(paths)))
    return [files[label][rank] for rank, label in order], [label for _, label in order]


def _decode(paths: Sequence[Path], labels: Sequence[int], *, grey: bool) -> Arrays:
    first = _pixels(paths[0], grey)
    images = torch.empty((len(paths), *first.shape), dtype=torch.uint8)
    out = images.numpy()

    def load(position: int) -> None:
        pixels = _pixels(paths[position], grey)
        if pixels.shape != first.shape:
            size, wanted = ("x".join(map(str, p.shape[:0:-1])) for p in (pixels, first))
            raise DataError(f"{paths[position]} is {size} but {paths[0]} is {wanted}: all images need one size")
        out[position] = pixels

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # In chunks, so that a damaged file is reported before the rest has been decoded.
        for start in range(0, len(paths), _CHUNK):
            list(pool.map(load, range(start, min(start + _CHUNK, len(paths)))))
    return Arrays(images, torch.tensor(labels[: len(paths)], dtype=torch.int64))


def _is_grey(path: Path) -> bool:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.mode in _GREY_MODES
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} is not a readable image: {error}") from error


def _pixels(path: Path, grey: bool) -> Pixels:
    """One image as C×H×W."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode = image.mode
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not a readable image: {error}") from error
    if mode.startswith(_DEEP_MODES):
        raise DataError(f"{path} has more than 8 bits per channel (mode {mode}); convert it to 8 bits")
    if grey and mode not in _GREY_MODES:
        raise DataError(f"{path} is a colour image among grey ones; convert all to one kind")
    return pixels[None] if grey else pixels.transpose(2, 0, 1)

"""Order, splits and augmentation as pure functions of (seed, epoch, sample index).

Every random bit is a hash of these numbers, not the next value of a stream: what a sample looks like
in an epoch depends neither on the batch size, nor on what was loaded before, nor on library versions.
Pixels are moved by numpy: torch would start its threads for every batch, which costs more than the work
itself when the cores are busy (up to 50 ms a batch were seen).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gls_lirpa.base.checks import require
from gls_lirpa.base.seeds import Int64, UInt64, random_bits

# One number per purpose, so that order and augmentation are independent of each other.
_ORDER, _SPLIT, _AUGMENT = 1, 2, 3


def permutation(size: int, *, seed: int, epoch: int) -> Int64:
    """The order in which an epoch visits ``size`` samples.

    >>> sorted(permutation(5, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4]
    """
    indices: Int64 = np.arange(size, dtype=np.int64)
    return np.argsort(random_bits((seed, _ORDER, epoch), indices), kind="stable")


def stratified_split(labels: Tensor, fraction: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """(rest, chosen): ascending indices, ``chosen`` a ``fraction`` of the samples with every class's share.

    Both parts are non-empty where two samples or more exist and the fraction is not 0.

    >>> rest, chosen = stratified_split(torch.tensor([0, 1] * 10), 0.2, seed=0)
    >>> len(rest), len(chosen)
    (16, 4)
    """
    size = len(labels)
    number = 0 if fraction == 0 or size < 2 else min(max(round(fraction * size), 1), size - 1)
    classes = labels.numpy()
    bits = random_bits((seed, _SPLIT), np.arange(size, dtype=np.int64))
    shuffled = np.lexsort((bits, classes))
    # A sample's relative rank in its shuffled class: the smallest ranks hold every class's share.
    counts = np.unique(classes, return_counts=True)[1]
    ranks = np.empty(size)
    ranks[shuffled] = np.concatenate([(np.arange(n) + 0.5) / n for n in counts] or [np.empty(0)])
    chosen = np.zeros(size, dtype=bool)
    chosen[np.lexsort((bits, ranks))[:number]] = True
    return torch.from_numpy(np.flatnonzero(~chosen)), torch.from_numpy(np.flatnonzero(chosen))


@dataclass(frozen=True)
class Augmentation:
    """Random horizontal flip, and random crop to the same size after ``pad`` pixels on every side.

    The pixels around the image repeat its edge, as in the literature's code, or are 0 with ``edge=False``.

    >>> x = torch.rand(2, 3, 8, 8)
    >>> Augmentation(flip=True, pad=2)(x, seed=0, epoch=1, indices=torch.tensor([7, 8])).shape
    torch.Size([2, 3, 8, 8])
    """

    flip: bool = False
    pad: int = 0
    edge: bool = True

    def __post_init__(self) -> None:
        require(self.pad >= 0, "pad >= 0", self.pad)

    def __call__(self, images: Tensor, *, seed: int, epoch: int, indices: Tensor) -> Tensor:
        """Augment a batch N×C×H×W, of any dtype and in main memory, whose samples have these indices."""
        bits = random_bits((seed, _AUGMENT, epoch), indices.numpy())
        pixels = images.numpy()
        if self.pad:
            pixels = self._crop(pixels, bits)
        if self.flip:
            flipped = (bits & np.uint64(1)).astype(bool)
            pixels = np.where(flipped[:, None, None, None], pixels[..., ::-1], pixels)
        return torch.from_numpy(pixels)

    def _crop(self, pixels: npt.NDArray[Any], bits: UInt64) -> npt.NDArray[Any]:
        size, _, height, width = pixels.shape
        pad = self.pad
        around = ((0, 0), (0, 0), (pad, pad), (pad, pad))
        padded = np.pad(pixels, around, mode="edge") if self.edge else np.pad(pixels, around)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        positions = np.uint64(2 * pad + 1)
        top = ((bits >> np.uint64(1)) & np.uint64(0x7FFFFFFF)) % positions
        left = (bits >> np.uint64(32)) % positions
        return windows[np.arange(size), :, top.astype(np.int64), left.astype(np.int64)]

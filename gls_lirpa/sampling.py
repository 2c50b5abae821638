"""Order, splits and augmentation as pure functions of (seed, epoch, sample index).

Every random bit is a hash of these numbers, not the next value of a stream: what a sample looks like
in an epoch depends neither on the batch size, nor on what was loaded before, nor on library versions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gls_lirpa.errors import ConfigError

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

# One number per purpose, so that order and augmentation are independent of each other.
_ORDER, _SPLIT, _AUGMENT = 1, 2, 3


def _mix(state: UInt64) -> UInt64:
    """SplitMix64's output function: a bijection of 64-bit words in which every input bit matters."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _bits(key: tuple[int, ...], indices: Int64) -> UInt64:
    """64 random bits for every index under a key."""
    state = np.zeros(1, dtype=np.uint64)
    golden = np.uint64(0x9E3779B97F4A7C15)
    for part in key:
        state = _mix((state ^ np.uint64(part % 2**64)) + golden)
    return _mix(state + (indices.astype(np.uint64) + np.uint64(1)) * golden)


def permutation(size: int, *, seed: int, epoch: int) -> Int64:
    """The order in which an epoch visits ``size`` samples.

    >>> sorted(permutation(5, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4]
    """
    indices: Int64 = np.arange(size, dtype=np.int64)
    return np.argsort(_bits((seed, _ORDER, epoch), indices), kind="stable")


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
    bits = _bits((seed, _SPLIT), np.arange(size, dtype=np.int64))
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
    """Random horizontal flip, and random crop to the same size after ``pad`` zero pixels on every side.

    >>> x = torch.rand(2, 3, 8, 8)
    >>> Augmentation(flip=True, pad=2)(x, seed=0, epoch=1, indices=torch.tensor([7, 8])).shape
    torch.Size([2, 3, 8, 8])
    """

    flip: bool = False
    pad: int = 0

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ConfigError(f"expected pad >= 0, got {self.pad}")

    def __call__(self, images: Tensor, *, seed: int, epoch: int, indices: Tensor) -> Tensor:
        """Augment a batch N×C×H×W of any dtype whose samples have these indices."""
        bits = _bits((seed, _AUGMENT, epoch), indices.cpu().numpy())
        if self.pad:
            images = self._crop(images, bits)
        if self.flip:
            flipped = torch.from_numpy((bits & np.uint64(1)).astype(bool)).to(images.device)
            images = torch.where(flipped[:, None, None, None], images.flip(-1), images)
        return images

    def _crop(self, images: Tensor, bits: UInt64) -> Tensor:
        size, _, height, width = images.shape
        positions = np.uint64(2 * self.pad + 1)
        top = torch.from_numpy((((bits >> np.uint64(1)) & np.uint64(0x7FFFFFFF)) % positions).astype(np.int64))
        left = torch.from_numpy(((bits >> np.uint64(32)) % positions).astype(np.int64))
        padded = torch.nn.functional.pad(images, [self.pad] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        sample = torch.arange(size, device=images.device)
        return windows[sample, :, top.to(images.device), left.to(images.device)]

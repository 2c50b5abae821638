"""Seeds that follow from numbers: the run's seed, an epoch, a sample's index.

But for :func:`drawn_seeds` nothing here is the next value of a stream, so what is random about a sample or a step
depends neither on what came before it nor on library versions. The other three stay apart because results on file were
made with them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
# The constants of xxHash64.
_PRIME_1, _PRIME_2, _PRIME_5 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x27D4EB2F165667C5


def derived_seed(*numbers: int) -> int:
    """A seed in [0, 2⁶³) for what ``numbers`` name, e.g. (seed, epoch, step); each is >= 0 and below 2⁶¹ − 1.

    One round of xxHash64 per number. The closing constant makes it the hash of a tuple in Python 3.8 to 3.14, from
    which the seeds of earlier runs were taken.

    >>> derived_seed(0, 1, 2) == hash((0, 1, 2)) % 2**63, derived_seed(0, 1, 2) == derived_seed(0, 2, 1)
    (True, False)
    """
    state = _PRIME_5
    for number in numbers:
        state = (state + number * _PRIME_2) % _WORD
        state = (state << 31 | state >> 33) % _WORD
        state = state * _PRIME_1 % _WORD
    return (state + (len(numbers) ^ _PRIME_5 ^ 3527539)) % 2**63


def drawn_seeds(count: int, generator: torch.Generator | None) -> list[int]:
    """The next seeds of a stream, torch's own where there is no generator.

    >>> drawn_seeds(2, torch.Generator().manual_seed(0)) == drawn_seeds(2, torch.Generator().manual_seed(0))
    True
    """
    device = torch.device("cpu") if generator is None else generator.device
    return [int(seed) for seed in torch.randint(2**63 - 1, (count,), generator=generator, device=device)]


def sample_generators(seed: int, indices: Tensor) -> list[torch.Generator]:
    """One generator per sample, so that what a sample sees does not depend on its batch.

    >>> sample_generators(0, torch.tensor([3]))[0].initial_seed() == 3 * 0x9E3779B97F4A7C15 % 2**63
    True
    """
    # Multiplying by an odd constant keeps (seed, index) pairs apart: neighbours get distant seeds.
    return [
        torch.Generator().manual_seed((seed * 0xD1342543DE82EF95 + index * 0x9E3779B97F4A7C15) % 2**63)
        for index in indices.tolist()
    ]


def _mix(state: UInt64) -> UInt64:
    """SplitMix64's output function: a bijection of 64-bit words in which every input bit matters."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def random_bits(key: tuple[int, ...], indices: Int64) -> UInt64:
    """64 random bits for every index under a key.

    >>> random_bits((0, 1), np.arange(2)).tolist() == random_bits((0, 1), np.arange(2)).tolist()
    True
    """
    state = np.zeros(1, dtype=np.uint64)
    golden = np.uint64(_GOLDEN)
    for part in key:
        state = _mix((state ^ np.uint64(part % 2**64)) + golden)
    return _mix(state + (indices.astype(np.uint64) + np.uint64(1)) * golden)

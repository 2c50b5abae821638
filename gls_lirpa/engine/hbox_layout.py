"""Where the windows of HBox's coefficients lie in the image, and their sum there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gls_lirpa.engine.graph import Convolution

Pair = tuple[int, int]

LARGEST_SHARE = 0.5
"""Share of the image up to which a window pays."""


@dataclass(frozen=True)
class ReceptiveField:
    """Which pixels a map's neurons see, in rows and columns."""

    size: Pair = (1, 1)
    stride: Pair = (1, 1)
    offset: Pair = (0, 0)

    def behind(self, convolution: Convolution) -> ReceptiveField:
        sides = range(2)
        size, stride, padding = convolution.size, convolution.stride, convolution.padding
        return ReceptiveField(
            pair((size[i] - 1) * self.stride[i] + self.size[i] for i in sides),
            pair(stride[i] * self.stride[i] for i in sides),
            pair(padding[i] * self.stride[i] + self.offset[i] for i in sides),
        )

    def hull(self, other: ReceptiveField) -> ReceptiveField:
        """The smallest window that holds both, of the same stride."""
        offset = pair(max(self.offset[i], other.offset[i]) for i in range(2))
        ends = [max(w.size[i] - w.offset[i] for w in (self, other)) for i in range(2)]
        return ReceptiveField(pair(ends[i] + offset[i] for i in range(2)), self.stride, offset)

    def extent(self, positions: Pair) -> Pair:
        """Rows and columns from the first window's first to the last window's last."""
        return pair((positions[i] - 1) * self.stride[i] + self.size[i] for i in range(2))

    def margins(self, positions: Pair, image: Pair) -> list[int]:
        """How far the windows reach over the image, in the order of ``F.pad``; negative if they do not."""
        extent = self.extent(positions)
        ends = [(self.offset[i], extent[i] - self.offset[i] - image[i]) for i in range(2)]
        return [*ends[1], *ends[0]]

    def pays(self, image: Pair) -> bool:
        return math.prod(self.size) <= LARGEST_SHARE * math.prod(image)


def pair(values: Iterable[int]) -> Pair:
    first, second = values
    return first, second


def laid(parts: Tensor, stride: Pair) -> Tensor:
    """``F.fold`` of (n, *positions, channels, *size), without moving the channels: (n, channels, *extent).

    >>> laid(torch.ones(1, 1, 3, 1, 1, 2), (1, 1))
    tensor([[[[1., 2., 2., 1.]]]])
    """
    return _Laid.apply(parts, stride)  # type: ignore[no-any-return,no-untyped-call]


class _Laid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, stride: Pair) -> Tensor:
        count, *positions, channels = parts.shape[:4]
        ctx.size, ctx.stride = pair(parts.shape[4:]), stride
        extent = ReceptiveField(ctx.size, stride).extent(pair(positions))
        result = parts.new_zeros(count, channels, *extent)
        for at, part in _slices(parts, stride):
            result[at] += part
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        windows = gradients[0].unfold(2, ctx.size[0], ctx.stride[0]).unfold(3, ctx.size[1], ctx.stride[1])
        return windows.permute(0, 2, 3, 1, 4, 5), None


def _slices(parts: Tensor, stride: Pair) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Pieces of the parts and where each belongs: per position or per entry of the window, whichever are fewer."""
    positions, size, every = parts.shape[1:3], parts.shape[4:], slice(None)
    if math.prod(positions) <= math.prod(size):
        for p, q in itertools.product(*map(range, positions)):
            top, left = p * stride[0], q * stride[1]
            yield (every, every, slice(top, top + size[0]), slice(left, left + size[1])), parts[:, p, q]
        return
    for i, j in itertools.product(*map(range, size)):
        rows = slice(i, i + (positions[0] - 1) * stride[0] + 1, stride[0])
        columns = slice(j, j + (positions[1] - 1) * stride[1] + 1, stride[1])
        yield (every, every, rows, columns), parts[..., i, j].permute(0, 3, 1, 2)

"""Sums over regularly placed windows of an image, cropping and zero padding: one depthwise convolution each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class Side:
    """Windows along one side of an image: output o sees the pixels start + o·step + {0, …, size − 1}."""

    image: int
    start: int
    step: int
    size: int
    outputs: int

    @property
    def padding(self) -> int:
        """Zeros that both ends need so that no window reaches further."""
        end = self.start + (self.outputs - 1) * self.step + self.size
        return max(0, -self.start, end - self.image)

    def kernel(self) -> Pair:
        """Zeros before the window in the kernel, and the kernel's size.

        With padding P ≥ −start a kernel that begins with P + start zeros puts the window in its place,
        and ⌊(image + 2P − K) / step⌋ + 1 outputs are ``outputs`` if K > image + 2P − outputs · step.
        """
        lead = self.padding + self.start
        return lead, max(lead + self.size, self.image + 2 * self.padding - self.outputs * self.step + 1)


@dataclass(frozen=True)
class DepthwiseConvolution:
    """What ``torch.conv2d`` needs besides its input."""

    weight: Tensor
    stride: Pair
    padding: Pair
    groups: int

    def __call__(self, x: Tensor) -> Tensor:
        return torch.conv2d(x, self.weight, None, self.stride, self.padding, (1, 1), self.groups)


def window_sums(x: Tensor, rows: Side, columns: Side, *, factor: float = 1.0) -> DepthwiseConvolution:
    """``factor`` times the sum over each window, in every channel; pixels outside the image are zeros.

    >>> x = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> window_sums(x, Side(2, -1, 1, 2, 2), Side(2, 0, 1, 2, 1))(x).flatten().tolist()
    [1.0, 6.0]
    """
    (top, height), (left, width) = rows.kernel(), columns.kernel()
    weight = torch.zeros(x.shape[1], 1, height, width, dtype=x.dtype, device=x.device)
    weight[:, :, top : top + rows.size, left : left + columns.size] = factor
    return DepthwiseConvolution(weight, (rows.step, columns.step), (rows.padding, columns.padding), int(x.shape[1]))

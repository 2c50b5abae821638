"""Elementwise constants as layers, in the forms in which their bounds are exact."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Elementwise(nn.Module):
    """scale · x + shift, with constants that broadcast over the samples; None: no such term.

    >>> Elementwise(torch.tensor([2.0, 3.0]), None)(torch.ones(1, 2)).tolist()
    [[2.0, 3.0]]
    """

    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, scale: Tensor | None, shift: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            x = x * self.scale
        return x if self.shift is None else x + self.shift


def elementwise_layer(scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """scale · x + shift, for constants of the shape of a sample, as a layer that the engine can bound.

    Channels of images are scaled by a 1×1 convolution: auto_LiRPA 0.3 cannot carry a convolution's bounds back
    through elementwise operations.

    >>> elementwise_layer(torch.ones(3, 2, 2), None, torch.float32)
    Conv2d(3, 3, kernel_size=(1, 1), stride=(1, 1))
    """
    shape = next(c for c in (scale, shift) if c is not None).shape
    factor = per_channel(torch.ones(shape).double() if scale is None else scale)
    offset = per_channel(torch.zeros(shape).double() if shift is None else shift)
    if factor is None or offset is None or len(shape) != 3:
        # With a batch dimension of their own: auto_LiRPA 0.3 takes the first one of a constant for it.
        return Elementwise(*(None if c is None else c.to(dtype).unsqueeze(0) for c in (scale, shift)))
    conv = nn.Conv2d(len(factor), len(factor), 1, dtype=dtype)
    with torch.no_grad():
        conv.weight.copy_(torch.diag(factor)[:, :, None, None])
        if conv.bias is not None:
            conv.bias.copy_(offset)
    return conv


def per_channel(value: Tensor | None) -> Tensor | None:
    """One number per channel, if that is all a constant of shape (channels, …) holds.

    >>> per_channel(torch.tensor([[2.0, 2.0], [3.0, 3.0]])), per_channel(torch.tensor([[2.0, 1.0]]))
    (tensor([2., 3.]), None)
    """
    if value is None:
        return None
    flat = value.reshape(len(value), -1)
    return flat[:, 0].clone() if bool((flat == flat[:, :1]).all()) else None

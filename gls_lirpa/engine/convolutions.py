"""Convolutions of very many small maps, where bounds on convolutional networks spend most of their time.

CROWN in patches mode sends one small map per neuron and sample through a transposed convolution, HBox
one map per input pixel and sample through a convolution. With few channels the processor's routines,
above all the backward ones, are many times slower than a product with the layer written as a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Convolution = Callable[..., Tensor]

LARGEST_WASTE = 64.0
"""Channels × (multiplications of the product / those of the convolution) up to which the product was faster."""


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **named: Any) -> Tensor:
    """``torch.nn.functional.conv2d``, as one matrix product where the maps are many and small.

    >>> x, weight = torch.randn(500, 2, 5, 5), torch.randn(4, 2, 3, 3)
    >>> bool(torch.allclose(conv2d(x, weight), F.conv2d(x, weight), atol=1e-5))
    True
    """
    return _many_maps(F.conv2d, x, weight, bias, options, named)


def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **named: Any) -> Tensor:
    """``torch.nn.functional.conv_transpose2d``, likewise.

    >>> x, weight = torch.randn(500, 2, 3, 3), torch.randn(2, 4, 3, 3)
    >>> bool(torch.allclose(conv_transpose2d(x, weight), F.conv_transpose2d(x, weight), atol=1e-5))
    True
    """
    return _many_maps(F.conv_transpose2d, x, weight, bias, options, named)


def _many_maps(
    convolution: Convolution,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: tuple[Any, ...],
    named: dict[str, Any],
) -> Tensor:
    rows = math.prod(x.shape[1:])
    if x.device.type == "cpu" and x.dim() == 4 and len(x) >= 4 * rows:
        maps = torch.eye(rows, dtype=x.dtype).reshape(rows, *x.shape[1:])
        matrix = convolution(maps, weight, None, *options, **named)
        own = x.shape[2] * x.shape[3] * weight.numel()
        if convolution is F.conv2d:
            own = matrix.shape[2] * matrix.shape[3] * weight.numel()
        if x.shape[1] * rows * math.prod(matrix.shape[1:]) <= LARGEST_WASTE * own:
            y = (x.reshape(len(x), rows) @ matrix.reshape(rows, -1)).reshape(len(x), *matrix.shape[1:])
            return y if bias is None else y + bias[:, None, None]
    return convolution(x, weight, bias, *options, **named)

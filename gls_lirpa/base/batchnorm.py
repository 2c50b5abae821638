"""BatchNorm with given statistics: the one formula."""

from __future__ import annotations

import torch
from torch import Tensor


def batchnorm_map(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(scale, shift) per channel such that BatchNorm is scale · x + shift.

    >>> one = torch.ones(1)
    >>> [float(part) for part in batchnorm_map(one, 4 * one, 3 * one, None, 0.0)]
    [1.5, -1.5]
    """
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = weight * scale
    shift = -mean * scale
    return scale, shift if bias is None else bias + shift


def normalised(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """BatchNorm of ``x`` (batch, channels, …), differentiable in the statistics too, which torch's own is not."""
    shape = (1, -1) + (1,) * (x.dim() - 2)
    scale, shift = batchnorm_map(mean, var, weight, bias, eps)
    return x * scale.view(shape) + shift.view(shape)

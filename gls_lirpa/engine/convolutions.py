"""Convolutions of very many small maps, where bounds on convolutional networks spend most of their time.

CROWN in patches mode sends one small map per neuron and sample through a transposed convolution, HBox
one map per input pixel and sample through a convolution. With few channels the processor's routines,
above all the backward ones, are many times slower than a product with the layer written as a matrix. An
attack spends most of its time in one of them: the gradient of the first convolution in the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Convolution = Callable[..., Tensor]

LARGEST_WASTE = 64.0
"""Channels × (multiplications of the product / those of the convolution) up to which the product was faster."""

FEW_CHANNELS = 2
"""Input channels up to which the gradient in the input is faster by ``fold`` than by the processor's routine."""


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


class InputGradients(TorchFunctionMode):
    """Inside it convolutions of images carry gradients to their input alone, found faster on a CPU.

    For code that differentiates in the input: weights get no gradient through such a convolution.

    >>> x, weight = torch.randn(2, 1, 6, 6, requires_grad=True), torch.randn(4, 1, 3, 3)
    >>> (usual,) = torch.autograd.grad(F.conv2d(x, weight, stride=2).sum(), x)
    >>> with InputGradients():
    ...     (ours,) = torch.autograd.grad(F.conv2d(x, weight, stride=2).sum(), x)
    >>> bool(torch.allclose(ours, usual, atol=1e-5))
    True
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d:
            return _image_conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _image_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    few = input.device.type == "cpu" and groups == 1 and input.dim() == 4 and weight.shape[1] <= FEW_CHANNELS
    if not few or isinstance(padding, str) or not input.requires_grad:
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    fixed = None if bias is None else bias.detach()
    y: Tensor = _FoldedGradient.apply(input, weight.detach(), fixed, stride, padding, dilation)  # type: ignore[no-untyped-call]
    return y


class _FoldedGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.size = x.shape[2:]
        ctx.options = {"stride": stride, "padding": padding, "dilation": dilation}
        return torch.conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, None, None, None, None, None]:
        (outer,) = outputs
        (weight,) = ctx.saved_tensors
        patches = weight.flatten(1).t() @ outer.flatten(2)
        return F.fold(patches, ctx.size, weight.shape[2:], **ctx.options), None, None, None, None, None

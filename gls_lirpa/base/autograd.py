"""A scalar whose gradient is already known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        (outer,) = outputs
        return (None, None, *(None if g is None else outer * g for g in ctx.gradients))


def scalar_with_gradient(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """``value`` as a function of ``inputs`` with the given gradient.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> (3 * scalar_with_gradient(torch.tensor(5.0), [w], [torch.tensor([0.5, -1.0])])).backward()
    >>> w.grad.tolist()
    [1.5, -3.0]
    """
    result: Tensor = _KnownGradient.apply(value, list(gradients), *inputs)  # type: ignore[no-untyped-call]
    return result

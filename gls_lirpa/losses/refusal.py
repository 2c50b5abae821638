"""A loss over bounds that have no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gls_lirpa.errors import ConfigError

if TYPE_CHECKING:
    from gls_lirpa.losses.terms import LossInput


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, message: str, *weights: Tensor) -> Tensor:
        ctx.message = message
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        raise ConfigError(ctx.message)


def with_gradient_or_refusal(batch: LossInput, value: Tensor) -> Tensor:
    """``value`` itself, or, over a relaxation without gradient, the same number whose ``backward()``
    says so.

    Otherwise a mix of such a bound with a differentiable part (an attack, the natural loss, L1)
    would silently train the other part alone.
    """
    weights = [p for p in batch.engine.model.parameters() if p.requires_grad]
    if batch.relaxation.differentiable or not weights or not torch.is_grad_enabled():
        return value
    message = (
        f"relaxation {batch.relaxation.name!r} has no gradient in the weights, which backpropagation needs: "
        "use PGPE, or a differentiable relaxation such as crown"
    )
    result: Tensor = _Refusal.apply(value, message, *weights)  # type: ignore[no-untyped-call]
    return result

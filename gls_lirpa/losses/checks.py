"""What the losses have in common when something cannot be used: options out of range, no gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gls_lirpa.errors import ConfigError

if TYPE_CHECKING:
    from gls_lirpa.losses.terms import LossInput


def number(name: str, value: float, *, least: float = 0.0, most: float = math.inf) -> float:
    """``value``, if it is a finite number in [least, most].

    >>> number("lam", 0.4, most=1.0)
    0.4
    """
    if not (math.isfinite(value) and least <= value <= most):
        upper = "" if math.isinf(most) else f" and <= {most:g}"
        raise ConfigError(f"expected {name} >= {least:g}{upper}, got {value}")
    return float(value)


def whole(name: str, value: float, *, least: int = 0, most: float = math.inf) -> int:
    """``value`` as an integer, if it is one in [least, most]; configuration files may write 8.0.

    >>> whole("steps", 8.0, least=1)
    8
    """
    if not float(value).is_integer():
        raise ConfigError(f"expected a whole number for {name}, got {value}")
    return int(number(name, value, least=least, most=most))


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

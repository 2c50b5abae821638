"""Gradients that TAPS defines: of a point found by an attack in its box's faces, and of a product of two losses.

**Connector.** z in [l, u] is found by an attack, so its dependence on l and u is defined, per coordinate with width
w = u − l and the threshold c ∈ (0, 1] of the rectified linear rule:

    ∂z/∂l = max(0, 1 − (z − l)/(c·w)),    ∂z/∂u = max(0, 1 − (u − z)/(c·w)).

c = 1 differentiates z = (1 − t)·l + t·u at fixed t, c → 0 links only points on the faces. The method uses c = 0.5.
Where w = 0 the three coincide and l and u get one half each.

**Product.** With the scale s and a = s/(1 + s), ∇(L_T · L_I) := 2a · L_I ∇L_T + 2(1 − a) · L_T ∇L_I. s = 1 is the
product rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Box


class _Connector(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, points: Tensor, lower: Tensor, upper: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(points, lower, upper)
        ctx.threshold = threshold
        return points.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[None, Tensor, Tensor, None]:
        (outer,) = outputs
        points, lower, upper = ctx.saved_tensors
        width = upper - lower
        flat = width <= 0
        reach = ctx.threshold * torch.where(flat, torch.ones_like(width), width)
        to_lower = torch.where(flat, 0.5, torch.relu(1 - (points - lower) / reach))
        to_upper = torch.where(flat, 0.5, torch.relu(1 - (upper - points) / reach))
        return None, outer * to_lower, outer * to_upper, None


def connect(points: Tensor, box: Box, *, threshold: float = 0.5) -> Tensor:
    """``points`` of a box as a function of its faces, with the connector's gradient.

    >>> lower, upper = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> connect(torch.tensor([0.25]), Box(lower, upper)).backward()
    >>> lower.grad.item(), upper.grad.item()
    (0.5, 0.0)
    """
    result: Tensor = _Connector.apply(points, box.lower, box.upper, threshold)  # type: ignore[no-untyped-call]
    return result


def product(first: Tensor, second: Tensor, *, scale: float) -> Tensor:
    """first · second, the gradient through ``first`` times 2a, through ``second`` times 2(1 − a).

    >>> a, b = torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    >>> value = product(a, b, scale=4.0)
    >>> value.backward()
    >>> value.item(), round(a.grad.item(), 4), round(b.grad.item(), 4)
    (15.0, 8.0, 1.2)
    """
    share = scale / (1.0 + scale)
    return _scaled(first, 2.0 * share) * _scaled(second, 2.0 * (1.0 - share))


def _scaled(value: Tensor, factor: float) -> Tensor:
    """The same value with ``factor`` times its gradient."""
    return value.detach() + factor * (value - value.detach())

"""Linear bounds of ReLUs, and what they do to rows, with gradients of their own.

Over l ≤ z ≤ u with l < 0 < u: α z ≤ ReLU(z) ≤ d z − d l with d = u / (u − l) and any α in [0, 1]. CROWN takes α = 1
where d > 1/2 and 0 elsewhere. A stable ReLU has α = d = 0 or 1. A lower bound of a row takes the lower line where its
coefficient is positive and the upper one where it is negative: A ReLU(z) ≥ (A α + min(A, 0) (d − α)) z − min(A, 0) d l.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Slopes = tuple[Tensor, Tensor, Tensor]
"""Lower slopes α, the upper ones' excess d − α, and the upper lines' offsets −d l; each of the neurons' shape."""


def crown_slopes(lower: Tensor, upper: Tensor) -> Slopes:
    """CROWN's slopes; their derivatives in stable neurons' bounds are exactly 0.

    >>> [s.tolist() for s in crown_slopes(torch.tensor([-1.0, 1.0]), torch.tensor([3.0, 2.0]))]
    [[1.0, 1.0], [-0.25, 0.0], [0.75, -0.0]]
    """
    alpha, excess, offset = _Slopes.apply(lower, upper)  # type: ignore[no-untyped-call]
    return alpha, excess, offset


class _Slopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor, upper: Tensor) -> Slopes:
        low, high = lower.clamp(max=0), upper.clamp(min=0)
        width = (high - low).clamp_(min=torch.finfo(low.dtype).tiny)
        upper_slope = high / width
        alpha = (upper_slope > 0.5).to(low.dtype)
        # NaN stays: a comparison with it would choose a slope. So does a width that is not finite.
        alpha = alpha + (upper_slope - upper_slope) + (width - width)
        ctx.save_for_backward(upper_slope, width, (low < 0) & (high > 0))
        ctx.mark_non_differentiable(alpha)
        return alpha, upper_slope - alpha, low.neg_().mul_(upper_slope)

    @staticmethod
    def backward(ctx: Any, _: Tensor, excess: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        # dd/du = (1−d)/(u−l), dd/dl = d/(u−l), d(−dl)/du = (1−d)², d(−dl)/dl = −d²
        slope, width, unstable = ctx.saved_tensors
        excess, rest = excess / width, 1 - slope
        lower = (excess - offset * slope).mul_(slope).masked_fill_(~unstable, 0)
        upper = (excess + offset * rest).mul_(rest).masked_fill_(~unstable, 0)
        return lower, upper


SPARSE_SHARE = 0.15
"""Share of unstable neurons up to which they are corrected one by one behind the product with the lower slopes."""


def is_sparse(slopes: Slopes) -> bool:
    """Whether few enough of some neurons are unstable. A stable one's upper line has no offset."""
    return int(slopes[2].count_nonzero()) <= SPARSE_SHARE * slopes[2].numel()


def relaxed(values: Tensor, slopes: Slopes, unstable: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Coefficients of a ReLU's output as those of its input, and the constant that is added to each row.

    ``values`` (groups or 1, rows, neurons); slopes (groups or 1, 1, neurons), the first two also
    (groups, rows, neurons).
    ``unstable``: groups and neurons of all unstable ones, where they are known to be few.
    """
    found: tuple[Tensor, Tensor] = (
        _Relaxed.apply(values, *slopes)  # type: ignore[no-untyped-call]
        if unstable is None
        else _SparselyRelaxed.apply(values, *slopes, *unstable)  # type: ignore[no-untyped-call]
    )
    return found


def _sum_to(value: Tensor, like: Tensor) -> Tensor:
    return value.sum_to_size(like.shape) if value.shape != like.shape else value


def _dots(values: Tensor, other: Tensor) -> Tensor:
    """Σ values · other over the last axis; ``other`` is the same for the rows of a group, and either may be the same
    for all groups."""
    if len(other) == len(values):
        return torch.bmm(values, other.transpose(1, 2)).squeeze(2)
    return other.squeeze(1) @ values[0].t() if len(values) == 1 else values @ other[0, 0]


class _Relaxed(torch.autograd.Function):
    """A α − max(−A, 0) (d − α), and −max(−A, 0) · (−d l)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, alpha: Tensor, excess: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        minus = values.neg().clamp_(min=0)
        new = torch.mul(values, alpha).addcmul_(minus, excess, value=-1)
        ctx.save_for_backward(values, alpha, excess, offset, minus)
        return new, _dots(minus, offset).neg_()

    @staticmethod
    def backward(ctx: Any, new: Tensor, constant: Tensor) -> tuple[Tensor | None, ...]:
        values, alpha, excess, offset, minus = ctx.saved_tensors
        down = constant.unsqueeze(-1)
        found: list[Tensor | None] = [None] * 4
        if ctx.needs_input_grad[0]:
            below = _sum_to(torch.mul(new, excess).addcmul_(down, offset), values)
            # Vectorised, where a masked assignment is not: below where min(A, 0) < 0, else 0.
            below = torch.ops.aten.threshold_backward(below, minus, 0)
            common = len(values) < len(new)
            found[0] = below.add_(_sum_to(new * alpha, values)) if common else below.addcmul_(new, alpha)
        if ctx.needs_input_grad[1]:
            found[1] = _sum_to(new * values, alpha)
        if ctx.needs_input_grad[2]:
            found[2] = _sum_to(new * minus, excess).neg_()
        if ctx.needs_input_grad[3]:
            common = len(minus) < len(down)
            product = down.transpose(1, 2) @ minus if common else torch.bmm(down.transpose(1, 2), minus)
            found[3] = _sum_to(product, offset).neg_()
        return tuple(found)


class _SparselyRelaxed(torch.autograd.Function):
    """The same where nearly all neurons are stable: d − α and d l are 0 but for those given by group and neuron."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, alpha: Tensor, excess: Tensor, offset: Tensor, group: Tensor, neuron: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, rows, neurons = values.shape
        every = torch.arange(rows, device=values.device) * neurons
        index = (group * (rows * neurons) + neuron).unsqueeze(1) + every
        new = torch.mul(values, alpha)
        minus = values.view(-1)[index].neg_().clamp_(min=0)
        slope, shift = excess[group, 0, neuron].unsqueeze(1), offset[group, 0, neuron].unsqueeze(1)
        new.view(-1).index_add_(0, index.flatten(), (minus * slope).flatten(), alpha=-1)
        constant = values.new_zeros(values.shape[:2]).index_add_(0, group, minus * shift, alpha=-1)
        ctx.save_for_backward(alpha, minus, slope, shift, group, neuron, index)
        return new, constant

    @staticmethod
    def backward(ctx: Any, new: Tensor, constant: Tensor) -> tuple[Tensor | None, ...]:
        alpha, minus, slope, shift, group, neuron, index = ctx.saved_tensors
        at, down = new.reshape(-1)[index], constant[group]
        found: list[Tensor | None] = [None] * 6
        if ctx.needs_input_grad[0]:
            values = torch.mul(new, alpha)
            below = torch.ops.aten.threshold_backward(at * slope + down * shift, minus, 0)
            found[0] = values.view_as(new)
            values.view(-1).index_add_(0, index.flatten(), below.flatten())
        where = (group, torch.zeros_like(group), neuron)
        if ctx.needs_input_grad[2]:
            found[2] = torch.zeros_like(alpha).index_put_(where, (at * minus).sum(1).neg_())
        if ctx.needs_input_grad[3]:
            found[3] = torch.zeros_like(alpha).index_put_(where, (down * minus).sum(1).neg_())
        return tuple(found)


def concretized(values: Tensor, center: Tensor, radius: Tensor) -> Tensor:
    """min A x over |x − center| ≤ radius: A · center − |A| · radius, by rows."""
    found: Tensor = _Concretized.apply(values, center, radius)  # type: ignore[no-untyped-call]
    return found


class _Concretized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, center: Tensor, radius: Tensor) -> Tensor:
        ctx.save_for_backward(values, center, radius)
        return _dots(values, center).sub_(_dots(values.abs(), radius))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, center, radius = ctx.saved_tensors
        gradient = gradient.unsqueeze(-1)
        found: list[Tensor | None] = [None] * 3
        if ctx.needs_input_grad[0]:
            found[0] = _sum_to(torch.addcmul(center, torch.sign(values), radius, value=-1).mul_(gradient), values)
        if ctx.needs_input_grad[1]:
            found[1] = _sum_to(gradient * values, center)
        if ctx.needs_input_grad[2]:
            found[2] = _sum_to(gradient * values.abs(), radius).neg_()
        return tuple(found)

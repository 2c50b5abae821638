"""Adam's direction, for the bounds that are maximised without a graph."""

from __future__ import annotations

from torch import Tensor

_MOMENTS = (0.9, 0.999)


def adam(gradient: Tensor, first: Tensor, second: Tensor, step: int) -> Tensor:
    """Adam's direction at ``step`` (from 0); the moments are updated in place.

    >>> import torch
    >>> adam(torch.tensor([4.0, -0.5]), torch.zeros(2), torch.zeros(2), 0).round().tolist()
    [1.0, -1.0]
    """
    first.mul_(_MOMENTS[0]).add_(gradient, alpha=1 - _MOMENTS[0])
    second.mul_(_MOMENTS[1]).addcmul_(gradient, gradient, value=1 - _MOMENTS[1])
    mean = first / (1 - _MOMENTS[0] ** (step + 1))
    scale = (second / (1 - _MOMENTS[1] ** (step + 1))).sqrt_()
    return mean / (scale + 1e-8)

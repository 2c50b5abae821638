"""Adam's direction, for the bounds that are maximised without a graph."""

from __future__ import annotations

from torch import Tensor

_MOMENTUM = 0.9


def adam(
    gradient: Tensor, first: Tensor, second: Tensor, step: int, *, memory: float = 0.999, floor: float = 1e-8
) -> Tensor:
    """Adam's direction at ``step`` (from 0); the moments are updated in place, the second with this ``memory``.

    Gradients below ``floor`` move little.

    >>> import torch
    >>> adam(torch.tensor([4.0, -0.5]), torch.zeros(2), torch.zeros(2), 0).round().tolist()
    [1.0, -1.0]
    """
    first.mul_(_MOMENTUM).add_(gradient, alpha=1 - _MOMENTUM)
    second.mul_(memory).addcmul_(gradient, gradient, value=1 - memory)
    mean = first / (1 - _MOMENTUM ** (step + 1))
    scale = (second / (1 - memory ** (step + 1))).sqrt_()
    return mean / (scale + floor)

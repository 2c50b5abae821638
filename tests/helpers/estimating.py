"""Losses with known smoothed gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Point(nn.Module):
    """A vector of parameters to put a loss on."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=torch.float64))


def cubic(point: Point) -> Callable[[], Tensor]:
    return lambda: point.w.pow(3).sum()


def network() -> tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(7, 5), torch.randint(0, 3, (7,))
    return net, lambda x, y: nn.functional.cross_entropy(net(x), y), x, y


def gradient(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

"""A property as part of the network, so that every stage of the cascade can decide it.

The unsafe outputs are a union of polyhedra, OR_k AND_i (a_ki · y ≤ b_ki). With g_ki = a_ki · y − b_ki no
output is unsafe iff m_k = max_i g_ki > 0 for every k. Behind the network follow the g_ki as a linear layer,
their maxima as a tree of ReLUs and the outputs [0, −m_1, …, −m_K]: class 0 wins iff the output is safe.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box
from gls_lirpa.exchange.cases import Array, Case, Conjunction
from gls_lirpa.exchange.layers import concatenated


class Maxima(nn.Module):
    """One level of a tree of maxima: max(a, b) = b + relu(a − b) for some pairs, the rest as it is.

    ``groups`` holds the widths of consecutive parts of the input; each comes out half as wide.

    >>> Maxima([3, 1])(torch.tensor([[5.0, 1.0, 2.0, 7.0]])).tolist()
    [[5.0, 2.0, 7.0]]
    """

    def __init__(self, groups: Sequence[int]) -> None:
        super().__init__()
        kept: list[int] = []
        rivals: list[int | None] = []
        start = 0
        for width in groups:
            kept += range(start + 1, start + width, 2)
            rivals += range(start, start + width - 1, 2)
            if width % 2:
                kept.append(start + width - 1)
                rivals.append(None)
            start += width
        self.keep = nn.Linear(start, len(kept), bias=False)
        self.difference = nn.Linear(start, len(kept), bias=False)
        self.relu = nn.ReLU()
        with torch.no_grad():
            for weight in (self.keep.weight, self.difference.weight):
                weight.zero_()
            for i, (keep, rival) in enumerate(zip(kept, rivals, strict=True)):
                self.keep.weight[i, keep] = 1.0
                if rival is not None:
                    self.difference.weight[i, rival] = 1.0
                    self.difference.weight[i, keep] = -1.0

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.keep(x)
        larger: Tensor = self.relu(self.difference(x))
        return kept + larger


def property_network(
    network: nn.Module, unsafe: Sequence[Conjunction], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """``network`` with outputs [0, −m_1, …, −m_K]; it shares the layers of ``network``.

    Bounds that ``dtype`` cannot hold are rounded so that more outputs are unsafe, never fewer.

    >>> unsafe = [Conjunction(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0.5, 0.25]))]
    >>> property_network(nn.Identity(), unsafe)(torch.tensor([[1.0, 0.0]])).tolist()
    [[0.0, -0.5]]
    """
    rows = np.concatenate([conjunction.rows for conjunction in unsafe])
    bounds = np.concatenate([conjunction.bounds for conjunction in unsafe])
    widths = [len(conjunction.bounds) for conjunction in unsafe]
    layers: list[nn.Module] = []
    if max(widths) > 1:
        layers.append(_linear(rows, -bounds, dtype, up=False))
        while max(widths) > 1:
            layers.append(Maxima(widths))
            widths = [(width + 1) // 2 for width in widths]
        rows, bounds = np.eye(len(widths)), np.zeros(len(widths))
    zero = np.zeros((1, rows.shape[1]))
    layers.append(_linear(np.concatenate([zero, -rows]), np.concatenate([[0.0], bounds]), dtype, up=True))
    return concatenated(network, *(layer.to(dtype).requires_grad_(False) for layer in layers)).eval()


def _linear(weight: Array, bias: Array, dtype: torch.dtype, *, up: bool) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], len(weight), dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        layer.bias.copy_(_rounded(bias, dtype, up=up))
    return layer


def _rounded(values: Array, dtype: torch.dtype, *, up: bool) -> Tensor:
    """The nearest numbers of ``dtype`` that are not below (``up``) or not above ``values``."""
    exact = torch.from_numpy(values)
    near = exact.to(dtype)
    wrong = near.double() < exact if up else near.double() > exact
    return torch.where(wrong, torch.nextafter(near, torch.full_like(near, torch.inf if up else -torch.inf)), near)


def enclosing_box(cases: Sequence[Case], in_shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Box:
    """The boxes of some cases, rounded outward to ``dtype``.

    >>> case = Case(np.array([0.1]), np.array([0.1]), ())
    >>> box = enclosing_box([case], (1,))
    >>> box.lower.item() <= 0.1 <= box.upper.item(), box.lower.item() == box.upper.item()
    (True, False)
    """
    shape = (len(cases), *in_shape)
    lower = _rounded(np.stack([case.lower for case in cases]), dtype, up=False)
    upper = _rounded(np.stack([case.upper for case in cases]), dtype, up=True)
    return Box(lower.reshape(shape), upper.reshape(shape))

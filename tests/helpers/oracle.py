"""The exact minimum of linear functions of a ReLU network over a box, by trying every pattern of its ReLUs.

It shares nothing with the library: each linear piece is read off the plain torch module.
"""

from __future__ import annotations

import copy
import itertools

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, margin_spec


class _Fixed(nn.Module):
    """A ReLU with given signs; remembers what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.pattern = torch.zeros(0)
        self.seen = torch.zeros(0)

    def forward(self, z: Tensor) -> Tensor:
        self.seen = z.flatten(1)
        return z * self.pattern.reshape(1, *z.shape[1:])


def exact_margins(model: nn.Module, box: Box, label: Tensor) -> np.ndarray:
    """The exact minimum of every margin f_y − f_j over the box of one sample."""
    return exact_minima(model, box, margin_spec(label, int(model(box.lower).shape[1]))[0])


def exact_minima(model: nn.Module, box: Box, spec: Tensor) -> np.ndarray:
    """The exact minimum of every row of ``spec`` · f over the box of one sample: an LP per ReLU pattern."""
    exact = copy.deepcopy(model).double()
    relus = []
    for parent in list(exact.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU):
                fixed = _Fixed()
                setattr(parent, name, fixed)
                relus.append(fixed)
    sizes = _relu_sizes(model, box.lower)
    shape = box.lower.shape[1:]
    inputs = box.lower[0].numel()
    probes = torch.cat([torch.zeros(1, inputs), torch.eye(inputs)]).double().reshape(-1, *shape)
    limits = list(zip(box.lower.flatten().tolist(), box.upper.flatten().tolist(), strict=True))
    best = np.full(len(spec), np.inf)
    for bits in itertools.product((0.0, 1.0), repeat=sum(sizes)):
        for fixed, pattern in zip(relus, torch.tensor(bits).double().split(sizes), strict=True):
            fixed.pattern = pattern
        values = (exact(probes) @ spec.double().t()).detach().numpy()
        z = torch.cat([fixed.seen for fixed in relus], 1).detach().numpy()
        sign = 1.0 - 2.0 * np.array(bits)  # z ≥ 0 is −z ≤ 0
        slopes, offsets = (z[1:] - z[0]).T * sign[:, None], -z[0] * sign
        for row in range(values.shape[1]):
            answer = linprog(values[1:, row] - values[0, row], A_ub=slopes, b_ub=offsets, bounds=limits)
            if answer.status == 2:
                break  # the pattern does not occur
            best[row] = min(best[row], answer.fun + values[0, row])
    return best


def _relu_sizes(model: nn.Module, x: Tensor) -> list[int]:
    sizes: list[int] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: sizes.append(out[0].numel()))
        for module in model.modules()
        if isinstance(module, nn.ReLU)
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return sizes

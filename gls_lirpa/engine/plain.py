"""auto_LiRPA as its examples use it: the reference that speed is measured against."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.engine.compat import load_lirpa

METHODS = {"ibp": "IBP", "crown-ibp": "CROWN-IBP", "crown": "CROWN"}
"""Relaxations that auto_LiRPA has, by its own names; HBox is ours."""


def plain_loss(model: nn.Module, relaxation: str, x: Tensor, y: Tensor, *, eps: float, classes: int) -> Tensor:
    """The robust loss straight from auto_LiRPA with its default options, on a module made for this call.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> bool(plain_loss(model, "ibp", torch.rand(2, 1, 2, 2), torch.tensor([0, 1]), eps=0.1, classes=3) > 0)
    True
    """
    lirpa = load_lirpa()
    bounded = lirpa.bounded_module(model, x[:1])
    bounded.train()
    ball = lirpa.perturbation(norm=math.inf, x_L=(x - eps).clamp(0, 1), x_U=(x + eps).clamp(0, 1))
    spec = torch.eye(classes)[y][:, None] - torch.eye(classes)
    inputs = (lirpa.bounded_tensor(x, ball),)
    lower = bounded.compute_bounds(x=inputs, C=spec, method=METHODS[relaxation], bound_upper=False)[0]
    return F.cross_entropy(-lower, y)


@contextmanager
def torch_convolutions() -> Iterator[None]:
    """auto_LiRPA with torch's own convolutions instead of ours, as it is shipped."""
    load_lirpa()
    operators = importlib.import_module("auto_LiRPA.operators.convolution").__dict__
    ours, operators["F"] = operators["F"], F
    try:
        yield
    finally:
        operators["F"] = ours

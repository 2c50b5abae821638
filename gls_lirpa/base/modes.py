"""A network's flags as they were: train or eval, and which weights want gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, train/eval flags and ``requires_grad`` are as before afterwards.

    >>> layer = nn.Linear(1, 1)
    >>> with preserved(layer):
    ...     _ = layer.eval().requires_grad_(False)
    >>> layer.training, layer.weight.requires_grad
    (True, True)
    """
    training = {module: module.training for module in model.modules()}
    grads = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag
        for parameter, flag in grads.items():
            parameter.requires_grad = flag


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The network in eval mode inside, its flags as before afterwards."""
    with preserved(model):
        model.eval()
        yield

"""BatchNorm as the bounds need it: batch statistics captured once, then applied as constants.

In train mode a BatchNorm layer normalises by statistics of the clean batch. Bounds, chunks of the
batch and adversarial points must all see the *same* affine map, so the statistics are captured in
one forward pass over the whole clean batch and handed on explicitly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gls_lirpa.base.batchnorm import normalised
from gls_lirpa.base.modes import evaluating
from gls_lirpa.errors import UnsupportedLayerError

Statistics = dict[str, tuple[Tensor, Tensor]]
"""Mean and biased variance by the layer's name in the model."""


def batchnorms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of ``model`` by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def in_train_mode(model: nn.Module) -> bool:
    """Whether some BatchNorm layer of ``model`` would use batch statistics now."""
    return any(layer.training for layer in batchnorms(model).values())


@contextlib.contextmanager
def captured_statistics(model: nn.Module) -> Iterator[Statistics]:
    """Record the batch statistics that train-mode layers use in the forward pass meanwhile.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> with captured_statistics(model) as statistics:
    ...     _ = model(torch.randn(5, 2))
    >>> [tuple(mean.shape) for mean, var in statistics.values()]
    [(3,)]
    """
    statistics: Statistics = {}

    def recorder(name: str) -> Any:
        def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            dims = [0, *range(2, x.dim())]
            if name in statistics:
                raise UnsupportedLayerError(
                    f"layer {name!r} ({type(layer).__name__}) runs twice in one forward pass: "
                    "in train mode its bounds would need two sets of statistics"
                )
            statistics[name] = (x.mean(dims), x.var(dims, unbiased=False))

        return record

    layers = {name: layer for name, layer in batchnorms(model).items() if layer.training}
    handles = [layer.register_forward_pre_hook(recorder(name)) for name, layer in layers.items()]
    try:
        yield statistics
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def unmoved_statistics(model: nn.Module) -> Iterator[None]:
    """Meanwhile train-mode layers use batch statistics but leave the running ones alone."""
    layers = [layer for layer in batchnorms(model).values() if layer.training and layer.track_running_stats]
    try:
        for layer in layers:
            layer.track_running_stats = False
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


@contextlib.contextmanager
def applied_statistics(model: nn.Module, statistics: Statistics) -> Iterator[None]:
    """Meanwhile the named layers normalise by ``statistics``, differentiably and without
    moving their running statistics."""

    def normaliser(mean: Tensor, var: Tensor) -> Any:
        def normalise(layer: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return normalised(inputs[0], mean, var, layer.weight, layer.bias, layer.eps)

        return normalise

    layers = batchnorms(model)
    with contextlib.ExitStack() as stack:
        for name, (mean, var) in statistics.items():
            stack.enter_context(evaluating(layers[name]))
            stack.callback(layers[name].register_forward_hook(normaliser(mean, var)).remove)
        yield

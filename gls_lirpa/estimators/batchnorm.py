"""BatchNorm under perturbed weights: who has it, and population statistics for the mean network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gls_lirpa.base.modes import evaluating
from gls_lirpa.errors import DataError


def uses_batch_statistics(modules: Iterable[nn.Module]) -> bool:
    """Whether some BatchNorm layer normalises by the batch it sees (auto_LiRPA's own layers included).

    >>> uses_batch_statistics([nn.BatchNorm1d(3)]), uses_batch_statistics([nn.BatchNorm1d(3).eval()])
    (True, False)
    """
    return any(_by_batch(layer) for root in modules for layer in root.modules())


def _by_batch(layer: nn.Module) -> bool:
    if isinstance(layer, _BatchNorm):
        return layer.training or layer.running_mean is None
    return "BatchNorm" in type(layer).__name__ and layer.training


class _Pooled:
    """Mean and variance per channel of all rows seen, merged batch by batch in double precision."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self.squares = torch.zeros(())

    def add(self, x: Tensor) -> None:
        rows = x.detach().double().transpose(0, 1).flatten(1)
        count, mean = rows.shape[1], rows.mean(1)
        squares = (rows - mean[:, None]).square().sum(1)
        if self.count == 0:
            self.count, self.mean, self.squares = count, mean, squares
            return
        # Σ(x−m)² of a union = the parts' sums + δ²·n₁n₂/(n₁+n₂), δ the difference of their means.
        total = self.count + count
        delta = mean - self.mean
        self.squares = self.squares + squares + delta.square() * (self.count * count / total)
        self.mean = self.mean + delta * (count / total)
        self.count = total


def reset_batchnorm(model: nn.Module, loader: Iterable[Any]) -> None:
    """Set running statistics to those of the whole loader under the current weights.

    One pass: every BatchNorm layer normalises each batch by that batch, as in training, and its inputs'
    pooled mean and (unbiased) variance over all batches become its statistics. Other layers are in eval
    mode meanwhile (no dropout). A loader yields inputs, or tuples that begin with them.

    A ``BoundedModule`` has statistics of its own; hand them over with
    ``bounded.load_state_dict(model.state_dict())``.

    >>> layer = nn.BatchNorm1d(1)
    >>> reset_batchnorm(layer, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
    >>> layer.running_mean, layer.running_var
    (tensor([3.]), tensor([6.6667]))
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not layers:
        return
    saved = [(b, b.clone()) for layer in layers for b in layer.buffers(recurse=False)]
    pooled = {layer: _Pooled() for layer in layers}
    hooks = [layer.register_forward_pre_hook(_collect(pooled[layer])) for layer in layers]
    batches = 0
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    try:
        with torch.no_grad(), evaluating(model):
            for layer in layers:
                layer.train()
            for batch in loader:
                x = batch[0] if isinstance(batch, (tuple, list)) else batch
                model(x.to(device))
                batches += 1
        if batches == 0:
            raise DataError("the loader is empty: BatchNorm statistics need at least one batch")
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, value in saved:
            buffer.data.copy_(value)
    for layer, statistics in pooled.items():
        _set(layer, statistics, batches)


def _collect(pooled: _Pooled) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        del module
        pooled.add(inputs[0])

    return hook


def _set(layer: _BatchNorm, pooled: _Pooled, batches: int) -> None:
    if pooled.count == 0:  # a layer that the forward pass does not visit keeps what it had
        return
    if layer.running_mean is not None and layer.running_var is not None:
        layer.running_mean.data.copy_(pooled.mean)
        layer.running_var.data.copy_(pooled.squares / max(pooled.count - 1, 1))
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.data.fill_(batches)

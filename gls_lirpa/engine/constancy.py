"""A network that is another one at its next call has no bounds: it counts its calls, moves a buffer, or draws numbers.

Called twice with one input it must give the same output and leave the same values behind. What it keeps of a call
(features to look at, a weight computed from others) is the same both times; what it counts is not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gls_lirpa.errors import UnsupportedLayerError

_SAME = 1e-4
"""Relative difference of two outputs that the order of sums on a device may explain."""


def check_constancy(model: nn.Module, x: Tensor, output: Tensor) -> None:
    """Raise UnsupportedLayerError if ``model``, which gave ``output`` for ``x`` just now, is changed by another call.

    >>> layer = nn.Linear(2, 2)
    >>> x = torch.rand(1, 2)
    >>> check_constancy(layer, x, layer(x))
    """
    before = _state(model)
    again = model(x)
    after = _state(model)
    changed = [name for name in after if name not in before or not _equal(before[name], after[name])]
    if changed:
        raise UnsupportedLayerError(
            f"the network changes its {changed[0]!r} whenever it is called, so that it means another one the next "
            "time: change that in train mode alone"
        )
    if again.shape != output.shape or not torch.allclose(again, output, rtol=_SAME, atol=_SAME, equal_nan=True):
        raise UnsupportedLayerError(
            "the network gives another output for the same input the next time: "
            "take out what is random or remembers earlier calls"
        )


def _state(model: nn.Module) -> dict[str, object]:
    """The values that a model holds: of weights whether they were written to, of all else what they are."""
    state: dict[str, object] = {}
    for prefix, module in model.named_modules():
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            key = f"{prefix}.{name}".lstrip(".")
            if isinstance(value, nn.Parameter):
                state[key] = value._version
            elif isinstance(value, Tensor):
                state[key] = value.detach().clone()
            elif isinstance(value, (bool, int, float, str)):
                state[key] = value
    return state


def _equal(before: object, after: object) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and torch.allclose(before, after, rtol=0, atol=0, equal_nan=True)
    return type(before) is type(after) and (before == after or before != before)

"""Piecewise linear activations by ReLUs, which every relaxation knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.errors import UnsupportedLayerError

Tracked = Callable[[Any], bool]


def as_leaky_relu(x: Tensor, slope: float) -> Tensor:
    """s·x + (1 − s)·max(x, 0). For 0 ≤ s ≤ 1 both terms grow with x, so intervals stay exact."""
    return torch.relu(x) * (1.0 - slope) + x * slope


def as_clamp(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """max(x, a) = a + max(x − a, 0), then min(·, b) = b − max(b − ·, 0): a chain of monotone steps."""
    if low is not None and high is not None:
        # min(max(x, a), b) = b − max((b − a) − max(x − a, 0), 0), and b for a > b, as torch has it.
        return high - torch.relu((high - low) - torch.relu(x - low))
    if low is not None:
        return torch.relu(x - low) + low
    return x if high is None else high - torch.relu(high - x)


def as_hardsigmoid(x: Tensor) -> Tensor:
    """min(max(x/6 + 1/2, 0), 1)."""
    return as_clamp(x / 6.0 + 0.5, 0.0, 1.0)


def as_abs(x: Tensor) -> Tensor:
    """|x| = 2·max(x, 0) − x."""
    return torch.relu(x) * 2.0 - x


def as_maximum(first: Tensor, second: Tensor) -> Tensor:
    """max(a, b) = b + max(a − b, 0)."""
    return torch.relu(first - second) + second


def as_minimum(first: Tensor, second: Tensor) -> Tensor:
    """min(a, b) = b − max(b − a, 0)."""
    return second - torch.relu(second - first)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _leaky_relu(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    slope = _number(args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01))
    return NotImplemented if slope is None else as_leaky_relu(args[0], slope)


def _hardtanh(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    low = _number(args[1] if len(args) > 1 else kwargs.get("min_val", -1.0))
    high = _number(args[2] if len(args) > 2 else kwargs.get("max_val", 1.0))
    return NotImplemented if low is None or high is None else as_clamp(args[0], low, high)


def _relu6(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    return as_clamp(args[0], 0.0, 6.0)


def _hardsigmoid(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    return as_hardsigmoid(args[0])


def _clamp(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    bound = _CLAMP.bind(*args, **kwargs)
    bound.apply_defaults()
    ends = (bound.arguments["min"], bound.arguments["max"])
    if any(end is not None and _number(end) is None for end in ends) or not tracked(args[0]):
        return NotImplemented
    low, high = (_number(end) for end in ends)
    return as_clamp(args[0], low, high)


def _clamp_min(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    return _clamp(function, (args[0],), {"min": args[1] if len(args) > 1 else kwargs["min"]}, tracked)


def _clamp_max(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    return _clamp(function, (args[0],), {"max": args[1] if len(args) > 1 else kwargs["max"]}, tracked)


def _clamp_signature(input: Any, min: Any = None, max: Any = None) -> None: ...


_CLAMP = inspect.signature(_clamp_signature)


def _abs(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    return as_abs(args[0])


def _maximum(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    pair = _pair_of_one_shape(args, kwargs, tracked)
    return NotImplemented if pair is None else as_maximum(*pair)


def _minimum(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    pair = _pair_of_one_shape(args, kwargs, tracked)
    return NotImplemented if pair is None else as_minimum(*pair)


def _pair_of_one_shape(args: Any, kwargs: dict[str, Any], tracked: Tracked) -> tuple[Tensor, Tensor] | None:
    pair = (*args, *kwargs.values())
    if len(pair) != 2 or not all(tracked(value) for value in pair) or pair[0].shape != pair[1].shape:
        return None
    return pair[0], pair[1]


def _max_pool2d(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    """Bounded as it is, without what auto_LiRPA would lose of it."""
    bound = _MAX_POOL.bind(*args, **kwargs)
    bound.apply_defaults()
    dilation, ceil_mode = bound.arguments["dilation"], bound.arguments["ceil_mode"]
    if dilation not in (1, (1, 1), [1, 1]) or ceil_mode:
        raise UnsupportedLayerError(
            f"max_pool2d with dilation {dilation} and ceil_mode={ceil_mode} cannot be bounded: "
            "use dilation 1 and ceil_mode=False"
        )
    return NotImplemented


def _max_pool_signature(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: Any = False,
    return_indices: Any = False,
) -> None: ...  # fmt: skip


_MAX_POOL = inspect.signature(_max_pool_signature)

PIECEWISE_RULES: dict[Any, Callable[..., Any]] = {
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
    F.leaky_relu: _leaky_relu,
    F.hardtanh: _hardtanh,
    F.relu6: _relu6,
    F.hardsigmoid: _hardsigmoid,
    **{getattr(owner, name): _clamp for name in ("clamp", "clip") for owner in (torch, Tensor)},
    torch.clamp_min: _clamp_min,
    Tensor.clamp_min: _clamp_min,
    torch.clamp_max: _clamp_max,
    Tensor.clamp_max: _clamp_max,
    torch.abs: _abs,
    Tensor.abs: _abs,
    **{getattr(owner, name): _maximum for name in ("max", "maximum") for owner in (torch, Tensor)},
    **{getattr(owner, name): _minimum for name in ("min", "minimum") for owner in (torch, Tensor)},
}

"""Rounding of activations.

A piecewise linear one is computed by the network as it is and bounded as the ReLUs that the engine rewrites it with:
its values and errors come from the one, what a bound adds up and its slack from the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gls_lirpa.certification.magnitudes import Spread, Value, bounded_slack, monotone, relu, settled
from gls_lirpa.engine.rewrite_piecewise import as_abs, as_clamp, as_hardsigmoid, as_leaky_relu, as_maximum, as_minimum

aten = torch.ops.aten

FUNCTION_ROUNDINGS = 8
"""Sigmoid and tanh are assumed to be right within 4 units in the last place, that is 8 roundings."""


def _bounded_as(x: Spread, computed: Value, rewritten: Tensor) -> Spread:
    assert isinstance(rewritten, Spread)
    bound = rewritten.value
    return x.like(replace(computed, magnitude=bound.magnitude, slack=bound.slack))


def _curved(func: Any, x: Spread) -> Spread:
    function = getattr(torch, func.overloadpacket.__name__)
    return x.like(monotone(x.arithmetic, x.value, function, roundings=FUNCTION_ROUNDINGS, range_=1.0))


def _relu(func: Any, x: Spread) -> Spread:
    return x.like(relu(x.arithmetic, x.value))


def _leaky_relu(func: Any, x: Spread, slope: float = 0.01) -> Spread:
    v, steep = x.value, max(1.0, abs(slope))
    ends = [torch.nn.functional.leaky_relu(end, slope) for end in (v.lower, v.upper)]
    # A negative slope has its minimum at 0.
    kink = torch.where((v.lower < 0) & (v.upper > 0), 0.0, ends[0])
    lower, upper = torch.minimum(torch.minimum(*ends), kink), torch.maximum(*ends)
    size = torch.maximum(lower.abs(), upper.abs()) + steep * v.error
    error = steep * v.error + x.arithmetic.gamma(2) * size + x.arithmetic.tiny
    computed = settled(x.arithmetic, replace(v, lower=lower, upper=upper, error=error), 1)
    return _bounded_as(x, computed, as_leaky_relu(x, slope))


def _clamp(func: Any, x: Spread, low: float | None = None, high: float | None = None) -> Spread:
    ends = [float(end) for end in (low, high) if end is not None]
    function = partial(torch.clamp, min=low, max=high)
    # One rounding: that of the two ends to the dtype.
    computed = monotone(x.arithmetic, x.value, function, roundings=1, range_=max(map(abs, ends), default=0.0))
    return _bounded_as(x, computed, as_clamp(x, low, high))


def _hardtanh(func: Any, x: Spread, low: float = -1.0, high: float = 1.0) -> Spread:
    return _clamp(func, x, low, high)


def _hardsigmoid(func: Any, x: Spread) -> Spread:
    """min(max(x + 3, 0), 6) / 6, or min(max(x/6 + 1/2, 0), 1)."""
    first, second = torch.clamp(x + 3.0, 0.0, 6.0) / 6.0, as_hardsigmoid(x)
    assert isinstance(first, Spread) and isinstance(second, Spread)
    computed = replace(first.value, error=torch.maximum(first.value.error, second.value.error))
    return _bounded_as(x, computed, second)


def _abs(func: Any, x: Spread) -> Spread:
    v = x.value
    size = torch.maximum(v.lower.abs(), v.upper.abs())
    lower = torch.maximum(torch.maximum(v.lower, -v.upper), torch.zeros_like(v.lower))
    return _bounded_as(x, replace(v, lower=lower, upper=size), as_abs(x))


def _larger(func: Any, first: Spread, second: Spread) -> Spread:
    return _one_of(first, second, torch.maximum, as_maximum(first, second))


def _smaller(func: Any, first: Spread, second: Spread) -> Spread:
    return _one_of(first, second, torch.minimum, as_minimum(first, second))


def _one_of(first: Spread, second: Spread, choose: Callable[[Tensor, Tensor], Tensor], rewritten: Tensor) -> Spread:
    """Either of two values: errors do not add up."""
    a, b = first.value, second.value
    error = torch.maximum(a.error, b.error)
    computed = Value(choose(a.lower, b.lower), choose(a.upper, b.upper), error, a.magnitude, a.slack)
    return _bounded_as(first, computed, rewritten)


def _max_pool(func: Any, x: Spread, *args: Any) -> tuple[Spread, Tensor]:
    pooled = x.value.each(lambda part: func(part, *args)[0])
    a = x.arithmetic
    magnitude = 2 * pooled.magnitude
    slack = bounded_slack(a, pooled.slack, magnitude)
    found = settled(a, Value(pooled.lower, pooled.upper, pooled.error, magnitude, slack), 1)
    return x.like(found), torch.zeros(found.lower.shape, dtype=torch.int64, device=x.device)


ACTIVATION_RULES: dict[Any, Callable[..., Any]] = {
    aten.relu: _relu,
    aten.leaky_relu: _leaky_relu,
    aten.clamp: _clamp,
    aten.clamp_min: lambda func, x, low: _clamp(func, x, low, None),
    aten.clamp_max: lambda func, x, high: _clamp(func, x, None, high),
    aten.hardtanh: _hardtanh,
    aten.hardsigmoid: _hardsigmoid,
    aten.abs: _abs,
    aten.maximum: _larger,
    aten.minimum: _smaller,
    aten.max_pool2d_with_indices: _max_pool,
    **dict.fromkeys((aten.sigmoid, aten.tanh), _curved),
}
"""By torch operation; those that write into their argument have the same rule."""

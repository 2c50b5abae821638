"""One pass of magnitudes through a network: what rounding can do to its outputs over a box.

The network is run as it is, on a tensor that stands for a box. Of every value z over the box the pass
keeps, in float64,

- ``lower`` ≤ z ≤ ``upper``, in exact arithmetic;
- ``error`` ≥ |ẑ − z|, where ẑ is the value computed in the network's dtype, the products of every sum added in any
  order, with or without fused multiply-add, subnormal numbers kept or flushed to zero;
- ``magnitude`` ≥ |z| and ≥ what a bound by linear relaxations adds up where it computes z;
- ``slack`` ≥ the rounding error of such a bound of z in that dtype.

With unit roundoff u, γₙ = nu / (1 − nu) and a sum z = Σ w a + b of n products (the bias is one more):

    |ẑ − z| ≤ |W| error + γₙ₊₂ (|W| (|a| + error) + |b|) + flushed

A bound pass goes backwards: its row g before the layer becomes fl(gW), off by γₘ |g||W| for m rows, which changes the
value by γₘ |g||W||a|; slopes in [0, 1] leave |g| ≤ |C||W|…|W|, so those errors sum up forwards in the same way, with
γₙ₊ₘ. Intervals and zonotopes round |W|-products forwards and are below that too. A ReLU bounded over [l̂, û] that holds
its input only up to the slack δ of l̂ and û is off by another δ: slack doubles, and so does what lines add up.

Constants, the biases b of a layer and the offsets of its ReLUs' lines, meet the row g in one sum Σ gᵢ bᵢ over all N
values of the layer, off by γ_N Σ |gᵢ| |bᵢ|: what a value adds to it is γ_N |bᵢ| of slack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

UNIT = 2.0**-53
"""Unit roundoff of the pass itself."""


class NoRuleError(Exception):
    """An operation whose rounding is not known."""


@dataclass(frozen=True)
class Arithmetic:
    """A dtype: unit roundoff, smallest normal and largest number. ``extra``: roundings of a bound per layer besides."""

    unit: float
    tiny: float
    largest: float
    extra: int

    @classmethod
    def of(cls, dtype: torch.dtype, *, extra: int) -> Arithmetic:
        info = torch.finfo(dtype)
        return cls(info.eps / 2, info.tiny, info.max, extra)

    def gamma(self, count: int) -> float:
        """γₙ, infinite where the sum is too long to say anything."""
        product = count * self.unit
        return product / (1 - product) * (1 + 4 * UNIT) if product < 0.5 else torch.inf

    def constants(self, size: Tensor) -> Tensor:
        """The slack of constants no larger than ``size`` (batch, …) that a layer's values add to a bound."""
        return self.gamma(size[0].numel() + self.extra) * size


@dataclass(frozen=True)
class Value:
    """What is known of one tensor of the network, see above."""

    lower: Tensor
    upper: Tensor
    error: Tensor
    magnitude: Tensor
    slack: Tensor

    @property
    def computed(self) -> Tensor:
        """≥ |ẑ|."""
        return torch.maximum(self.lower.abs(), self.upper.abs()) + self.error

    def each(self, function: Callable[[Tensor], Tensor]) -> Value:
        return Value(*(function(getattr(self, part.name)) for part in fields(self)))


def exact(constant: Tensor) -> Value:
    """A number that is what it is."""
    constant = constant.double()
    zero = torch.zeros_like(constant)
    return Value(constant, constant, zero, constant.abs(), zero)


def settled(arithmetic: Arithmetic, value: Value, terms: int) -> Value:
    """The result of a rule with the rounding of this pass itself added, and infinite where ẑ may overflow.

    Sums of non-negative numbers are off by at most a factor 1 + γ of float64. ``lower`` and ``upper`` round sums that
    the dtype rounds as well, and by ``error`` or less in units of its own roundoff.
    """
    grow = 1 + 8 * (terms + 8) * UNIT
    error, slack, magnitude = (part * grow for part in (value.error, value.slack, value.magnitude))
    safe = error + slack + magnitude < arithmetic.largest / 4  # false for a NaN
    safe &= (error >= 0) & (slack >= 0) & (magnitude >= 0)
    error, slack = (torch.where(safe, part, torch.inf) for part in (error, slack))
    wide = 4 * (UNIT / arithmetic.unit) * error
    return Value(value.lower - wide, value.upper + wide, error, magnitude, slack)


def affine(
    arithmetic: Arithmetic,
    value: Value,
    apply: Callable[[Tensor, bool], Tensor],
    *,
    terms: int,
    rows: int,
    largest: float = 1.0,
    offset: Tensor | None = None,
) -> Value:
    """A linear map ``apply(x, absolute)`` of sums of ``terms`` products, no weight above ``largest``, plus ``offset``.

    ``rows``: of how many outputs an input is part.
    """
    gamma, backward = arithmetic.gamma(terms + 2), arithmetic.gamma(terms + rows + arithmetic.extra)
    computed, center = value.computed, (value.lower + value.upper) / 2
    radius = (value.upper - value.lower) / 2 + 2 * UNIT * computed
    carried = value.error + gamma * computed
    sums = apply(torch.cat([radius, carried, value.magnitude, value.slack]), True)
    radius, error, magnitude, slack = sums.chunk(4)
    middle = apply(center, False)
    if offset is not None:
        offset = offset.double()
        middle, magnitude = middle + offset, magnitude + offset.abs()
        error = error + gamma * offset.abs()
        slack = slack + arithmetic.constants(offset.abs().expand_as(slack))
    # Flushed: a factor or a product below the smallest normal number counts as zero.
    highest = (value.magnitude + value.slack + computed).flatten(1).amax(1).view(-1, *[1] * (error.dim() - 1))
    flushed = arithmetic.tiny * (terms + rows + 2) * (largest + highest + 4)
    slack = slack + backward * (magnitude + slack) + flushed
    found = Value(middle - radius, middle + radius, error + flushed, magnitude, slack)
    return settled(arithmetic, found, terms)


def scaled(
    arithmetic: Arithmetic, value: Value, factor: Tensor, shift: Tensor, size: Tensor, *, roundings: int
) -> Value:
    """factor · z + shift elementwise, where ``size`` ≥ |factor · s| + |t| for the constants s and t that are added."""
    gamma, backward = arithmetic.gamma(roundings), arithmetic.gamma(2 * roundings + arithmetic.extra)
    ends = factor * value.lower + shift, factor * value.upper + shift
    steep, computed = factor.abs(), value.computed
    magnitude = steep * value.magnitude + size
    flushed = 4 * arithmetic.tiny * (steep + computed + value.magnitude + value.slack + 2)
    error = steep * value.error + gamma * (steep * computed + size) + flushed
    slack = steep * value.slack + arithmetic.constants(size.expand_as(magnitude))
    slack = slack + backward * (magnitude + slack) + flushed
    found = Value(torch.minimum(*ends), torch.maximum(*ends), error, magnitude, slack)
    return settled(arithmetic, found, roundings)


def added(arithmetic: Arithmetic, first: Value, second: Value, sign: int) -> Value:
    """The sum or difference of two values, one of which may be a constant."""
    magnitude = first.magnitude + second.magnitude
    # A constant may have to be rounded to the dtype first.
    error = first.error + second.error + arithmetic.gamma(3) * (first.computed + second.computed) + arithmetic.tiny
    # Where one of them does not depend on the input it is a constant of a bound.
    fixed = [torch.where(part.lower == part.upper, part.magnitude, 0.0) for part in (first, second)]
    slack = first.slack + second.slack + arithmetic.constants(torch.maximum(*fixed).expand_as(magnitude))
    slack = slack + arithmetic.gamma(arithmetic.extra) * (magnitude + slack) + arithmetic.tiny
    ends = (second.lower, second.upper) if sign > 0 else (-second.upper, -second.lower)
    return settled(arithmetic, Value(first.lower + ends[0], first.upper + ends[1], error, magnitude, slack), 1)


def monotone(
    arithmetic: Arithmetic,
    value: Value,
    function: Callable[[Tensor], Tensor],
    *,
    roundings: int = 0,
    range_: float = 0.0,
) -> Value:
    """A non-decreasing function with slopes ≤ 1 and |function(0)| ≤ ``range_``, within ``roundings`` roundings.

    Its two lines add up |z| and an offset that is no larger, and hold over a range that is itself known up to slack.
    """
    magnitude = 2 * value.magnitude + range_
    ends = function(value.lower), function(value.upper)
    error = value.error
    if roundings:
        error = error + arithmetic.gamma(roundings) * (torch.maximum(ends[0].abs(), ends[1].abs()) + error)
        error = error + arithmetic.tiny
    slack = bounded_slack(arithmetic, value.slack, magnitude)
    return settled(arithmetic, Value(*ends, error, magnitude, slack), 1)


def bounded_slack(arithmetic: Arithmetic, slack: Tensor, magnitude: Tensor) -> Tensor:
    """The slack of an activation whose lines add up ``magnitude``, of an input with ``slack``."""
    size = magnitude + slack
    return 2 * slack + arithmetic.gamma(16) * size + arithmetic.constants(size) + 4 * arithmetic.tiny


def relu(arithmetic: Arithmetic, value: Value) -> Value:
    """Exact where ẑ ≤ 0 everywhere; elsewhere 1-Lipschitz."""
    off = value.upper + value.error <= 0
    found = monotone(arithmetic, value, torch.relu)
    return replace(found, error=found.error.masked_fill(off, 0.0))


class Spread(torch.Tensor):
    """A tensor that stands for a box of them; operations on it follow the rules of ``rounding_rules``."""

    value: Value
    arithmetic: Arithmetic
    rules: dict[Any, Callable[..., Any]]
    aliased: bool

    @staticmethod
    def __new__(
        cls, value: Value, arithmetic: Arithmetic, rules: dict[Any, Callable[..., Any]], dtype: torch.dtype
    ) -> Spread:
        made: Spread = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, value.lower.shape, dtype=dtype, device=value.lower.device
        )
        made.value, made.arithmetic, made.rules, made.aliased = value, arithmetic, rules, False
        return made

    def like(self, value: Value) -> Spread:
        return Spread(value, self.arithmetic, self.rules, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Spread({tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions that have a rule as a whole; others are dispatched by the operations they consist of."""
        rules = args[0].rules if args and isinstance(args[0], cls) else {}
        found = rules[func](func, *args, **(kwargs or {})) if func in rules else NotImplemented
        if found is not NotImplemented:
            return found
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = next(
            (s.rules for a in args for s in (a if isinstance(a, list | tuple) else (a,)) if isinstance(s, cls)), {}
        )
        found = rule.get(func.overloadpacket)
        if found is None:
            raise NoRuleError(f"operation {func.overloadpacket.__name__}")
        return found(func, *args, **(kwargs or {}))

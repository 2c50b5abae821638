"""The rules of the magnitude pass, by torch operation. What has none has no rounding bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.certification.magnitudes import (
    NoRuleError,
    Spread,
    Value,
    added,
    affine,
    exact,
    monotone,
    relu,
    scaled,
    settled,
)

aten = torch.ops.aten

Rule = Callable[..., Any]

FUNCTION_ROUNDINGS = 8
"""Sigmoid and tanh are assumed to be right within 4 units in the last place, that is 8 roundings."""

_STRUCTURAL = (
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze", "expand", "slice"),
    *("select", "alias", "detach", "clone", "contiguous", "flatten", "lift_fresh"),
)
_COPIES = ("clone", "contiguous", "lift_fresh")


def network_rules(model: nn.Module) -> dict[Any, Rule]:
    """The rules for a network. Weights must be tensors that it holds: what is computed from them in the forward
    pass is rounded too, and by nobody's rule."""
    held = {
        tensor.untyped_storage().data_ptr()
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values())
        if isinstance(tensor, Tensor)
    }
    return {**_RULES, **_with_weights(partial(_weight, held))}


def _weight(held: set[int], tensor: Any) -> Tensor:
    """A weight or constant in float64."""
    if isinstance(tensor, Spread):
        raise NoRuleError("product of two values that depend on the input")
    if not isinstance(tensor, Tensor):
        return torch.tensor(float(tensor), dtype=torch.float64)
    number = tensor.dim() == 0 and tensor.dtype in (torch.float64, torch.int64)  # as Python's numbers come
    if not number and tensor.untyped_storage().data_ptr() not in held:
        raise NoRuleError("weights computed in the forward pass")
    return tensor.detach().double()


def _with_weights(weight: Callable[[Any], Tensor]) -> dict[Any, Rule]:
    def value_of(operand: Any) -> Value:
        return operand.value if isinstance(operand, Spread) else exact(weight(operand))

    def conv(
        func: Any,
        x: Any,
        w: Any,
        b: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        _: Any,
        groups: int,
    ) -> Spread:
        if transposed or not isinstance(x, Spread):
            raise NoRuleError("transposed convolution" if transposed else "convolution with weights from the input")
        w64 = weight(w)
        bias = None if b is None else weight(b).view(-1, *[1] * (w64.dim() - 2))

        def apply(z: Tensor, absolute: bool) -> Tensor:
            kernel = w64.abs() if absolute else w64
            result: Tensor = aten.convolution(z, kernel, None, stride, padding, dilation, False, [0, 0], groups)
            return result

        size = prod(w64.shape[2:])
        terms, rows, highest = w64.shape[1] * size, w64.shape[0] // groups * size, _highest(w64)
        found = affine(x.arithmetic, x.value, apply, terms=terms, rows=rows, largest=highest, offset=bias)
        return x.like(found)

    def product(x: Any, w: Any, b: Any) -> Spread:
        if not isinstance(x, Spread):
            raise NoRuleError("matrix product with weights on the left")
        w64, bias = weight(w), None if b is None else weight(b)
        terms, rows = w64.shape[0], w64.shape[1]
        found = affine(
            x.arithmetic,
            x.value,
            lambda z, absolute: z @ (w64.abs() if absolute else w64),
            terms=terms,
            rows=rows,
            largest=_highest(w64),
            offset=bias,
        )
        return x.like(found)

    def addmm(func: Any, b: Any, x: Any, w: Any, *, beta: float = 1, alpha: float = 1) -> Spread:
        if beta != 1 or alpha != 1:
            raise NoRuleError("addmm with factors")
        return product(x, w, b)

    def linear(func: Any, x: Any, w: Any, b: Any = None) -> Spread:
        return product(x, w.t(), b)

    def add(func: Any, first: Any, second: Any, *, alpha: float = 1) -> Spread:
        sign = -1 if func.overloadpacket in (aten.sub, aten.sub_) else 1
        if func.overloadpacket is aten.rsub:
            first, second, sign = second, first, -1
        spread: Spread = first if isinstance(first, Spread) else second
        if alpha != 1:
            raise NoRuleError("sum with a factor")
        return spread.like(added(spread.arithmetic, value_of(first), value_of(second), sign))

    def multiply(func: Any, first: Any, second: Any) -> Spread:
        divides = func.overloadpacket in (aten.div, aten.div_)
        if divides and not isinstance(first, Spread):
            raise NoRuleError("division by a value that depends on the input")
        x, other = (first, second) if isinstance(first, Spread) else (second, first)
        factor = 1 / weight(other) if divides else weight(other)
        zero = torch.zeros_like(factor)
        return x.like(scaled(x.arithmetic, x.value, factor, zero, zero, roundings=4))

    def batch_norm(x: Spread, w: Any, b: Any, mean: Any, var: Any, eps: float) -> Spread:
        # (x − mean) / sqrt(var + eps) · w + b in any order, the four constants merged or not.
        shape = (1, -1, *[1] * (x.dim() - 2))
        centre, scale = weight(mean), 1 / torch.sqrt(weight(var) + eps)
        scale = scale if w is None else scale * weight(w)
        base = torch.zeros_like(centre) if b is None else weight(b)
        shift, size = base - centre * scale, base.abs() + (centre * scale).abs()
        parts = (part.view(shape) for part in (scale, shift, size))
        return x.like(scaled(x.arithmetic, x.value, *parts, roundings=16))

    def norm_training(
        func: Any, x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, _: Any, eps: float
    ) -> Any:
        if training:
            raise NoRuleError("BatchNorm in train mode")
        return batch_norm(x, w, b, mean, var, eps), torch.empty(0), torch.empty(0)

    def norm(func: Any, x: Any, w: Any, b: Any, mean: Any, var: Any, _: Any, eps: float) -> Any:
        return batch_norm(x, w, b, mean, var, eps), torch.empty(0), torch.empty(0)

    def cat(func: Any, tensors: Sequence[Any], dim: int = 0) -> Spread:
        spread: Spread = next(t for t in tensors if isinstance(t, Spread))
        values = [value_of(t) for t in tensors]
        names = ("lower", "upper", "error", "magnitude", "slack")
        return spread.like(Value(*(func([getattr(v, name) for v in values], dim) for name in names)))

    return {
        aten.convolution: conv,
        aten.addmm: addmm,
        aten.mm: lambda func, x, w: product(x, w, None),
        aten.linear: linear,
        **dict.fromkeys((aten.add, aten.sub, aten.rsub), add),
        **dict.fromkeys((aten.mul, aten.div), multiply),
        aten.native_batch_norm: norm_training,
        aten._native_batch_norm_legit_no_training: norm,
        **dict.fromkeys((aten.cat, aten.stack), cat),
        **dict.fromkeys((aten.add_, aten.sub_), _in_place(add)),
        **dict.fromkeys((aten.mul_, aten.div_), _in_place(multiply)),
    }


def _highest(weight: Tensor) -> float:
    return float(weight.abs().max()) if weight.numel() else 0.0


def _in_place(rule: Rule) -> Rule:
    """The rule of an operation that writes into its first argument, which no other tensor may share."""

    def apply(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Spread) or x.aliased:
            raise NoRuleError(f"operation {func.overloadpacket.__name__} on a tensor that others share")
        found = rule(func, x, *args, **kwargs)
        if found.shape != x.shape:
            raise NoRuleError(f"operation {func.overloadpacket.__name__} that changes the shape")
        x.value = found.value
        return x

    return apply


def _structural(func: Any, x: Spread, *args: Any, **kwargs: Any) -> Spread:
    found = x.like(x.value.each(lambda part: func(part, *args, **kwargs)))
    if func.overloadpacket.__name__ not in _COPIES:
        found.aliased = x.aliased = True
    return found


def _monotone(func: Any, x: Spread) -> Spread:
    function = getattr(torch, func.overloadpacket.__name__.removesuffix("_"))
    found = monotone(x.arithmetic, x.value, function, roundings=FUNCTION_ROUNDINGS, range_=1.0)
    return x.like(found)


def _relu(func: Any, x: Spread) -> Spread:
    return x.like(relu(x.arithmetic, x.value))


def _leaky_relu(func: Any, x: Spread, slope: float = 0.01) -> Spread:
    if not 0 <= slope <= 1:
        raise NoRuleError(f"LeakyReLU with slope {slope}")
    function = partial(torch.nn.functional.leaky_relu, negative_slope=slope)
    return x.like(monotone(x.arithmetic, x.value, function, roundings=2))


def _clamp(func: Any, x: Spread, low: float | None = None, high: float | None = None) -> Spread:
    ends = [float(end) for end in (low, high) if end is not None]
    function = partial(torch.clamp, min=low, max=high)
    return x.like(monotone(x.arithmetic, x.value, function, range_=max(map(abs, ends), default=0.0)))


def _negate(func: Any, x: Spread) -> Spread:
    v = x.value
    return x.like(Value(-v.upper, -v.lower, v.error, v.magnitude, v.slack))


def _mean(func: Any, x: Spread, *args: Any, **kwargs: Any) -> Spread:
    """Averages and sums: linear with weights ≥ 0, so that W = |W|. Window sizes are at most the image."""
    dims = args[0] if args and func.overloadpacket in (aten.mean, aten.sum) else [-1]
    if dims is None or any(dim % x.dim() == 0 for dim in dims) or kwargs.get("dtype") is not None:
        raise NoRuleError("mean over the whole batch")
    terms = prod(x.shape[1:]) if func.overloadpacket in (aten.mean, aten.sum) else prod(x.shape[2:])
    if func.overloadpacket is aten.avg_pool2d:
        terms = prod(args[0])

    def apply(z: Tensor, absolute: bool) -> Tensor:
        result: Tensor = func(z, *args, **kwargs)
        return result

    return x.like(affine(x.arithmetic, x.value, apply, terms=terms + 2, rows=terms + 2))


def _max_pool(func: Any, x: Spread, *args: Any) -> tuple[Spread, Tensor]:
    pooled = x.value.each(lambda part: func(part, *args)[0])
    a = x.arithmetic
    magnitude = 2 * pooled.magnitude
    slack = 2 * pooled.slack + a.gamma(16) * (magnitude + pooled.slack) + 4 * a.tiny
    found = settled(a, Value(pooled.lower, pooled.upper, pooled.error, magnitude, slack), 1)
    return x.like(found), torch.zeros(found.lower.shape, dtype=torch.int64, device=x.device)


def _pad(func: Any, x: Spread, pad: Any, value: float = 0) -> Spread:
    if value != 0:
        raise NoRuleError("padding with a value other than 0")
    return x.like(x.value.each(lambda part: func(part, pad, 0)))


def _structural_rules(names: Iterable[str]) -> dict[Any, Rule]:
    return {getattr(aten, name): _structural for name in names if hasattr(aten, name)}


_RULES: dict[Any, Rule] = {
    **_structural_rules(_STRUCTURAL),
    aten.relu: _relu,
    aten.relu_: _in_place(_relu),
    aten.leaky_relu: _leaky_relu,
    aten.leaky_relu_: _in_place(_leaky_relu),
    **dict.fromkeys((aten.sigmoid, aten.tanh), _monotone),
    **dict.fromkeys((aten.clamp, aten.hardtanh), _clamp),
    aten.neg: _negate,
    **dict.fromkeys((aten.mean, aten.sum, aten.avg_pool2d, aten._adaptive_avg_pool2d), _mean),
    aten.max_pool2d_with_indices: _max_pool,
    aten.constant_pad_nd: _pad,
}

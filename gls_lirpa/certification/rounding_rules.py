"""The rules of the magnitude pass, by torch operation. What has none has no rounding bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.certification.magnitudes import (
    NoRuleError,
    Spread,
    Value,
    added,
    affine,
    exact,
    scaled,
)
from gls_lirpa.certification.rounding_kinks import ACTIVATION_RULES

aten = torch.ops.aten

Rule = Callable[..., Any]

_PARTS = tuple(part.name for part in fields(Value))

_VIEWS = (
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze", "expand", "slice"),
    *("select", "alias", "detach", "flatten"),
)
_COPIES = (
    *("clone", "contiguous", "lift_fresh", "flip", "roll", "index", "index_select", "repeat", "pixel_shuffle"),
    *("pixel_unshuffle", "channel_shuffle", "reflection_pad2d", "replication_pad2d"),
)
"""What moves entries and rounds nothing, without and with a memory of its own."""


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
    if not _is_number(tensor) and tensor.untyped_storage().data_ptr() not in held:
        raise NoRuleError("weights computed in the forward pass")
    return tensor.detach().double()


def _is_number(tensor: Tensor) -> bool:
    """Python's numbers come as scalars that, unlike computed ones, do not make a scalar of float32 one of float64."""
    decides = torch.result_type(torch.zeros((), dtype=torch.float32), tensor)
    return tensor.dim() == 0 and tensor.dtype in (torch.float64, torch.int64) and decides == torch.float32


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
        output_padding: Any,
        groups: int,
    ) -> Spread:
        if not isinstance(x, Spread):
            raise NoRuleError("convolution with weights from the input")
        w64 = weight(w)
        bias = None if b is None else weight(b).view(-1, *[1] * (w64.dim() - 2))

        def apply(z: Tensor, absolute: bool) -> Tensor:
            kernel = w64.abs() if absolute else w64
            rest = (stride, padding, dilation, transposed, output_padding, groups)
            result: Tensor = aten.convolution(z, kernel, None, *rest)
            return result

        size, highest = prod(w64.shape[2:]), _highest(w64)
        terms, rows = w64.shape[1] * size, w64.shape[0] // groups * size
        if transposed:  # (in, out / groups, …) instead of (out, in / groups, …)
            terms, rows = rows, terms
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
        return spread.like(Value(*(func([getattr(v, name) for v in values], dim) for name in _PARTS)))

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
        **dict.fromkeys((aten.add_, aten.sub_), in_place(add)),
        **dict.fromkeys((aten.mul_, aten.div_), in_place(multiply)),
    }


def _highest(weight: Tensor) -> float:
    return float(weight.abs().max()) if weight.numel() else 0.0


def in_place(rule: Rule) -> Rule:
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
    name = func.overloadpacket.__name__
    if name in ("view", "_unsafe_view"):  # the parts need not lie in memory as the tensor that they stand for would
        found = x.like(x.value.each(lambda part: part.reshape(args[0])))
    else:
        found = x.like(x.value.each(lambda part: func(part, *args, **kwargs)))
    if name not in _COPIES:
        found.aliased = x.aliased = True
    return found


def _pieces(func: Any, x: Spread, *args: Any, **kwargs: Any) -> list[Spread]:
    pieces = [func(getattr(x.value, name), *args, **kwargs) for name in _PARTS]
    found = [x.like(Value(*parts)) for parts in zip(*pieces, strict=True)]
    for piece in (x, *found):
        piece.aliased = True
    return found


def _negate(func: Any, x: Spread) -> Spread:
    v = x.value
    return x.like(Value(-v.upper, -v.lower, v.error, v.magnitude, v.slack))


def _mean(func: Any, x: Spread, *args: Any, **kwargs: Any) -> Spread:
    """Averages and sums: linear with weights of one sign, so that |W| z = |W z| for z ≥ 0."""
    dims = args[0] if args and func.overloadpacket in (aten.mean, aten.sum) else [-1]
    if dims is None or any(dim % x.dim() == 0 for dim in dims) or kwargs.get("dtype") is not None:
        raise NoRuleError("mean over the whole batch")
    # A window is at most the image; an average pool of an image of one pixel may divide by more.
    terms = prod(x.shape[1:])
    if func.overloadpacket is aten.avg_pool2d:
        terms = max(args[0]) ** 2

    def apply(z: Tensor, absolute: bool) -> Tensor:
        result: Tensor = func(z, *args, **kwargs)
        return result.abs() if absolute else result

    return x.like(affine(x.arithmetic, x.value, apply, terms=terms + 2, rows=terms + 2))


def _pad(func: Any, x: Spread, pad: Any, value: float = 0) -> Spread:
    padded = x.value.each(lambda part: func(part, pad, 0))
    if value == 0:
        return x.like(padded)
    border = func(torch.zeros_like(x.value.lower[:1]), pad, value)
    return x.like(added(x.arithmetic, padded, exact(border), 1))


def _circular_pad(func: Any, x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """As a whole: torch composes it of writes into a tensor without values."""
    if mode != "circular" or not isinstance(x, Spread):
        return NotImplemented
    return x.like(x.value.each(lambda part: func(part, pad, mode)))


def _written(rules: dict[Any, Rule]) -> dict[Any, Rule]:
    """The same rules for what writes into its first argument."""
    named = {f"{packet.__name__}_": rule for packet, rule in rules.items()}
    return {getattr(aten, name): in_place(rule) for name, rule in named.items() if hasattr(aten, name)}


_RULES: dict[Any, Rule] = {
    **{getattr(aten, name): _structural for name in (*_VIEWS, *_COPIES) if hasattr(aten, name)},
    **dict.fromkeys((aten.split, aten.split_with_sizes, aten.unbind), _pieces),
    **ACTIVATION_RULES,
    **_written(ACTIVATION_RULES),
    aten.neg: _negate,
    **dict.fromkeys((aten.mean, aten.sum, aten.avg_pool2d, aten._adaptive_avg_pool2d), _mean),
    aten.constant_pad_nd: _pad,
    F.pad: _circular_pad,
}

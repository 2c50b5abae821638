"""Pooling, padding, slices, concatenation, means: each as convolutions and matrix products."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.engine.maps import mapped, plain, shaped, untraced
from gls_lirpa.engine.windows import Pair, Side, window_sums
from gls_lirpa.errors import UnsupportedLayerError

Tracked = Callable[[Any], bool]


def _pair(value: Any) -> Pair:
    first, second = (value[0], value[-1]) if isinstance(value, (tuple, list)) else (value, value)
    return int(first), int(second)


def _moving(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    return _of_first(function, args, kwargs, tracked, moves=True)


def _linear(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    return _of_first(function, args, kwargs, tracked, moves=False)


def _of_first(function: Any, args: Any, kwargs: dict[str, Any], tracked: Tracked, *, moves: bool) -> Any:
    """An operation that is affine in its first argument, which alone depends on the input."""
    if not args or not tracked(args[0]) or any(tracked(value) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    with untraced():
        rest = tuple(plain(value) for value in args[1:])
        named = {key: plain(value) for key, value in kwargs.items()}
    return mapped(args[0], lambda z: function(z, *rest, **named), _name(function), moves=moves)


def _reshaped(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    """A reshaping that keeps the number of samples keeps the samples; a trace would fix that number."""
    x = args[0]
    with untraced():
        shape = tuple(function(x.detach(), *map(plain, args[1:]), **kwargs).shape)
        if not tracked(x) or x.dim() < 2 or not shape or shape[0] != x.shape[0]:
            return NotImplemented
    return shaped(x, shape[1:])


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _parts(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    """split, chunk, unbind: every piece is an operation of its own."""
    with untraced():
        count = len(function(args[0].detach(), *args[1:], **kwargs)) if tracked(args[0]) else 0

    def piece(number: int) -> Any:
        def take(z: Tensor, *rest: Any, **named: Any) -> Any:
            return function(z, *rest, **named)[number]

        return _moving(take, args, kwargs, tracked)

    pieces = tuple(piece(number) for number in range(count))
    return NotImplemented if not pieces or any(p is NotImplemented for p in pieces) else pieces


def _joined(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    """cat, stack: the sum of what each tensor alone would give with zeros instead of the others."""
    tensors = list(args[0] if args else kwargs["tensors"])
    rest = args[1:]
    named = {key: value for key, value in kwargs.items() if key != "tensors"}
    total: Any = None
    for position, tensor in enumerate(tensors):
        if not tracked(tensor):
            continue

        def alone(z: Tensor, position: int = position) -> Tensor:
            zeros = [z.new_zeros(len(z), *other.shape[1:]) for other in tensors]
            joined: Tensor = function([*zeros[:position], z, *zeros[position + 1 :]], *rest, **named)
            return joined

        term = _embedded(function, tensors, position, rest, named)
        term = mapped(tensor, alone, _name(function)) if term is None else term
        if term is NotImplemented:
            return NotImplemented
        total = term if total is None else total + term
    with untraced():
        fixed = [t.detach() * 0 if tracked(t) else t.detach() for t in tensors]
        constant = function(fixed, *rest, **named)[:1]
        if any(not tracked(t) and not torch.equal(t, t[:1].expand_as(t)) for t in tensors):
            return NotImplemented
        needed = bool((constant != 0).any())
    return total + constant if needed else total


def _embedded(function: Any, tensors: list[Tensor], position: int, rest: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Channels of images joined with others: a convolution of size 1."""
    dim = named.get("dim", named.get("axis", rest[0] if rest else 0))
    if function is torch.stack or dim not in (1, -3) or tensors[position].dim() != 4:
        return None
    with untraced():
        sizes = [int(t.shape[1]) for t in tensors]
        start, own = sum(sizes[:position]), sizes[position]
        x = tensors[position]
        weight = torch.zeros(sum(sizes), own, 1, 1, dtype=x.dtype, device=x.device)
        weight[start : start + own, :, 0, 0] = torch.eye(own, dtype=x.dtype, device=x.device)
    return torch.conv2d(tensors[position], weight)


def _avg_pool2d(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    """Sums over windows, divided by what torch itself divides by at each position."""
    x = args[0]
    if x.dim() != 4:
        return NotImplemented
    with untraced():
        bound = _POOL.bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        size, padding = _pair(options["kernel_size"]), _pair(options["padding"])
        stride = _pair(options["stride"]) if options["stride"] not in (None, [], ()) else size
        ones = torch.ones(1, 1, *x.shape[2:], dtype=torch.float64, device=x.device)
        pooled = F.avg_pool2d(ones, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        pixels = F.avg_pool2d(ones, size, stride, padding, bool(options["ceil_mode"]), True, 1)
        # Nothing but padding in a window: its sum is 0 whatever it is divided by.
        factors = torch.where(pixels > 0, pooled / pixels, torch.zeros_like(pooled))
        sides = [Side(int(x.shape[2 + i]), -padding[i], stride[i], size[i], int(pooled.shape[2 + i])) for i in (0, 1)]
        uniform = bool((factors == factors.flatten()[0]).all())
        sums = window_sums(x, *sides, factor=float(factors.flatten()[0]) if uniform else 1.0)
        scale = factors.to(x).expand(1, int(x.shape[1]), -1, -1).contiguous()
    return sums(x) if uniform else sums(x) * scale


def _pool_signature(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: Any = False,
    count_include_pad: Any = True, divisor_override: Any = None,
) -> None: ...  # fmt: skip


_POOL = inspect.signature(_pool_signature)


def _adaptive_avg_pool2d(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    x, size = args[0], args[1] if len(args) > 1 else kwargs["output_size"]
    with untraced():
        image = [int(side) for side in x.shape[2:]]
        given = size if isinstance(size, (tuple, list)) else (size, size)
        target = [side if wanted is None else int(wanted) for wanted, side in zip(given, image, strict=True)]
        equal = x.dim() == 4 and all(side % wanted == 0 for side, wanted in zip(image, target, strict=True))
        window = [side // wanted for side, wanted in zip(image, target, strict=True)]
    if x.dim() == 4 and target == [1, 1]:
        return NotImplemented  # a global average pooling, which is bounded as it is
    if equal:
        return _avg_pool2d(F.avg_pool2d, (x, window), {}, tracked)
    return _linear(function, (x, size), {}, tracked)


def _mean(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    x = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    dims = {dim % x.dim() for dim in ((dims,) if isinstance(dims, int) else dims or ())}
    if x.dim() == 4 and dims == {2, 3}:
        with untraced():
            target = tuple(function(*args, **kwargs).shape[1:])
        return shaped(F.adaptive_avg_pool2d(x, 1), target)
    return NotImplemented if 0 in dims or not dims else _linear(function, args, kwargs, tracked)


def _pad(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    bound = _PAD.bind(*args, **kwargs)
    bound.apply_defaults()
    x, pad, mode, value = bound.args
    with untraced():
        pad = [int(side) for side in pad]
    if mode != "constant":
        return _moving(function, args, kwargs, tracked)
    if x.dim() != 4 or any(pad[4:]):
        return _linear(function, args, kwargs, tracked)
    with untraced():
        before, after = (pad + [0] * 4)[:4:2], (pad + [0] * 4)[1:4:2]
        image = [int(x.shape[3]), int(x.shape[2])]
        sides = [Side(image[i], -before[i], 1, 1, image[i] + before[i] + after[i]) for i in (0, 1)]
        grid = window_sums(x, sides[1], sides[0])
        border = F.pad(torch.zeros(1, *x.shape[1:], dtype=x.dtype, device=x.device), pad, mode, value)
    return grid(x) + border if value else grid(x)


def _pad_signature(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> None: ...


_PAD = inspect.signature(_pad_signature)


def _conv2d(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    """padding="same" and "valid" as numbers."""
    bound = _CONV.bind(*args, **kwargs)
    bound.apply_defaults()
    x, weight, bias, stride, padding, dilation, groups = bound.args
    if not isinstance(padding, str):
        return NotImplemented
    if padding == "valid":
        return torch.conv2d(x, weight, bias, stride, 0, dilation, groups)
    total = [_pair(dilation)[i] * (int(weight.shape[2 + i]) - 1) for i in (0, 1)]
    if total[0] % 2 == total[1] % 2 == 0:
        return torch.conv2d(x, weight, bias, stride, (total[0] // 2, total[1] // 2), dilation, groups)
    ends = [total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2]
    return torch.conv2d(_pad(F.pad, (x, ends), {}, tracked), weight, bias, stride, 0, dilation, groups)


def _conv_signature(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
) -> None: ...


_CONV = inspect.signature(_conv_signature)


def _conv_transpose2d(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    """Padding of a transposed convolution crops its result, and output padding crops less at the far ends."""
    bound = _TRANSPOSED.bind(*args, **kwargs)
    bound.apply_defaults()
    x, weight, bias, stride, padding, output_padding, groups, dilation = bound.args
    crop, extra = _pair(padding), _pair(output_padding)
    if groups != 1 or _pair(dilation) != (1, 1) or any(more > less for more, less in zip(extra, crop, strict=True)):
        raise UnsupportedLayerError(
            f"conv_transpose2d with groups {groups}, dilation {dilation}, padding {padding} and output_padding "
            f"{output_padding} cannot be bounded: use groups=1, dilation=1 and output_padding <= padding"
        )
    if crop == (0, 0):
        return NotImplemented
    whole = torch.conv_transpose2d(x, weight, bias, stride, 0, 0, groups, dilation)
    ends = [-crop[1], extra[1] - crop[1], -crop[0], extra[0] - crop[0]]
    return _pad(F.pad, (whole, ends), {}, tracked)


def _transposed_signature(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: Any = 1, dilation: Any = 1,
) -> None: ...  # fmt: skip


_TRANSPOSED = inspect.signature(_transposed_signature)


def _dropout(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Tracked) -> Any:
    """Nothing, in eval mode."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    if training and p > 0:
        raise UnsupportedLayerError(
            f"{_name(function)} with training=True is random and cannot be bounded: pass training=self.training"
        )
    return args[0]


_RESHAPING = ("reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
_MOVING = ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "flip", "roll", "narrow", "select",
           "index_select", "tile")  # fmt: skip

AFFINE_RULES: dict[Any, Callable[..., Any]] = {
    **{getattr(owner, name): _reshaped for name in _RESHAPING for owner in (torch, Tensor)},
    **dict.fromkeys((Tensor.view, Tensor.reshape_as, Tensor.view_as), _reshaped),
    **{getattr(owner, name): _moving for name in _MOVING for owner in (torch, Tensor)},
    **dict.fromkeys((Tensor.__getitem__, Tensor.repeat, Tensor.expand, torch.pixel_shuffle), _moving),
    **dict.fromkeys((torch.pixel_unshuffle, torch.channel_shuffle, torch.rot90, torch.fliplr), _moving),
    **dict.fromkeys((torch.sum, Tensor.sum, F.interpolate, F.upsample), _linear),
    **{getattr(owner, name): _parts for name in ("split", "chunk", "unbind") for owner in (torch, Tensor)},
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), _joined),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), _dropout),
    F.avg_pool2d: _avg_pool2d,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    F.pad: _pad,
    torch.conv2d: _conv2d,
    torch.conv_transpose2d: _conv_transpose2d,
}

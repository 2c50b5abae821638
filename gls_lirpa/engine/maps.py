"""An affine operation as a convolution or a matrix product, found by applying the operation itself.

What acts on every sample alike and is affine is known from its values at zero and at the unit vectors.
Where it only moves entries, its value at 0, 1, 2, … says which; whole channels and regular grids of
pixels are picked by convolutions, which stay small.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gls_lirpa.engine.windows import Side, window_sums
from gls_lirpa.errors import UnsupportedLayerError

LARGEST_MATRIX = 2**26
"""Entries of the largest matrix that an operation may become: 256 MiB of float32."""

Map = Callable[[Tensor], Tensor]

_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
"""How torch says that an operation does not fit a tensor: here, that it is not one of samples."""


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """What is computed inside is a constant to whoever traces."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch.no_grad():
            yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def mapped(x: Tensor, apply: Map, name: str, *, moves: bool = False) -> Any:
    """``apply(x)`` for an affine ``apply`` that acts on every sample alike; ``moves``: it only moves entries.

    NotImplemented where it does not act on samples.

    >>> x = torch.rand(2, 3, 4)
    >>> torch.equal(mapped(x, lambda z: z.permute(0, 2, 1), "permute", moves=True), x.permute(0, 2, 1))
    True
    """
    with untraced():
        replacement = _replacement(x.detach(), apply, name, moves)
    return NotImplemented if replacement is None else replacement(x)


def _replacement(x: Tensor, apply: Map, name: str, moves: bool) -> Map | None:
    try:
        target = tuple(apply(x).shape)
        if x.dim() < 2 or not target or target[0] != len(x):
            return None
        sources = _sources(x, apply) if moves else None
        if sources is not None:
            conv = _as_convolution(x, sources)
            if conv is not None:
                return conv
            if torch.equal(sources.flatten(), torch.arange(x[0].numel(), device=x.device)):
                return lambda z: shaped(z, target[1:])
        return _matrix(x, apply, target[1:], name)
    except _REFUSALS:
        return None


def _sources(x: Tensor, apply: Map) -> Tensor:
    """For every entry of a sample's result the flat index of the entry it is."""
    count = x[0].numel()
    index = torch.arange(count, dtype=torch.float64, device=x.device).reshape(1, *x.shape[1:])
    found = apply(torch.cat([index, index + count])).long()
    first, second = found[0], found[1]
    if not torch.equal(first + count, second):
        raise ValueError("not the same for every sample")
    return first


def _as_convolution(x: Tensor, sources: Tensor) -> Map | None:
    """Whole channels by a convolution of size 1, or the same regular grid of every channel by a depthwise one."""
    if x.dim() != 4 or sources.dim() != 3 or not sources.numel():
        return None
    channels, height, width = x.shape[1:]
    chosen = sources[:, 0, 0].div(height * width, rounding_mode="floor")
    rows = (sources % (height * width)).div(width, rounding_mode="floor")[0, :, 0]
    columns = (sources % width)[0, 0]
    rebuilt = chosen.view(-1, 1, 1) * height * width + rows.view(1, -1, 1) * width + columns
    if not torch.equal(rebuilt, sources):
        return None
    same_pixels = rows.tolist() == list(range(height)) and columns.tolist() == list(range(width))
    same_channels = chosen.tolist() == list(range(channels))
    if same_pixels and not same_channels:
        weight = torch.zeros(len(chosen), channels, 1, 1, dtype=x.dtype, device=x.device)
        weight[torch.arange(len(chosen)), chosen] = 1.0
        return lambda z: torch.conv2d(z, weight)
    grid = _progression(rows.tolist(), height), _progression(columns.tolist(), width)
    if same_channels and not same_pixels and grid[0] is not None and grid[1] is not None:
        return window_sums(x, grid[0], grid[1])
    return None


def _progression(pixels: list[int], image: int) -> Side | None:
    step = pixels[1] - pixels[0] if len(pixels) > 1 else 1
    side = Side(image, pixels[0], step, 1, len(pixels))
    return side if step > 0 and pixels == [pixels[0] + i * step for i in range(len(pixels))] else None


def _matrix(x: Tensor, apply: Map, target: tuple[int, ...], name: str) -> Map | None:
    count = x[0].numel()
    if count * math.prod(target) > LARGEST_MATRIX:
        raise UnsupportedLayerError(
            f"{name} of {tuple(x.shape[1:])} to {target} would be a matrix of more than {LARGEST_MATRIX} entries: "
            "apply it to smaller inputs, or write it as a convolution"
        )
    units = torch.eye(count, dtype=x.dtype, device=x.device).reshape(count, *x.shape[1:])
    at_zero = apply(torch.zeros_like(units[:2]))
    images = apply(units)
    if images.shape != (count, *target):
        return None
    offset = at_zero[:1].flatten(1)
    matrix = (images.flatten(1) - offset).contiguous()
    if bool((offset == 0).all()):
        return lambda z: shaped(torch.matmul(flat(z), matrix), target)
    return lambda z: shaped(torch.matmul(flat(z), matrix) + offset, target)


def flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.flatten(1)


def shaped(x: Tensor, target: tuple[int, ...]) -> Tensor:
    """Samples of shape ``target``, whatever their number."""
    if len(target) == 1:
        return flat(x)
    return x.reshape(-1, *target)


def plain(value: Any) -> Any:
    """Sizes as numbers: while tracing they are tensors."""
    if isinstance(value, (tuple, list)):
        return type(value)(plain(entry) for entry in value) if type(value) in (tuple, list) else tuple(value)
    if isinstance(value, slice):
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype == torch.int64:
        return int(value)
    return value

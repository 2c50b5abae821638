"""Maps in the layout of patches that are kept in phases of a stride."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gls_lirpa.engine.row_network import Pair


def in_phases(value: Tensor, spans: Pair, offset: Pair, phase: Pair) -> Tensor:
    """The ``spans`` pixels from ``offset`` on of (batch, height, width, channels), 0 outside, in cells of ``phase``
    pixels: (batch, high, wide, phases · channels).

    >>> in_phases(torch.arange(4.0).view(1, 1, 4, 1), (1, 4), (0, 0), (1, 2)).tolist()
    [[[[0.0, 1.0], [2.0, 3.0]]]]
    """
    if phase == (1, 1) and offset == (0, 0) and spans == value.shape[1:3]:
        return value
    batch, height, width, _ = value.shape
    cells = spans[0] // phase[0], spans[1] // phase[1]
    if offset[1] % phase[1] == 0 and width % phase[1] == 0:
        # The phases along a line lie side by side already: they count as channels.
        value = value.reshape(batch, height, width // phase[1], -1)
        spans, offset, phase = (spans[0], cells[1]), (offset[0], offset[1] // phase[1]), (phase[0], 1)
    found: Tensor = _LaidOut.apply(value, spans, offset, phase)  # type: ignore[no-untyped-call]
    return found.view(batch, *cells, -1)


class _LaidOut(torch.autograd.Function):
    """Phase by phase: strided copies of long runs, where one copy of six axes would move a pixel at a time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, spans: Pair, offset: Pair, phase: Pair) -> Tensor:
        batch, height, width, channels = value.shape
        ctx.shape, ctx.geometry = value.shape, (spans, offset, phase)
        pairs, covered = _phase_slices((height, width), spans, offset, phase)
        cells = spans[0] // phase[0], spans[1] // phase[1]
        make = value.new_empty if covered else value.new_zeros
        result = make(batch, *cells, *phase, channels)
        for source, target in pairs:
            result[target] = value[source]
        return result.view(batch, *cells, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pairs, _ = _phase_slices(ctx.shape[1:3], *ctx.geometry)
        gradient = gradient.reshape(*gradient.shape[:3], *ctx.geometry[2], ctx.shape[3])
        found = gradient.new_zeros(ctx.shape)
        for source, target in pairs:
            found[source] = gradient[target]
        return found, None, None, None


Slices = tuple[slice | int, ...]


@lru_cache
def _phase_slices(size: Pair, spans: Pair, offset: Pair, phase: Pair) -> tuple[list[tuple[Slices, Slices]], bool]:
    """For every phase its pixels on the map and the cells they go to, of which the first begins at ``offset``; and
    whether pixels go to all cells."""

    def along(axis: int, at: int) -> tuple[slice, slice]:
        first, step = offset[axis] + at, phase[axis]
        begin = max(0, -(first // step))
        end = max(begin, min(spans[axis] // step, -((first - size[axis]) // step)))
        return slice(first + begin * step, first + end * step, step), slice(begin, end)

    every = slice(None)
    found: list[tuple[Slices, Slices]] = []
    for y in range(phase[0]):
        for x in range(phase[1]):
            (rows, high), (columns, wide) = along(0, y), along(1, x)
            found.append(((every, rows, columns), (every, high, wide, y, x)))
    covered = all(offset[a] >= 0 and offset[a] + spans[a] <= size[a] for a in (0, 1))
    return found, covered

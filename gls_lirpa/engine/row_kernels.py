"""Compiled passes of rows through convolutions and ReLUs, a sample's rows at a time, dead neurons left out.

Most neurons of a certifiably trained network are dead over the box: their slopes are 0, and nothing that comes to them
goes on. Those that are not are listed once for all rows with the same window, and only they are visited; all that such
a group of rows needs stays in the first caches of a core.

``plan`` has a line per ReLU from the top and one for the input, with the columns named here in capitals. Kernels are
kept as (output channel, row, column · input channel), the last axis filled up with zeros to whole ``LANES``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import njit

from gls_lirpa.engine.lanes import LANES, gather_1, gather_2, gather_3, scatter_1, scatter_2, scatter_3

Array = Any
"""A numpy array; its element type is what numba compiles for."""

ROWS = 18
"""Rows of a group that go through the layers together: twice the nine of ten classes. Of 3, 6, 18 and 24 18 were
the fastest."""

HEIGHT, WIDTH, CHANNELS, HIGH, WIDE, SIZE, BEGIN, TAPS, ACROSS, STRIDE_Y, STRIDE_X, PAD_Y, PAD_X = range(13)
"""The map; the window that a row has of it, its values with what products may write behind them, and where the first
row's begin; the convolution below: rows of its kernel, padded entries of one, stride, padding."""


def _compiled(function: Any, *, reordered: bool = False) -> Any:
    """``reordered``: sums may be added up in any order."""
    fast = {"contract", "reassoc", "nsz"} if reordered else {"contract"}
    options: dict[str, Any] = {"nogil": True, "fastmath": fast, "error_model": "numpy"}
    try:
        return njit(function, cache=True, **options)
    except RuntimeError:  # no folder to keep it in
        return njit(function, **options)


@_compiled
def _listed(plan: Array, k: int, full: bool, oy: int, ox: int, alpha: Array, excess: Array, alive: Array) -> int:
    """Neurons of a window that are not dead: where in the window, which of the map, where what they hand on begins."""
    line, below = plan[k], plan[k + 1]
    width, channels, count = line[WIDTH], line[CHANNELS], 0
    for y in range(max(0, -oy), min(line[HIGH], line[HEIGHT] - oy)):
        for x in range(max(0, -ox), min(line[WIDE], width - ox)):
            ty, tx = (y + oy if full else y) * line[STRIDE_Y], (x + ox if full else x) * line[STRIDE_X]
            target = (ty * below[WIDE] + tx) * below[CHANNELS]
            neuron, position = ((y + oy) * width + x + ox) * channels, (y * line[WIDE] + x) * channels
            for c in range(channels):
                # Written in any case: a branch would be mispredicted too often.
                alive[0, count], alive[1, count], alive[2, count] = position + c, neuron + c, target
                count += (alpha[neuron + c] != 0) | (excess[neuron + c] != 0)
    return count


@_compiled
def _jumps(plan: Array) -> Array:
    """By ReLU: where the lanes of a kernel meet the window below, from where the kernel begins."""
    levels = len(plan) - 1
    jump = np.zeros((levels, (plan[:levels, TAPS] * plan[:levels, ACROSS]).max() // LANES), np.int64)
    for k in range(levels):
        each = plan[k, ACROSS] // LANES
        for tap in range(plan[k, TAPS]):
            for number in range(each):
                jump[k, tap * each + number] = tap * plan[k + 1, WIDE] * plan[k + 1, CHANNELS] + number * LANES
    return jump


@_compiled
def _down(
    plan: Array, k: int, rows: int, count: int, alive: Array, jump: Array, buffer: Array, total: Array, factor: Array,
    alpha: Array, excess: Array, offset: Array, weight: Array, bias: Array,
) -> None:  # fmt: skip
    """Coefficients of a ReLU's output as those of the convolution's input below it, and the constants that rows get.

    These are added up by themselves: proofs count on sums over the values of one layer (``certification.magnitudes``).
    """
    line, below = plan[k], plan[k + 1]
    entries, size = line[TAPS] * line[ACROSS], below[SIZE]
    lines = entries // LANES
    zero = buffer.dtype.type(0)
    constant = np.zeros(rows)
    for j in range(count):
        neuron = alive[1, j]
        channel = neuron % line[CHANNELS]
        a, e, shift, b = alpha[neuron], excess[neuron], offset[neuron], bias[channel]
        for r in range(rows):
            value = buffer[line[BEGIN] + r * line[SIZE] + alive[0, j]]
            low = value if value < zero else zero
            factor[r] = a * value + low * e
            constant[r] += low * shift + factor[r] * b
        o, i, r = below[BEGIN] + alive[2, j], channel * entries, 0
        while r + 3 <= rows:
            scatter_3(buffer, o + r * size, size, factor, r, weight, i, jump, lines)
            r += 3
        if r + 2 == rows:
            scatter_2(buffer, o + r * size, size, factor, r, weight, i, jump, lines)
        elif r + 1 == rows:
            scatter_1(buffer, o + r * size, size, factor, r, weight, i, jump, lines)
    for r in range(rows):
        total[r] += constant[r]


@_compiled
def _up(
    plan: Array, k: int, rows: int, count: int, alive: Array, jump: Array, buffer: Array, change: Array, down: Array,
    factor: Array, slope: Array, alpha: Array, excess: Array, offset: Array, weight: Array, bias: Array,
    d_excess: Array, d_offset: Array, d_weight: Array, d_bias: Array,
) -> None:  # fmt: skip
    """Derivatives in what ``_down`` took: ``change`` has those in coefficients, ``down`` those in rows' constants."""
    line, below = plan[k], plan[k + 1]
    entries, size = line[TAPS] * line[ACROSS], below[SIZE]
    lines = entries // LANES
    zero = buffer.dtype.type(0)
    for j in range(count):
        neuron = alive[1, j]
        channel = neuron % line[CHANNELS]
        a, e, shift, b = alpha[neuron], excess[neuron], offset[neuron], bias[channel]
        for r in range(rows):
            value = buffer[line[BEGIN] + r * line[SIZE] + alive[0, j]]
            factor[r] = a * value + (value if value < zero else zero) * e
        o, i, r = below[BEGIN] + alive[2, j], channel * entries, 0
        while r + 3 <= rows:
            gather_3(change, o + r * size, size, factor, slope, r, weight, d_weight, i, jump, lines)
            r += 3
        if r + 2 == rows:
            gather_2(change, o + r * size, size, factor, slope, r, weight, d_weight, i, jump, lines)
        elif r + 1 == rows:
            gather_1(change, o + r * size, size, factor, slope, r, weight, d_weight, i, jump, lines)
        for r in range(rows):
            at = line[BEGIN] + r * line[SIZE] + alive[0, j]
            value, own, new = buffer[at], down[r], slope[r] + down[r] * b
            d_bias[channel] += factor[r] * own
            change[at] = a * new
            if value < zero:
                change[at] += e * new + own * shift
                d_excess[neuron] += new * value
                d_offset[neuron] += own * value


@partial(_compiled, reordered=True)
def _spoilt(values: Array) -> Any:
    """NaN where a value is not finite, which may meet dead neurons alone, and 0 elsewhere."""
    found = values.dtype.type(0)
    for i in range(len(values)):
        found += values[i] * 0
    return found


@partial(_compiled, reordered=True)
def _ends(line: Array, oy: int, ox: int, rows: int, buffer: Array, center: Array, radius: Array, total: Array) -> None:
    """Add the minimum of rows over the box."""
    first, last = max(0, -ox) * line[CHANNELS], min(line[WIDE], line[WIDTH] - ox) * line[CHANNELS]
    for r in range(rows):
        found = buffer.dtype.type(0)
        for y in range(max(0, -oy), min(line[HIGH], line[HEIGHT] - oy)):
            at = line[BEGIN] + r * line[SIZE] + y * line[WIDE] * line[CHANNELS]
            pixel = ((y + oy) * line[WIDTH] + ox) * line[CHANNELS]
            for i in range(first, last):
                value = buffer[at + i]
                found += value * center[pixel + i] - abs(value) * radius[pixel + i]
        total[r] += found


@_compiled
def _ends_up(
    line: Array, oy: int, ox: int, rows: int, buffer: Array, center: Array, radius: Array, change: Array, down: Array
) -> None:
    """The derivatives of that in the coefficients."""
    first, last = max(0, -ox) * line[CHANNELS], min(line[WIDE], line[WIDTH] - ox) * line[CHANNELS]
    for r in range(rows):
        own = down[r]
        for y in range(max(0, -oy), min(line[HIGH], line[HEIGHT] - oy)):
            at = line[BEGIN] + r * line[SIZE] + y * line[WIDE] * line[CHANNELS]
            pixel = ((y + oy) * line[WIDTH] + ox) * line[CHANNELS]
            for i in range(first, last):
                value, middle, spread = buffer[at + i], center[pixel + i], radius[pixel + i]
                low = own * (middle + spread) if value < 0 else own * middle
                change[at + i] = own * (middle - spread) if value > 0 else low


@_compiled
def lower_bounds(
    plan: Array, full: bool, values: Array, first: Array, sample: Array, places: Array, batch: int,
    alpha: Any, excess: Any, offset: Any, weight: Any, bias: Any, center: Array, radius: Array,
    spoilt: float, bounds: Array, differentiate: bool, d_values: Array, d_excess: Any, d_offset: Any,
    d_weight: Any, d_bias: Any, start: int, stop: int,
) -> None:  # fmt: skip
    """The bounds of rows in groups ``start`` to ``stop``; with ``differentiate`` all derivatives, from those in bounds.

    Rows ``first[g]`` to ``first[g + 1]`` of ``values`` see the box of ``sample[g]`` from pixel ``places[g]`` on, or
    all of it where rows are ``full``. ``spoilt`` is added to all bounds. Samples of a population are counted through,
    ``batch`` of each member.
    """
    levels = len(plan) - 1
    length = plan[levels, BEGIN] + ROWS * plan[levels, SIZE]
    buffer, change = np.zeros(length, values.dtype), np.zeros(length if differentiate else 0, values.dtype)
    total, (factor, slope) = np.zeros(ROWS), np.zeros((2, ROWS), values.dtype)
    counts = np.zeros(levels, np.int64)
    windows = plan[:levels, HIGH] * plan[:levels, WIDE] * plan[:levels, CHANNELS]
    alive = np.empty((levels, 3, windows.max() + 1), np.int32)
    jump = _jumps(plan)
    origin = np.zeros((levels + 1, 2), np.int64)
    width = values.shape[1]
    for g in range(start, stop):
        s = sample[g]
        member = s // batch
        origin[0] = places[g]
        for k in range(levels):
            oy, ox = origin[k]
            counts[k] = _listed(plan, k, full, oy, ox, alpha[k][s], excess[k][s], alive[k])
            origin[k + 1, 0] = (0 if full else oy * plan[k, STRIDE_Y]) - plan[k, PAD_Y]
            origin[k + 1, 1] = (0 if full else ox * plan[k, STRIDE_X]) - plan[k, PAD_X]
        bottom = plan[levels]
        for begin in range(first[g], first[g + 1], ROWS):
            rows = min(ROWS, first[g + 1] - begin)
            for r in range(rows):
                at = plan[0, BEGIN] + r * plan[0, SIZE]
                buffer[at : at + width] = values[begin + r]
                total[r] = spoilt + _spoilt(values[begin + r])
            for k in range(levels):
                buffer[plan[k + 1, BEGIN] : plan[k + 1, BEGIN] + rows * plan[k + 1, SIZE]] = 0
                _down(plan, k, rows, counts[k], alive[k], jump[k], buffer, total, factor,
                      alpha[k][s], excess[k][s], offset[k][s], weight[k][member], bias[k][member])  # fmt: skip
            own, box = bounds[begin : begin + rows], s % batch
            oy, ox = origin[levels]
            if not differentiate:
                _ends(bottom, oy, ox, rows, buffer, center[box], radius[box], total)
                own[:] = total[:rows]
                continue
            for k in range(levels + 1):
                change[plan[k, BEGIN] : plan[k, BEGIN] + rows * plan[k, SIZE]] = 0
            _ends_up(bottom, oy, ox, rows, buffer, center[box], radius[box], change, own)
            for k in range(levels - 1, -1, -1):
                _up(plan, k, rows, counts[k], alive[k], jump[k], buffer, change, own, factor, slope,
                    alpha[k][s], excess[k][s], offset[k][s], weight[k][member], bias[k][member],
                    d_excess[k][s], d_offset[k][s], d_weight[k][member], d_bias[k][member])  # fmt: skip
            for r in range(rows):
                at = plan[0, BEGIN] + r * plan[0, SIZE]
                d_values[begin + r] = change[at : at + width]

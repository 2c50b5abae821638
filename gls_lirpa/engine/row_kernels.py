"""Compiled passes of rows through convolutions and ReLUs, a sample's rows at a time, dead neurons left out.

Most neurons of a certifiably trained network are dead over the box: their slopes are 0, and nothing that comes to them
goes on. Those that are not are listed once for all rows with the same window, and only they are visited; all that such
a group of rows needs stays in the first caches of a core.

``plan`` has a line per ReLU from the top and one for the input, with the columns named here in capitals. Kernels are
kept as (output channel, row, column · input channel), the last axis filled up with zeros to whole ``LANES``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

Array = Any
"""A numpy array; its element type is what numba compiles for."""

LANES = 8
TOGETHER = 3
"""Rows that meet an entry of a kernel while it is in a register: the nine of ten classes are three times as many."""
ROWS = 6 * TOGETHER
"""Rows of a group that go through the layers together."""

HEIGHT, WIDTH, CHANNELS, HIGH, WIDE, SIZE, BEGIN, TAPS, ACROSS, STRIDE_Y, STRIDE_X, PAD_Y, PAD_X, COLUMNS = range(14)
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


def _shuffled(builder: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _summed(builder: Any, total: Any) -> Any:
    """The sum of all lanes."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = (_shuffled(builder, total, list(range(at, at + lanes))) for at in (0, lanes))
        total = builder.fadd(low, high)
    return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))


def _fused(builder: Any, x: Any, y: Any, plus: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=("contract",)), plus, flags=("contract",))


@contextmanager
def _lines(builder: Any, memory: _Memory, jump: Any, jump_: Any, count: Any) -> Iterator[tuple[Any, Any]]:
    """A loop over the lanes of a kernel: where they are in it, and where the values that they meet are in a window."""
    zero, one = (ir.Constant(count.type, value) for value in (0, 1))
    with cgutils.for_range_slice(builder, zero, count, one, inc=True) as (number, _):
        yield memory.times(number, LANES), memory.scalar(jump, jump_, number)


def _scatter(count: int) -> Any:
    """An operation on ``count`` rows: every row's window gets a kernel times the row's factor."""

    @intrinsic  # type: ignore[untyped-decorator]
    def scattered(typing: Any, out: Any, o: Any, size: Any, factor: Any, f: Any, x: Any, i: Any,
                  jump: Any, lines: Any) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out_, o_, size_, factor_, f_, x_, i_, jump_, lines_ = args
            memory = _Memory(context, builder)
            factors = memory.spread(factor, factor_, f_, count)
            with _lines(builder, memory, jump, jump_, lines_) as (inner, outer):
                entries = memory.load(x, x_, builder.add(i_, inner))
                for r, own in enumerate(factors):
                    at = builder.add(builder.add(o_, memory.times(size_, r)), outer)
                    memory.store(out, out_, at, _fused(builder, own, entries, memory.load(out, out_, at)))
            return context.get_dummy_value()

        return types.void(out, o, size, factor, f, x, i, jump, lines), generate

    return scattered


def _gather(count: int) -> Any:
    """The derivatives of that: ``slope`` gets those in the factors, ``d_x`` those in the kernel."""

    @intrinsic  # type: ignore[untyped-decorator]
    def gathered(typing: Any, change: Any, o: Any, size: Any, factor: Any, slope: Any, f: Any, x: Any,
                 d_x: Any, i: Any, jump: Any, lines: Any) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            change_, o_, size_, factor_, slope_, f_, x_, d_, i_, jump_, lines_ = args
            memory = _Memory(context, builder)
            factors = memory.spread(factor, factor_, f_, count)
            zeros = ir.Constant(factors[0].type, [0.0] * LANES)
            sums = [cgutils.alloca_once(builder, zeros.type) for _ in range(count)]
            for total in sums:
                builder.store(zeros, total)
            with _lines(builder, memory, jump, jump_, lines_) as (inner, outer):
                here = builder.add(i_, inner)
                entries, weights = memory.load(x, x_, here), memory.load(d_x, d_, here)
                for r, own in enumerate(factors):
                    at = builder.add(builder.add(o_, memory.times(size_, r)), outer)
                    value = memory.load(change, change_, at)
                    builder.store(_fused(builder, value, entries, builder.load(sums[r])), sums[r])
                    weights = _fused(builder, own, value, weights)
                memory.store(d_x, d_, here, weights)
            for r, total in enumerate(sums):
                memory.set_scalar(slope, slope_, memory.plus(f_, r), _summed(builder, builder.load(total)))
            return context.get_dummy_value()

        return types.void(change, o, size, factor, slope, f, x, d_x, i, jump, lines), generate

    return gathered


class _Memory:
    """Reading and writing arrays, an entry or ``LANES`` of them at a time."""

    def __init__(self, context: Any, builder: Any) -> None:
        self._context = context
        self._builder = builder

    def _lanes(self, array: Any, value: Any, index: Any) -> Any:
        vector = ir.VectorType(self._context.get_value_type(array.dtype), LANES)
        return self._builder.bitcast(self._entry(array, value, index), vector.as_pointer())

    def load(self, array: Any, value: Any, index: Any) -> Any:
        return self._builder.load(self._lanes(array, value, index), align=self._align(array))

    def store(self, array: Any, value: Any, index: Any, entries: Any) -> None:
        self._builder.store(entries, self._lanes(array, value, index), align=self._align(array))

    def scalar(self, array: Any, value: Any, index: Any) -> Any:
        return self._builder.load(self._entry(array, value, index))

    def spread(self, array: Any, value: Any, first: Any, count: int) -> list[Any]:
        """``count`` entries from ``first`` on, each in all lanes of a vector."""
        vector = ir.VectorType(self._context.get_value_type(array.dtype), LANES)
        zero = ir.Constant(ir.IntType(32), 0)
        found = []
        for number in range(count):
            entry = self.scalar(array, value, self.plus(first, number))
            lane = self._builder.insert_element(ir.Constant(vector, ir.Undefined), entry, zero)
            found.append(_shuffled(self._builder, lane, [0] * LANES))
        return found

    def set_scalar(self, array: Any, value: Any, index: Any, entry: Any) -> None:
        self._builder.store(entry, self._entry(array, value, index))

    def plus(self, value: Any, number: int) -> Any:
        return self._builder.add(value, ir.Constant(value.type, number))

    def times(self, value: Any, number: int) -> Any:
        return self._builder.mul(value, ir.Constant(value.type, number))

    def _entry(self, array: Any, value: Any, index: Any) -> Any:
        data = self._context.make_array(array)(self._context, self._builder, value).data
        return self._builder.gep(data, [index])

    def _align(self, array: Any) -> int:
        size: int = self._context.get_abi_sizeof(self._context.get_value_type(array.dtype))
        return size


_scatter_1, _scatter_2, _scatter_3 = (_scatter(count) for count in range(1, TOGETHER + 1))
_gather_1, _gather_2, _gather_3 = (_gather(count) for count in range(1, TOGETHER + 1))


@_compiled
def _listed(plan: Array, k: int, full: bool, oy: int, ox: int, alpha: Array, excess: Array, place: Array) -> int:
    """Neurons of a window that are not dead: where in the window, which of the map, where what they hand on begins.

    Of neighbours in a line, whose kernels overlap, every ``apart``-th comes first: what was just written at another
    alignment would have to reach the cache before it can be read.
    """
    line, below = plan[k], plan[k + 1]
    width, channels, count = line[WIDTH], line[CHANNELS], 0
    shift, apart = line[STRIDE_X] * below[CHANNELS], 1
    while apart * shift % LANES:
        apart *= 2
    last = min(line[WIDE], width - ox)
    for first in range(max(0, -ox), min(last, max(0, -ox) + apart)):
        for y in range(max(0, -oy), min(line[HIGH], line[HEIGHT] - oy)):
            for x in range(first, last, apart):
                ty, tx = (y + oy if full else y) * line[STRIDE_Y], (x + ox if full else x) * line[STRIDE_X]
                target = (ty * below[WIDE] + tx) * below[CHANNELS]
                neuron, position = ((y + oy) * width + x + ox) * channels, (y * line[WIDE] + x) * channels
                for c in range(channels):
                    # Written in any case: a branch would be mispredicted too often.
                    place[0, count], place[1, count], place[2, count] = position + c, neuron + c, target
                    count += (alpha[neuron + c] != 0) | (excess[neuron + c] != 0)
    return count


@_compiled
def _jumps(plan: Array) -> Array:
    """By ReLU: where the lanes of a kernel meet the window below, from the place where the kernel begins."""
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
    plan: Array, k: int, rows: int, count: int, place: Array, jump: Array, buffer: Array, total: Array, factor: Array,
    alpha: Array, excess: Array, offset: Array, weight: Array, bias: Array,
) -> None:  # fmt: skip
    """Coefficients of a ReLU's output as those of the convolution's input below it, and the constants that rows get."""
    line, below = plan[k], plan[k + 1]
    entries, size = line[TAPS] * line[ACROSS], below[SIZE]
    lines = entries // LANES
    zero = buffer.dtype.type(0)
    for j in range(count):
        neuron = place[1, j]
        channel = neuron % line[CHANNELS]
        a, e, shift, b = alpha[neuron], excess[neuron], offset[neuron], bias[channel]
        for r in range(rows):
            value = buffer[line[BEGIN] + r * line[SIZE] + place[0, j]]
            low = value if value < zero else zero
            factor[r] = a * value + low * e
            total[r] += low * shift + factor[r] * b
        o, i, r = below[BEGIN] + place[2, j], channel * entries, 0
        while r + 3 <= rows:
            _scatter_3(buffer, o + r * size, size, factor, r, weight, i, jump, lines)
            r += 3
        if r + 2 == rows:
            _scatter_2(buffer, o + r * size, size, factor, r, weight, i, jump, lines)
        elif r + 1 == rows:
            _scatter_1(buffer, o + r * size, size, factor, r, weight, i, jump, lines)


@_compiled
def _up(
    plan: Array, k: int, rows: int, count: int, place: Array, jump: Array, buffer: Array, change: Array, down: Array,
    factor: Array, slope: Array, alpha: Array, excess: Array, offset: Array, weight: Array, bias: Array,
    d_excess: Array, d_offset: Array, d_weight: Array, d_bias: Array,
) -> None:  # fmt: skip
    """Derivatives in what ``_down`` took: ``change`` has those in coefficients, ``down`` those in rows' constants."""
    line, below = plan[k], plan[k + 1]
    entries, size = line[TAPS] * line[ACROSS], below[SIZE]
    lines = entries // LANES
    zero = buffer.dtype.type(0)
    for j in range(count):
        neuron = place[1, j]
        channel = neuron % line[CHANNELS]
        a, e, shift, b = alpha[neuron], excess[neuron], offset[neuron], bias[channel]
        for r in range(rows):
            value = buffer[line[BEGIN] + r * line[SIZE] + place[0, j]]
            factor[r] = a * value + (value if value < zero else zero) * e
        o, i, r = below[BEGIN] + place[2, j], channel * entries, 0
        while r + 3 <= rows:
            _gather_3(change, o + r * size, size, factor, slope, r, weight, d_weight, i, jump, lines)
            r += 3
        if r + 2 == rows:
            _gather_2(change, o + r * size, size, factor, slope, r, weight, d_weight, i, jump, lines)
        elif r + 1 == rows:
            _gather_1(change, o + r * size, size, factor, slope, r, weight, d_weight, i, jump, lines)
        for r in range(rows):
            at = line[BEGIN] + r * line[SIZE] + place[0, j]
            value, own, new = buffer[at], down[r], slope[r] + down[r] * b
            d_bias[channel] += factor[r] * own
            change[at] = a * new
            if value < zero:
                change[at] += e * new + own * shift
                d_excess[neuron] += new * value
                d_offset[neuron] += own * value


@partial(_compiled, reordered=True)
def _minimum(value: Array, center: Array, radius: Array) -> Any:
    """The minimum of coefficients over a box."""
    total = value.dtype.type(0)
    for i in range(len(value)):
        total += value[i] * center[i] - abs(value[i]) * radius[i]
    return total


@_compiled
def _minimum_up(value: Array, center: Array, radius: Array, down: float, change: Array) -> None:
    """The derivatives of that in the coefficients."""
    for i in range(len(value)):
        low = down * (center[i] + radius[i]) if value[i] < 0 else down * center[i]
        change[i] = down * (center[i] - radius[i]) if value[i] > 0 else low


@_compiled
def _ends(
    line: Array, oy: int, ox: int, rows: int, buffer: Array, center: Array, radius: Array, total: Array,
    change: Array, down: Array, differentiate: bool,
) -> None:  # fmt: skip
    """The minimum of rows over the box is added to ``total``; or its derivatives in coefficients are ``change``."""
    channels = line[CHANNELS]
    first, last = max(0, -ox), min(line[WIDE], line[WIDTH] - ox)
    length = (last - first) * channels
    for y in range(max(0, -oy), min(line[HIGH], line[HEIGHT] - oy)):
        pixel = ((y + oy) * line[WIDTH] + first + ox) * channels
        middle, spread = center[pixel : pixel + length], radius[pixel : pixel + length]
        for r in range(rows):
            at = line[BEGIN] + r * line[SIZE] + (y * line[WIDE] + first) * channels
            if differentiate:
                _minimum_up(buffer[at : at + length], middle, spread, down[r], change[at : at + length])
            else:
                total[r] += _minimum(buffer[at : at + length], middle, spread)


@_compiled
def lower_bounds(
    plan: Array, full: bool, values: Array, first: Array, sample: Array, places: Array, batch: int,
    alpha: Any, excess: Any, offset: Any, weight: Any, bias: Any, center: Array, radius: Array,
    bounds: Array, differentiate: bool, d_values: Array, d_excess: Any, d_offset: Any,
    d_weight: Any, d_bias: Any, start: int, stop: int,
) -> None:  # fmt: skip
    """The bounds of rows in groups ``start`` to ``stop``; with ``differentiate`` all derivatives, from those in bounds.

    Rows ``first[g]`` to ``first[g + 1]`` of ``values`` see the box of ``sample[g]`` from pixel ``places[g]`` on, or
    all of it where rows are ``full``. Samples of a population are counted through, ``batch`` of each member.
    """
    levels = len(plan) - 1
    length = plan[levels, BEGIN] + ROWS * plan[levels, SIZE]
    buffer, change = np.zeros(length, values.dtype), np.zeros(length if differentiate else 0, values.dtype)
    total, factor, slope = np.zeros((3, ROWS), values.dtype)
    counts = np.zeros(levels, np.int64)
    windows = plan[:levels, HIGH] * plan[:levels, WIDE] * plan[:levels, CHANNELS]
    place = np.empty((levels, 3, windows.max() + 1), np.int32)
    jump = _jumps(plan)
    origin = np.zeros((levels + 1, 2), np.int64)
    width = values.shape[1]
    for g in range(start, stop):
        s = sample[g]
        member = s // batch
        origin[0] = places[g]
        for k in range(levels):
            oy, ox = origin[k]
            counts[k] = _listed(plan, k, full, oy, ox, alpha[k][s], excess[k][s], place[k])
            origin[k + 1, 0] = (0 if full else oy * plan[k, STRIDE_Y]) - plan[k, PAD_Y]
            origin[k + 1, 1] = (0 if full else ox * plan[k, STRIDE_X]) - plan[k, PAD_X]
        bottom = plan[levels]
        for begin in range(first[g], first[g + 1], ROWS):
            rows = min(ROWS, first[g + 1] - begin)
            total[:] = 0
            for r in range(rows):
                at = plan[0, BEGIN] + r * plan[0, SIZE]
                buffer[at : at + width] = values[begin + r]
            for k in range(levels):
                buffer[plan[k + 1, BEGIN] : plan[k + 1, BEGIN] + rows * plan[k + 1, SIZE]] = 0
                _down(plan, k, rows, counts[k], place[k], jump[k], buffer, total, factor,
                      alpha[k][s], excess[k][s], offset[k][s], weight[k][member], bias[k][member])  # fmt: skip
            own, box = bounds[begin : begin + rows], s % batch
            oy, ox = origin[levels]
            if differentiate:
                for k in range(levels + 1):
                    change[plan[k, BEGIN] : plan[k, BEGIN] + rows * plan[k, SIZE]] = 0
            _ends(bottom, oy, ox, rows, buffer, center[box], radius[box], total, change, own, differentiate)
            if not differentiate:
                own[:] = total[:rows]
                continue
            for k in range(levels - 1, -1, -1):
                _up(plan, k, rows, counts[k], place[k], jump[k], buffer, change, own, factor, slope,
                    alpha[k][s], excess[k][s], offset[k][s], weight[k][member], bias[k][member],
                    d_excess[k][s], d_offset[k][s], d_weight[k][member], d_bias[k][member])  # fmt: skip
            for r in range(rows):
                at = plan[0, BEGIN] + r * plan[0, SIZE]
                d_values[begin + r] = change[at : at + width]

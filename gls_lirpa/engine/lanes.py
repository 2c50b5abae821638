"""Products of one to three rows with a kernel, eight numbers at a time, as operations for numba.

Vectors are written by hand, because LLVM does not find them in loops over arrays that might overlap. numba does not
see when this file changes: remove the compiled files of ``row_kernels`` from ``__pycache__`` then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8


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


scatter_1, scatter_2, scatter_3 = (_scatter(count) for count in (1, 2, 3))
gather_1, gather_2, gather_3 = (_gather(count) for count in (1, 2, 3))

"""The matrices of affine operations, found by applying them to unit vectors.

Transpose, Slice, Split, Concat, products with constants of any shape and their like are all x ↦ W x + b over
the numbers of a sample. In float64 the columns W e_i = f(e_i) − f(0) of operations that only move numbers are
exact, those of the others to its rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gls_lirpa.errors import UnsupportedLayerError

MAX_ENTRIES = 2**26
"""Of one matrix: 512 MiB in float64."""

Operation = Callable[..., Tensor]


def affine_form(operation: Operation, shapes: Sequence[Sequence[int]]) -> tuple[list[Tensor], Tensor]:
    """A matrix per input and the offset, of an operation that is affine in all its inputs together.

    >>> matrices, offset = affine_form(lambda x: x.t().flatten() + 1, [(2, 2)])
    >>> matrices[0].tolist(), offset.tolist()
    ([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]], [1.0, 1.0, 1.0, 1.0])
    """
    zeros = [torch.zeros(tuple(shape), dtype=torch.float64) for shape in shapes]
    offset = operation(*zeros).flatten()
    matrices = []
    for i, zero in enumerate(zeros):
        if zero.numel() * max(len(offset), 1) > MAX_ENTRIES:
            raise UnsupportedLayerError(
                f"an affine operation of {zero.numel()} inputs and {len(offset)} outputs is too large to be rebuilt"
            )
        matrix = torch.empty(len(offset), zero.numel(), dtype=torch.float64)
        for j in range(zero.numel()):
            unit = torch.zeros_like(zero).flatten()
            unit[j] = 1.0
            arguments = [*zeros[:i], unit.reshape(zero.shape), *zeros[i + 1 :]]
            matrix[:, j] = operation(*arguments).flatten() - offset
        matrices.append(matrix)
    _check(operation, zeros, matrices, offset)
    return matrices, offset


def _check(operation: Operation, zeros: list[Tensor], matrices: list[Tensor], offset: Tensor) -> None:
    """At a point drawn at random: an operation that is not affine differs there almost surely."""
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(zero.shape, generator=generator, dtype=torch.float64) for zero in zeros]
    expected = operation(*points).flatten()
    found = offset.clone()
    for matrix, point in zip(matrices, points, strict=True):
        found += matrix @ point.flatten()
    if not torch.allclose(found, expected, rtol=1e-9, atol=1e-9 * (1 + float(expected.abs().max()))):
        raise UnsupportedLayerError("an operation that was expected to be affine is not")


def as_selection(matrix: Tensor) -> bool:
    """Whether a matrix leaves every number where it is.

    >>> as_selection(torch.eye(3)), as_selection(torch.ones(1, 1) * 2)
    (True, False)
    """
    return matrix.shape[0] == matrix.shape[1] and bool((matrix == torch.eye(len(matrix), dtype=matrix.dtype)).all())

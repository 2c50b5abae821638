"""CROWN with the linear functions behind its bounds: A x + b ≤ spec · f(x) for every x of a box."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.engine.batchnorm import Statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.modules import read_bounds
from gls_lirpa.engine.relaxation import Relaxation
from gls_lirpa.engine.wrap import bounded_input


@dataclass(frozen=True)
class LinearBounds:
    """``bounds`` of the rows; where they are known, ``matrix`` (batch, rows, inputs), ``offset`` (batch, rows)."""

    bounds: Bounds
    matrix: Tensor | None
    offset: Tensor | None


def linear_bounds(engine: BoundEngine, box: Box, spec: Tensor) -> LinearBounds:
    """CROWN bounds of ``spec`` · f and the linear functions whose minima over the boxes they are.

    The functions are left out where auto_LiRPA keeps them as patches of images, and for networks that
    begin with a normalisation, whose coordinates are not those of the box.

    >>> from torch import nn
    >>> engine = BoundEngine(nn.Linear(2, 2), torch.zeros(1, 2))
    >>> found = linear_bounds(engine, Box(torch.zeros(3, 2), torch.ones(3, 2)), torch.eye(2).expand(3, 2, 2))
    >>> found.matrix is not None and torch.allclose(found.matrix[0], engine.model.weight)
    True
    """
    parts: list[tuple[Tensor, Tensor] | None] = []

    def bound(own: BoundEngine, box: Box, spec: Tensor, statistics: Statistics) -> Bounds:
        with own._module("linear", len(box), statistics) as bounded:
            output, start = bounded.output_name[0], bounded.input_name[0]
            lower, _, functions = bounded.compute_bounds(
                x=(bounded_input(own.normalized_box(box)),),
                C=spec,
                method="CROWN",
                bound_upper=False,
                return_A=True,
                needed_A_dict={output: [start]},
            )
            found = functions[output][start]
            matrix, offset = found["lA"], found["lbias"]
            known = isinstance(matrix, Tensor) and isinstance(offset, Tensor) and own.normalize is None
            parts.append((matrix.flatten(2), offset) if known else None)
            return read_bounds(bounded, lower)

    relaxation = Relaxation("crown", bound)
    with torch.no_grad():
        if len(box) > 1:
            engine.chunk_size(relaxation, box, spec, {})  # so that no measurement is among the parts
        parts.clear()
        bounds = engine.bounds(box, spec, relaxation)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return LinearBounds(bounds, None, None)
    return LinearBounds(bounds, torch.cat([matrix for matrix, _ in known]), torch.cat([offset for _, offset in known]))

"""Margins of many networks that differ by their weights alone, several of them in one pass.

Nothing is copied but the weights in row form. Where networks have no such form, one at a time is all there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Box
from gls_lirpa.engine.memory import budget
from gls_lirpa.engine.relaxation import BoundFunction, ByRows, Relaxation
from gls_lirpa.engine.row_members import stacked
from gls_lirpa.engine.row_network import RowNetwork, Tensors

if TYPE_CHECKING:
    from gls_lirpa.engine.bounds import BoundEngine

MAPS = 10
"""Tensors of all layers' values that are alive at a time: intervals, slopes and what they are made of."""


def by_rows(engine: BoundEngine, relaxation: Relaxation) -> BoundFunction | None:
    """How several networks of this engine go through one pass; None where they cannot."""
    bound: Any = relaxation.bound
    options: dict[str, Any] = {}
    if isinstance(bound, partial) and not bound.args:
        bound, options = bound.func, bound.keywords
    if isinstance(bound, ByRows) and engine.route()[0] == "rows":
        return partial(bound.rows, **options)
    return None


def at_once(network: RowNetwork, box: Box, rows: int, chunk_mib: int | None) -> int:
    """How many members fit the memory budget, from shapes alone, so that every process finds the same."""
    sizes = [layer.size for layer in network.layers.values()]
    sample = box.lower.element_size() * (MAPS * sum(sizes))
    final = box.lower.element_size() * 4 * rows * max(sizes)
    return int((budget(box.lower.device, chunk_mib) / len(box) - final) / sample)


def margins(
    network: RowNetwork, bound: BoundFunction, box: Box, spec: Tensor, members: Iterable[Tensors], size: int
) -> Tensor:
    """Lower bounds of the rows of ``spec`` for every member: (members, batch, rows)."""
    found = []
    for part in _parts(members, size):
        lower = bound(network, stacked(part), box, spec).lower
        found.append(lower.view(len(part), *spec.shape[:2]))
    return torch.cat(found)


def _parts(members: Iterable[Tensors], size: int) -> Iterator[list[Tensors]]:
    iterator = iter(members)
    while part := list(islice(iterator, size)):
        yield part

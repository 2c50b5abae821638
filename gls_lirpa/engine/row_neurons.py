"""Rows of single neurons: lower and upper bounds of (sample, neuron) pairs, in parts that fit the caches.

No graph is kept. The gradient comes from computing the rows again, and only those that have one: a neuron that its
bounds made stable has none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gls_lirpa.engine.row_compiled import compiled_chain
from gls_lirpa.engine.row_members import count as members
from gls_lirpa.engine.row_network import Layer, Pair, RowNetwork, Tensors
from gls_lirpa.engine.row_patches import Patch, Rows
from gls_lirpa.engine.row_walk import Relaxed, lower_bounds, made

PART_VALUES = 2**20
"""Coefficients that the rows of one pass may have at one layer: 4 MiB in float32, which was the fastest of 2 to 16 on
a CPU with 2 MiB of cache per core."""

BEGUN_VALUES = 2**22
"""The same where kernels take the rows on, which need memory for their beginnings alone."""

Index = tuple[Tensor, ...]
"""Sample, row, column and channel of neurons."""


class Prepared:
    """What the parts of one list of rows have in common, made by the first of them.

    With gradients each thing is cut off from what it was made of, so that every part's backward pass ends at it;
    ``gradients`` goes the rest of the way once.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._sums: dict[Hashable, Tensor] = {}

    def __call__(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._made:
            source = make()
            self._made[key] = source, source.detach().requires_grad_(source.requires_grad)
        return self._made[key][1]

    def collect(self, bounds: Tensor, gradient: Tensor) -> None:
        """Add the gradients of one part."""
        wanted = {key: leaf for key, (_, leaf) in self._made.items() if leaf.requires_grad}
        found = torch.autograd.grad(bounds, list(wanted.values()), gradient, allow_unused=True)
        for key, new in zip(wanted, found, strict=True):
            if new is not None:
                self._sums[key] = self._sums[key].add_(new) if key in self._sums else new

    def gradients(self, leaves: list[Tensor]) -> list[Tensor | None]:
        sources = [self._made[key][0] for key in self._sums]
        if not sources:
            return [None] * len(leaves)
        return list(torch.autograd.grad(sources, leaves, list(self._sums.values()), allow_unused=True))


class NeuronRows:
    """The bounds of one layer's neurons as a function of the tensors that they depend on."""

    def __init__(self, network: RowNetwork, layer: Layer, tensors: Tensors) -> None:
        self._network = network
        self._layer = layer
        self._names = network.ancestors(layer)
        self.full, self.largest = extent(network, layer)
        self._shifted = {name: pair[1] is not None for name, pair in tensors.items()}

    def leaves(self, over: Relaxed) -> list[Tensor]:
        """The tensors that bounds depend on."""
        # Without what has a graph: later slopes lead back to the bounds that are computed here.
        self._like = replace(over, tensors={}, slopes={}, center=over.center.detach(), radius=over.radius.detach())
        self._members, self._batch = members(over.tensors), len(over.center)
        found = [over.center, over.radius]
        for name in self._names:
            found += [tensor for tensor in over.tensors.get(name, ()) if tensor is not None]
            found += over.slopes.get(name, ())
        return found

    def _over(self, over_leaves: list[Tensor], prepared: Prepared, *, valued: bool = True) -> Relaxed:
        center, radius, *rest = over_leaves
        tensors, slopes = {}, {}
        for name in self._names:
            kind = self._network.layers[name].kind
            if kind == "relu":
                slopes[name] = rest[0], rest[1], rest[2]
                rest = rest[3:]
            elif kind in ("conv", "dense", "scale"):
                shifted = self._shifted[name]
                tensors[name] = rest[0], rest[1] if shifted else None
                rest = rest[1 + shifted :]
        boxes = prepared if self._like.prepared_boxes is made else self._like.prepared_boxes
        over = replace(self._like, tensors=tensors, slopes=slopes, center=center, radius=radius, valued=valued)
        return replace(over, prepared=prepared, prepared_boxes=boxes)

    def parts(self, index: Index) -> list[Index]:
        below = self._layer.inputs[0]
        if compiled_chain(self._like, below) is not None:
            return self._split(index, BEGUN_VALUES // (2 * self._network.layers[below].size))
        return self._split(index, PART_VALUES // (2 * self.largest))

    @staticmethod
    def _split(index: Index, size: int) -> list[Index]:
        return list(zip(*(torch.split(axis, max(1, size)) for axis in index), strict=True))

    def __call__(self, index: Index, leaves: list[Tensor], prepared: Prepared, *, valued: bool = True) -> Tensor:
        """Lower bounds of neurons and of their negatives: (neurons, 2)."""
        over = self._over(leaves, prepared, valued=valued)
        sample, row, column, channel = index
        layer = self._layer
        if layer.kind == "dense":
            return self._begun(over, sample, channel, None)
        if layer.kind == "conv" and compiled_chain(over, layer.inputs[0]) is not None:
            return self._begun(over, sample, channel, (row, column))
        height, width, channels = layer.shape
        count, dtype, device = len(sample), over.center.dtype, over.center.device
        every = torch.arange(count, device=device)
        if self.full:
            units = torch.zeros(count, height, width, channels, dtype=dtype, device=device)
            units[every, row, column, channel] = 1
            return lower_bounds(over, layer.name, Patch(signed(units), (0, 0), (0, 0)), self._rows(sample))
        units = torch.zeros(count, 1, 1, channels, dtype=dtype, device=device)
        units[every, 0, 0, channel] = 1
        rows = self._rows(sample, (row, column), (height, width))
        return lower_bounds(over, layer.name, Patch(signed(units), (1, 1), (0, 0)), rows)

    def _rows(self, sample: Tensor, place: tuple[Tensor, Tensor] | None = None, places: Pair = (1, 1)) -> Rows:
        return Rows(sample, place, places, self._members, self._batch)

    def _begun(self, over: Relaxed, sample: Tensor, channel: Tensor, place: tuple[Tensor, Tensor] | None) -> Tensor:
        """The coefficients of a neuron are a row of a dense layer's matrix, or a channel's kernel at its ``place``."""
        layer = self._layer
        weight, offset = over.tensors[layer.name]
        below = self._network.layers[layer.inputs[0]]
        if self._members > 1:
            channel = channel + sample // self._batch * layer.shape[2]
        if place is None:
            weight = over.prepared((layer.name, "rows"), lambda: weight.reshape(-1, *below.shape))
            rows, step, begin = self._rows(sample), (0, 0), (0, 0)
        else:
            weight = over.prepared((layer.name, "rows"), lambda: weight.permute(0, 1, 3, 4, 2).flatten(0, 1))
            rows, step = self._rows(sample, place, layer.shape[:2]), layer.stride
            begin = (-layer.padding[0], -layer.padding[1])
        bounds = lower_bounds(over, below.name, Patch(signed(weight.index_select(0, channel)), step, begin), rows)
        if offset is None:
            return bounds
        shift = over.prepared((layer.name, "shift"), lambda: offset.flatten())
        return bounds + signed(shift.index_select(0, channel))


def signed(value: Tensor) -> Tensor:
    """Rows and their negatives, side by side."""
    return torch.stack([value, -value], dim=1)


def extent(network: RowNetwork, layer: Layer) -> tuple[bool, int]:
    """Whether rows of this layer's neurons are better kept as whole maps than as patches, and the largest map."""
    sizes = {layer.name: (1, 1)}
    patches, maps = [0], [0]
    for name in reversed(network.ancestors(layer)):
        current, (height, width) = network.layers[name], sizes[name]
        patches.append(height * width * current.shape[2])
        maps.append(current.size)
        if current.kind == "conv":
            height = (-(-current.kernel[0] // current.stride[0]) + height - 1) * current.stride[0]
            width = (-(-current.kernel[1] // current.stride[1]) + width - 1) * current.stride[1]
        for below in current.inputs:
            old = sizes.get(below, (0, 0))
            sizes[below] = max(old[0], height), max(old[1], width)
    full = layer.shape[:2] == (1, 1) or sum(patches) >= sum(maps)
    return full, max(maps[1:] if full else patches)


def bounds(job: NeuronRows, index: Index, over: Relaxed) -> Tensor:
    """``job`` on ``index`` with the gradient of every leaf that wants one."""
    leaves = job.leaves(over)
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        found: Tensor = _Recomputed.apply(job, index, *leaves)  # type: ignore[no-untyped-call]
        return found
    prepared = Prepared()
    return torch.cat([job(part, leaves, prepared) for part in job.parts(index)])


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: NeuronRows, index: Index, *leaves: Tensor) -> Tensor:
        ctx.job, ctx.index = job, index
        ctx.save_for_backward(*leaves)
        prepared = Prepared()
        return torch.cat([job(part, list(leaves), prepared) for part in job.parts(index)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows = (gradient != 0).flatten(1).any(1).nonzero().squeeze(1)
        gradient = gradient[rows]
        wanted = list(ctx.needs_input_grad[2:])
        leaves = [leaf.detach().requires_grad_(needed) for leaf, needed in zip(ctx.saved_tensors, wanted, strict=True)]
        prepared, start = Prepared(), 0
        with torch.enable_grad():
            for part in ctx.job.parts(tuple(axis[rows] for axis in ctx.index)) if len(rows) else ():
                bounds = ctx.job(part, leaves, prepared, valued=False)
                prepared.collect(bounds, gradient[start : start + len(bounds)])
                start += len(bounds)
        found = iter(prepared.gradients([leaf for leaf in leaves if leaf.requires_grad]))
        return None, None, *(next(found) if needed else None for needed in wanted)

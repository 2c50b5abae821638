"""One pass of rows back through a network: from coefficients of a layer's values to a lower bound over the box."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.engine.row_compiled import chain_bounds, compiled_chain
from gls_lirpa.engine.row_members import dots, times
from gls_lirpa.engine.row_network import Layer, RowNetwork, Tensors
from gls_lirpa.engine.row_patches import (
    Patch,
    Rows,
    Window,
    below_patch,
    by_cells,
    fills,
    is_aligned,
    is_matrix,
    matrix,
    phases,
    plain,
    transposed,
)
from gls_lirpa.engine.row_relaxation import Slopes, concretized, relaxed
from gls_lirpa.errors import UnsupportedLayerError


def made(key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """Nothing is kept."""
    del key
    return make()


@dataclass(frozen=True)
class Relaxed:
    """A network over boxes, every ReLU replaced by two lines: the weights, the slopes by ReLU, the boxes' centres
    and radii (batch, height, width, channels).

    ``prepared(key, make)`` gives what several passes have in common: weights and maps in the form they need;
    ``prepared_boxes`` the same for boxes, which members of a population have in common too.
    ``row_slopes`` are lower slopes of some ReLUs for every row of a specification: (batch, rows, *map). ReLUs in
    ``sparse`` have few unstable neurons, those in ``crowded`` many channels and few dead neurons. Not ``valued``:
    bounds are wanted for their derivatives alone, and may be anything themselves.
    """

    network: RowNetwork
    tensors: Tensors
    slopes: Mapping[str, Slopes]
    center: Tensor
    radius: Tensor
    prepared: Callable[[Hashable, Callable[[], Tensor]], Tensor] = made
    prepared_boxes: Callable[[Hashable, Callable[[], Tensor]], Tensor] = made
    row_slopes: Mapping[str, Tensor] = field(default_factory=dict)
    sparse: frozenset[str] = frozenset()
    crowded: frozenset[str] = frozenset()
    valued: bool = True


def lower_bounds(relaxed_network: Relaxed, start: str, patch: Patch, rows: Rows) -> Tensor:
    """Lower bounds over the boxes of rows given by their coefficients at the layer ``start``: (·, ·)."""
    return _Walk(relaxed_network, rows).run(start, patch)


class _Walk:
    def __init__(self, relaxed_network: Relaxed, rows: Rows) -> None:
        self._over = relaxed_network
        self._network = relaxed_network.network
        self._rows = rows
        self._pending: dict[str, Patch] = {}
        self._total: Tensor | None = None

    def run(self, start: str, patch: Patch) -> Tensor:
        self._pending[start] = patch
        for layer in reversed(self._network.layers.values()):
            found = self._pending.pop(layer.name, None)
            if found is not None:
                self._step(layer, found)
        if self._total is None:
            raise UnsupportedLayerError(f"layer {start!r} does not depend on the input")
        return self._total

    def _step(self, layer: Layer, patch: Patch) -> None:
        values = patch.values.flatten(2)
        if layer.kind == "input":
            window = Window(patch, self._rows.over("sample"))
            center, radius = self._seen(layer, window, (self._over.center, self._over.radius), what="box")
            self._add(concretized(values, center, radius))
        elif (chain := compiled_chain(self._over, layer.name)) is not None:
            self._add(chain_bounds(self._over, chain, patch, self._rows))
        elif layer.kind == "relu":
            new, constant = self._relaxed(layer, patch)
            self._add(constant)
            self._pass(layer.inputs[0], _with_values(patch, new))
        elif layer.kind == "sum":
            for name, sign in zip(layer.inputs, layer.node.signs, strict=True):
                self._pass(name, patch if sign > 0 else replace(patch, values=-patch.values))
        elif layer.kind == "scale":
            weight, shift = self._over.tensors[layer.name]
            maps = [value for value in (weight, shift) if value is not None]
            factor, *rest = self._seen(layer, Window(patch, self._rows.over("member")), maps)
            for offset in rest:
                self._add((values * offset).sum(2))
            self._pass(layer.inputs[0], _with_values(patch, values * factor))
        else:
            self._affine(layer, patch)

    def _relaxed(self, layer: Layer, patch: Patch) -> tuple[Tensor, Tensor]:
        slopes = self._over.slopes[layer.name]
        values, window = patch.values.flatten(2), Window(patch, self._rows)
        alpha, excess, offset = self._seen(layer, window, slopes)
        chosen = self._over.row_slopes.get(layer.name)
        if chosen is not None:
            own = window.laid_out(chosen.flatten(0, 1)).view(*chosen.shape[:2], -1)
            return relaxed(values, (own, excess + alpha - own, offset))
        if layer.name not in self._over.sparse or len(values) < len(alpha):
            return relaxed(values, (alpha, excess, offset))
        key = (layer.name, "map", 2, *window.key)
        with torch.no_grad():
            unstable = window.nonzero(self._over.prepared(key, partial(window.laid_out, slopes[2])))
        return relaxed(values, (alpha, excess, offset), unstable)

    def _affine(self, layer: Layer, patch: Patch) -> None:
        weight, offset = self._over.tensors[layer.name]
        below = self._network.layers[layer.inputs[0]]
        values = patch.values.flatten(2)
        if offset is not None:
            repeats = values.shape[2] // offset.shape[1]
            key: Hashable = (layer.name, "offset", repeats)
            shift = self._over.prepared(key, lambda: offset.repeat(1, repeats))
            self._add(dots(values, shift, self._rows.sections))
        if layer.kind == "dense":
            weight = self._over.prepared((layer.name, "matrix"), lambda: weight.view_as(weight))
            result = times(values, weight, self._rows.sections).view(*values.shape[:2], *below.shape)
            self._pass(below.name, Patch(result, (0, 0), (0, 0)))
        elif is_matrix(patch, layer, below, values.shape[0] * values.shape[1] // len(weight)):
            key = (layer.name, "matrix", patch.grid, patch.phase)
            form = self._over.prepared(key, lambda: matrix(patch, weight, layer, below))
            product = times(values, form, self._rows.sections)
            geometry, _ = below_patch(patch, layer, below)
            self._pass(below.name, replace(geometry, values=product.view(geometry.values.shape)), beyond=True)
        else:
            aligned = is_aligned(patch, layer, below)
            key = (layer.name, "phases", aligned, patch.phase)
            if patch.full:
                patch, weight, layer = by_cells(patch, weight, layer, below)
            else:
                patch = plain(patch, layer)
            kernel = self._over.prepared(key, lambda: phases(weight, layer, aligned=aligned))
            self._pass(below.name, transposed(patch, kernel, layer, below, self._rows), beyond=True)

    def _pass(self, name: str, patch: Patch, *, beyond: bool = False) -> None:
        """Hand coefficients on. Behind a transposed convolution some may lie ``beyond`` the map, where the padding
        is 0: ReLUs and inputs have no value there, elsewhere they are dropped."""
        layer, other = self._network.layers[name], self._pending.get(name)
        if self._network.consumers[name] > 1 or layer.kind == "sum":
            patch = plain(patch, layer)
        if beyond and not patch.full and layer.kind not in ("relu", "input"):
            ones = torch.ones(1, *layer.shape, dtype=patch.values.dtype, device=patch.values.device)
            (inside,) = self._seen(layer, Window(patch, self._rows), (ones,), what="inside")
            patch = _with_values(patch, patch.values.flatten(2) * inside)
        elif beyond and patch.full and (layer.kind not in ("relu", "input") or not fills(patch, layer)):
            patch = plain(patch, layer)
        self._pending[name] = patch if other is None else _merged(other, patch)

    def _seen(self, layer: Layer, window: Window, maps: Sequence[Tensor], what: str = "map") -> list[Tensor]:
        """Maps of the layer's values as the rows' patches see them."""
        prepared = self._over.prepared_boxes if what == "box" else self._over.prepared
        found = []
        for number, value in enumerate(maps):
            key = (layer.name, what, number, *window.key)
            found.append(window.seen(prepared(key, partial(window.laid_out, value))))
        return found

    def _add(self, constant: Tensor) -> None:
        self._total = constant if self._total is None else self._total + constant


def _with_values(patch: Patch, values: Tensor) -> Patch:
    """Other coefficients (·, ·, values) at the same pixels. Rows that all groups had in common may now differ."""
    return replace(patch, values=values.view(*values.shape[:2], *patch.values.shape[2:]))


def _merged(first: Patch, second: Patch) -> Patch:
    """The sum of two patches without phases of the same rows."""
    if first.step != second.step:
        raise UnsupportedLayerError("branches of different strides meet: no row form")
    begin = [min(first.offset[a], second.offset[a]) for a in (0, 1)]
    end = [max(p.offset[a] + p.grid[a] for p in (first, second)) for a in (0, 1)]
    total = [F.pad(p.values, (0, 0, *_sides(p, 1, begin, end), *_sides(p, 0, begin, end))) for p in (first, second)]
    return Patch(total[0] + total[1], first.step, (begin[0], begin[1]))


def _sides(patch: Patch, axis: int, begin: list[int], end: list[int]) -> tuple[int, int]:
    return patch.offset[axis] - begin[axis], end[axis] - patch.offset[axis] - patch.grid[axis]

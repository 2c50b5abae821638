"""Rows of all neurons of a place: where most neurons are unstable.

Neurons at one place of a convolution see the same window of the layers below, and those of a dense layer the whole
of them: slopes and inputs are laid out once for all rows of the place, and the rows' coefficients, up to the first
ReLU, once for all places. Rows of the few stable neurons among them are computed for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gls_lirpa.engine.row_network import Layer, RowNetwork, Tensors
from gls_lirpa.engine.row_neurons import PART_VALUES, Index, NeuronRows, Prepared, extent, signed
from gls_lirpa.engine.row_patches import Patch
from gls_lirpa.engine.row_walk import Relaxed, lower_bounds

UNSTABLE_SHARE = 0.5
"""Share of unstable neurons, at places that have any, from which on all rows of a place are computed."""


class ByPlaces(NamedTuple):
    """Neurons as some of those of ``places``: by neuron its place and its number there; ``jobs`` bound all."""

    places: Index
    jobs: list[PlaceRows]
    place: Tensor
    neuron: Tensor


def by_places(network: RowNetwork, layer: Layer, tensors: Tensors, index: Index) -> ByPlaces | None:
    """Neurons (sample, row, column, channel), in ascending order, by places; None where too few of those have rows.

    A place is a pixel of a convolution's map, or a sample where rows are whole maps.
    """
    full, largest = extent(network, layer)
    (height, width, channels), (sample, row, column, neuron) = layer.shape, index
    number, size = sample, channels
    if full:
        neuron, size = (row * width + column) * channels + neuron, layer.size
    else:
        number = (sample * height + row) * width + column
    found, place = torch.unique_consecutive(number, return_inverse=True)
    if len(sample) < UNSTABLE_SHARE * len(found) * size:
        return None
    places = (found,) if full else (found // (height * width), found // width % height, found % width)
    step = max(1, PART_VALUES // (2 * largest))
    slices = [slice(first, min(first + step, size)) for first in range(0, size, step)]
    return ByPlaces(places, [PlaceRows(network, layer, tensors, part) for part in slices], place, neuron)


class PlaceRows(NeuronRows):
    """The bounds of some neurons at each of several places, the same at all: those of ``channels``."""

    def __init__(self, network: RowNetwork, layer: Layer, tensors: Tensors, channels: slice) -> None:
        super().__init__(network, layer, tensors)
        self._channels = channels

    def parts(self, index: Index) -> list[Index]:
        rows = 2 * (self._channels.stop - self._channels.start)
        return self._split(index, PART_VALUES // (rows * self.largest))

    def __call__(self, index: Index, leaves: list[Tensor], prepared: Prepared, *, valued: bool = True) -> Tensor:
        """Lower bounds of the neurons of places and of their negatives: (places, 2, neurons)."""
        bounds = self._flat(index, self._over(leaves, prepared, valued=valued))
        return bounds.view(len(bounds), 2, -1)

    def _flat(self, index: Index, over: Relaxed) -> Tensor:
        layer = self._layer
        sample, *place = index
        if layer.kind == "dense":
            weight, offset = over.tensors[layer.name]
            below = self._network.layers[layer.inputs[0]]
            start = over.prepared((layer.name, "rows"), lambda: weight.squeeze(0)[self._channels])
            patch = Patch(_common(start.view(-1, *below.shape)), (0, 0), (0, 0))
            bounds = lower_bounds(over, below.name, patch, self._rows(sample))
            if offset is not None:
                shift = over.prepared((layer.name, "shift"), lambda: offset.squeeze(0)[self._channels])
                bounds = bounds + signed(shift).t().flatten()
            return bounds
        width = layer.size if self.full else layer.shape[2]
        units = torch.eye(width, dtype=over.center.dtype, device=over.center.device)[self._channels]
        if self.full:
            patch = Patch(_common(units.view(-1, *layer.shape)), (0, 0), (0, 0))
            return lower_bounds(over, layer.name, patch, self._rows(sample))
        patch = Patch(_common(units.view(len(units), 1, 1, -1)), (1, 1), (0, 0))
        rows = self._rows(sample, (place[0], place[1]), layer.shape[:2])
        return lower_bounds(over, layer.name, patch, rows)


def _common(rows: Tensor) -> Tensor:
    """Rows and their negatives as those of one group that stands for all."""
    return torch.cat([rows, -rows]).unsqueeze(0)

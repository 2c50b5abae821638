"""Where the coefficients of a row lie while it goes back through convolutions.

A row bounds one neuron, or one row of a specification, of one sample. Behind a convolution it depends on a window
of the map below: a patch, which grows with every layer. Patches of one list of rows have the same size; the one of
the neuron at place (i, j) begins at pixel (i, j) · step + offset. A full patch is the same pixels for all rows.

A convolution of stride s is transposed by phases: output pixel (o + a) s + φ gets Σₐ A[o] W[a s + φ], which for each
of the s² phases φ is an ordinary convolution of A with ⌈k/s⌉² taps. Its result is kept in phases, (grid, s² channels),
and whatever meets it there, slopes or inputs, is laid out alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.engine.row_layout import in_phases
from gls_lirpa.engine.row_network import Layer, Pair

MATRIX_WASTE = 4.0
"""How many times the multiplications a product with the layer written as a matrix may take. On a CPU such products
run at three to six times the rate of convolutions with few channels."""


@dataclass(frozen=True)
class Rows:
    """Which rows. Values have two leading axes: (samples, rows of each) for a specification, (neurons, 2) for lower
    and upper bounds of neurons, of which ``sample`` and ``place`` (row, column) say where they are.

    Of a population of ``members`` networks, samples are counted through: ``batch`` of each, one after the other.
    """

    sample: Tensor | None = None
    place: tuple[Tensor, Tensor] | None = None
    places: Pair = (1, 1)
    members: int = 1
    batch: int = 1
    device: torch.device | None = None

    @cached_property
    def sections(self) -> list[tuple[int, slice]]:
        """By member: which rows are its own. Rows of neurons come in the order of their samples."""
        if self.members == 1:
            return [(0, slice(None))]
        if self.sample is None:
            return [(m, slice(m * self.batch, (m + 1) * self.batch)) for m in range(self.members)]
        ends = torch.arange(1, self.members + 1, device=self.sample.device) * self.batch
        bounds = [0, *torch.searchsorted(self.sample, ends).tolist()]
        return [(m, slice(a, b)) for m, (a, b) in enumerate(pairwise(bounds)) if b > a]

    def over(self, axis: str) -> Rows:
        """The rows as they see maps that only a ``sample`` has, whoever the member, or only a ``member``."""
        if self.members == 1:
            return self
        index = self.sample
        if index is None:
            index = torch.arange(self.members * self.batch, device=self.device)
        return replace(self, sample=index % self.batch if axis == "sample" else index // self.batch, members=1)


@dataclass(frozen=True)
class Patch:
    """Coefficients (·, ·, height, width, phases · channels) and what pixels they belong to."""

    values: Tensor
    step: Pair
    offset: Pair
    phase: Pair = (1, 1)

    @property
    def grid(self) -> Pair:
        return self.values.shape[2], self.values.shape[3]

    @property
    def full(self) -> bool:
        return self.step == (0, 0)


@dataclass(frozen=True)
class Window:
    """Where the rows' patches lie on a map: which of its pixels are laid out, and which cells each row sees."""

    patch: Patch
    rows: Rows

    def _spans(self) -> Pair:
        patch, places = self.patch, self.rows.places
        high, wide = ((places[a] - 1) * patch.step[a] + patch.grid[a] * patch.phase[a] for a in (0, 1))
        return high, wide

    @property
    def key(self) -> tuple[object, ...]:
        """Windows with the same key lay a map out alike."""
        return self._spans(), self.patch.offset, self.patch.phase

    def laid_out(self, value: Tensor) -> Tensor:
        """``value`` (batch, height, width, channels), 0 outside, cut to what patches cover, in their phases:
        (batch, high, wide, phases · channels)."""
        return in_phases(value, self._spans(), self.patch.offset, self.patch.phase)

    def nonzero(self, laid_out: Tensor) -> tuple[Tensor, Tensor]:
        """Where what the rows see is not 0: indices of rows and of values."""
        flat, sample = laid_out.flatten(1), self.rows.sample
        if not self.patch.full and sample is not None:
            row, value = self.seen(laid_out).squeeze(1).nonzero(as_tuple=True)
            return row, value
        owner, value = flat.nonzero(as_tuple=True)
        if sample is None:
            return owner, value
        # Rows of one sample share its list: row r takes the entries begin[s] … begin[s] + count[s] − 1.
        count = torch.bincount(owner, minlength=len(flat))
        own = count[sample]
        row = torch.repeat_interleave(own)
        shift = (count.cumsum(0) - count)[sample] - (own.cumsum(0) - own)
        return row, value[torch.arange(len(row), device=row.device) + shift[row]]

    @cached_property
    def _cells(self) -> Tensor:
        patch, rows = self.patch, self.rows
        if rows.place is None or rows.sample is None:
            raise TypeError("patches need rows with a sample and a place")
        (height, width), (fy, fx) = patch.grid, patch.phase
        high, wide = self._spans()[0] // fy, self._spans()[1] // fx
        first = (rows.sample * high + rows.place[0] * (patch.step[0] // fy)) * wide
        first = first + rows.place[1] * (patch.step[1] // fx)
        inner = torch.arange(height, device=first.device).unsqueeze(1) * wide + torch.arange(width, device=first.device)
        return first.view(-1, 1, 1) + inner

    def seen(self, laid_out: Tensor) -> Tensor:
        """What every row's patch sees of a map laid out for it; broadcasts against the rows' (·, ·, values)."""
        sample = self.rows.sample
        if self.patch.full or sample is None:
            flat = laid_out.reshape(len(laid_out), -1)
            if sample is not None:
                flat = flat.expand(len(sample), -1) if len(flat) == 1 else flat.index_select(0, sample)
            return flat.unsqueeze(1)
        if len(laid_out) == 1:
            laid_out = laid_out.expand(int(sample.max()) + 1, -1, -1, -1)
        return F.embedding(self._cells, laid_out.reshape(-1, laid_out.shape[-1])).flatten(1).unsqueeze(1)


def fills(patch: Patch, layer: Layer) -> bool:
    """Whether a full patch has the pixels of the layer's map and no others."""
    return patch.offset == (0, 0) and all(patch.grid[a] * patch.phase[a] == layer.shape[a] for a in (0, 1))


def plain(patch: Patch, layer: Layer) -> Patch:
    """The patch without phases, and cut to the map of ``layer`` where it is full."""
    values, (fy, fx) = patch.values, patch.phase
    if patch.phase != (1, 1):
        first, second, height, width = values.shape[:4]
        values = values.reshape(first, second, height, width, fy, fx, -1).transpose(3, 4)
        values = values.reshape(first, second, height * fy, width * fx, -1)
    if not patch.full:
        return replace(patch, values=values, phase=(1, 1))
    (top, left), (height, width, _) = patch.offset, layer.shape
    sides = (left, width - left - values.shape[3], top, height - top - values.shape[2])
    if any(sides):
        values = F.pad(values, (0, 0, *sides))
    return Patch(values, (0, 0), (0, 0))


def _shift(layer: Layer, *, aligned: bool) -> Pair:
    """Zeros before a kernel. With them an aligned map begins at a cell of the grid, and no cell is cut in two."""
    if not aligned:
        return 0, 0
    return -layer.padding[0] % layer.stride[0], -layer.padding[1] % layer.stride[1]


ALIGNED_CHANNELS = 16
"""Below this many output channels the multiplications that a kernel without zeros saves cost less than cutting the map
does: CROWN-IBP steps on 8 channels took 1.07 times as long without them, those on 16 and 32 channels 0.86 times."""


def is_aligned(patch: Patch, layer: Layer, below: Layer) -> bool:
    """Whether a whole map at a convolution's input is kept in cells of its phases."""
    return patch.full and (below.kind == "input" or layer.shape[2] < ALIGNED_CHANNELS)


def _taps(layer: Layer, *, aligned: bool) -> Pair:
    shift = _shift(layer, aligned=aligned)
    rows, columns = (-(-(layer.kernel[a] + shift[a]) // layer.stride[a]) for a in (0, 1))
    return rows, columns


def phases(weight: Tensor, layer: Layer, *, aligned: bool) -> Tensor:
    """The kernels (members, out, in, height, width) of a convolution as those of its transpose by phases:
    (members, stride² · in, out, taps, taps)."""
    (members, out, channels, height, width), stride = weight.shape, layer.stride
    shift, taps = _shift(layer, aligned=aligned), _taps(layer, aligned=aligned)
    after = [taps[a] * stride[a] - shift[a] - (height, width)[a] for a in (0, 1)]
    kernel = F.pad(weight, (shift[1], after[1], shift[0], after[0]))
    kernel = kernel.reshape(members, out, channels, taps[0], stride[0], taps[1], stride[1])
    kernel = kernel.permute(0, 4, 6, 2, 1, 3, 5).flip(5, 6)
    return kernel.reshape(members, stride[0] * stride[1] * channels, out, *taps)


def is_matrix(patch: Patch, layer: Layer, below: Layer, rows: int) -> bool:
    """Whether patches at the output of a convolution go back by a product with its matrix."""
    height, width = patch.grid[0] * patch.phase[0], patch.grid[1] * patch.phase[1]
    if rows < height * width * layer.shape[2]:
        return False
    taps = _taps(layer, aligned=False)
    if height * width <= MATRIX_WASTE * taps[0] * taps[1]:
        return True
    if not patch.full:
        return False
    geometry, _ = below_patch(patch, layer, below)
    values = patch.values.shape[2:].numel() * geometry.values.shape[2:].numel()
    return 2 * values <= MATRIX_WASTE * _multiplications(patch, layer, below)


LANES = 8
"""Channels that a convolution computes at once, and pays for where it has fewer."""


def _multiplications(patch: Patch, layer: Layer, below: Layer) -> int:
    """What a transposed convolution of one row takes, channels rounded up to whole lanes."""
    geometry, _ = below_patch(patch, layer, below)
    taps = _taps(layer, aligned=is_aligned(patch, layer, below))
    channels = [-(-count // LANES) * LANES for count in (patch.values.shape[4], geometry.values.shape[4])]
    return geometry.grid[0] * geometry.grid[1] * taps[0] * taps[1] * channels[0] * channels[1]


def by_cells(patch: Patch, weight: Tensor, layer: Layer, below: Layer) -> tuple[Patch, Tensor, Layer]:
    """A full patch in a form without phases, and the convolution from whose output it is, in that form.

    Cells of a grid may count as pixels with all their phases as channels: pixel c f + φ of the output meets pixels
    (c f + φ + offset) s + a − padding of the input, so this is a convolution of stride f s with the kernels of its
    channels shifted by φ s. It multiplies with more zeros and moves nothing, which pays for few channels.
    """
    apart = Patch(patch.values.new_empty(1, 1, *layer.shape, device="meta"), (0, 0), (0, 0))
    (fy, fx), stride, kernel = patch.phase, layer.stride, layer.kernel
    cells = replace(
        layer,
        stride=(fy * stride[0], fx * stride[1]),
        kernel=((fy - 1) * stride[0] + kernel[0], (fx - 1) * stride[1] + kernel[1]),
        padding=(layer.padding[0] - patch.offset[0] * stride[0], layer.padding[1] - patch.offset[1] * stride[1]),
    )
    whole = Patch(patch.values, (0, 0), (0, 0))
    if patch.phase == (1, 1) or _multiplications(whole, cells, below) > _multiplications(apart, layer, below):
        return plain(patch, layer), weight, layer
    shifted = [
        F.pad(weight, (x * stride[1], (fx - 1 - x) * stride[1], y * stride[0], (fy - 1 - y) * stride[0]))
        for y in range(fy)
        for x in range(fx)
    ]
    return whole, torch.cat(shifted, dim=1), cells


def matrix(patch: Patch, weight: Tensor, layer: Layer, below: Layer) -> Tensor:
    """What a convolution does to patches laid out as ``patch``: (members, values at its output, at its input)."""
    grid, count = patch.grid, patch.values[0, 0].numel()
    units = torch.eye(count, dtype=weight.dtype, device=weight.device).view(count, 1, *grid, -1)
    kernel = phases(weight, layer, aligned=is_aligned(patch, layer, below)).flatten(0, 1)
    patch = plain(replace(patch, values=units), layer)
    values = _convolved(patch.values, kernel, below_patch(patch, layer, below)[1])
    return values.view(*values.shape[:3], len(weight), -1).permute(3, 0, 1, 2, 4).reshape(len(weight), count, -1)


def below_patch(patch: Patch, layer: Layer, below: Layer) -> tuple[Patch, Pair]:
    """The geometry of the layer's input for patches at its output, with no values, and the padding of phases."""
    aligned = is_aligned(patch, layer, below)
    taps, shift = _taps(layer, aligned=aligned), _shift(layer, aligned=aligned)
    before = [layer.padding[a] + shift[a] for a in (0, 1)]
    size = [patch.grid[a] * patch.phase[a] for a in (0, 1)]
    trim = [0, 0]
    if patch.full:
        # Cells of the grid that lie outside the map on both sides need not be computed.
        for a in (0, 1):
            beyond = (size[a] + taps[a] - 1) * layer.stride[a] - before[a] - below.shape[a]
            trim[a] = min(max(0, min(before[a], beyond) // layer.stride[a]), taps[a] - 1)
    offset = [(patch.offset[a] + trim[a]) * layer.stride[a] - before[a] for a in (0, 1)]
    step = (patch.step[0] * layer.stride[0], patch.step[1] * layer.stride[1])
    empty = patch.values.new_empty(
        *patch.values.shape[:2],
        *(size[a] + taps[a] - 1 - 2 * trim[a] for a in (0, 1)),
        layer.stride[0] * layer.stride[1] * below.shape[2],
        device="meta",
    )
    return Patch(empty, step, (offset[0], offset[1]), layer.stride), (taps[0] - 1 - trim[0], taps[1] - 1 - trim[1])


def transposed(patch: Patch, kernel: Tensor, layer: Layer, below: Layer, rows: Rows) -> Patch:
    """Coefficients of the layer's output, without phases, as those of its input, by ``phases`` of its kernels."""
    geometry, pads = below_patch(patch, layer, below)
    if len(kernel) == 1:
        values = _convolved(patch.values, kernel.squeeze(0), pads)
    else:
        values = torch.cat([_convolved(patch.values[part], kernel[member], pads) for member, part in rows.sections])
    return replace(geometry, values=values.reshape(geometry.values.shape))


def _convolved(values: Tensor, kernel: Tensor, pads: Pair) -> Tensor:
    """(rows · ·, height, width, channels): both leading axes are one afterwards."""
    return F.conv2d(values.flatten(0, 1).permute(0, 3, 1, 2), kernel, None, 1, pads).permute(0, 2, 3, 1)

"""HBox's coefficients behind convolutions: per neuron only those of the input pixels it can see.

The neuron at position p of a map sees the pixels p·stride − offset + {0, …, size − 1}, so that a
window of coefficients per neuron says all. Until a position-dependent factor has been convolved, as
the first ReLU's mask is by the second convolution, the window is that of a kernel: the same for
every sample and position. What leaves this form (linear layers with many rows, sums of maps of
different strides, windows nearly as large as the image) goes on in full, as ``Dense``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.engine.graph import AffineMap, Convolution, Node
from gls_lirpa.engine.hbox_dense import Coefficients, Dense
from gls_lirpa.engine.hbox_layout import ReceptiveField, laid


@dataclass(frozen=True)
class Windows:
    """``patches`` (1 or B, 1 or positions, channels, input channels · size) times ``scale`` per neuron.

    ``maps`` is (channels, rows, columns) and ``shape`` the value's shape, the same or flat; ``image``
    the input's shape. ``scale`` is None or (1 or B, channels, rows or 1, columns or 1). Coefficients
    of pixels outside the image may be anything finite: their radius is 0.
    """

    patches: Tensor
    window: ReceptiveField
    maps: tuple[int, int, int]
    shape: tuple[int, ...]
    image: tuple[int, int, int]
    scale: Tensor | None = None

    @classmethod
    def identity(cls, x: Tensor) -> Windows:
        channels, rows, columns = x.shape[1:]
        image = (channels, rows, columns)
        patches = torch.eye(channels, dtype=x.dtype, device=x.device).expand(1, 1, channels, channels)
        return cls(patches, ReceptiveField(), image, image, image)

    # -- what every form can do --------------------------------------------------------------------

    def total_radius(self, input_radius: Tensor) -> Tensor:
        radius = F.pad(input_radius, self.window.margins(self.maps[1:], self.image[1:]))
        seen = F.unfold(radius, self.window.size, stride=self.window.stride)
        total = torch.einsum("bwp,bpcw->bcp", seen, self.patches.abs()).reshape(-1, *self.maps)
        return (total if self.scale is None else total * self.scale.abs()).reshape(-1, *self.shape)

    def scaled(self, factor: Tensor) -> Windows:
        if self.shape != self.maps:
            factor = factor.reshape(len(factor), *self.maps)
        per_channel = factor.shape[2:] == (1, 1)
        if per_channel and len(factor) == 1 and self._shared:
            return replace(self, patches=self.patches * factor.reshape(1, 1, -1, 1))
        factor = factor if per_channel else factor.expand(-1, *self.maps)
        return replace(self, scale=factor if self.scale is None else self.scale * factor)

    def through(self, node: Node, apply: AffineMap) -> Coefficients:
        if node.form == "reshape" and node.shape in (self.maps, (math.prod(self.maps),)):
            return replace(self, shape=node.shape)
        if node.form == "elementwise" and node.shape == self.shape == self.maps:
            return self.scaled(apply(self.patches.new_ones(1, self.maps[0], 1, 1), False, False))
        if node.convolution is not None and self.shape == self.maps:
            convolution = node.convolution()
            window = self.window.behind(convolution)
            if window.pays(self.image[1:]):
                rows, columns = node.shape[1:]
                maps = (node.shape[0], rows, columns)
                return Windows(self._convolved(convolution, window, maps), window, maps, maps, self.image)
        if node.weight is not None and len(self.shape) == 1:
            return self.contracted(node.weight()[0].unsqueeze(0))
        return self.to_dense().through(node, apply)

    def plus(self, other: Coefficients, sign: int) -> Coefficients:
        if isinstance(other, Windows) and (other.maps, other.shape) == (self.maps, self.shape):
            window = self.window.hull(other.window)
            if other.window.stride == window.stride and window.pays(self.image[1:]):
                patches = self._widened(window) + sign * other._widened(window)
                return replace(self, patches=patches, window=window, scale=None)
        return self.to_dense().plus(other, sign)

    def contracted(self, matrix: Tensor) -> Dense:
        rows = matrix.shape[1]
        if rows * math.prod(self.window.size) > self.maps[0] * math.prod(self.image[1:]):
            return replace(self, shape=(math.prod(self.maps),)).to_dense().contracted(matrix)
        matrix = matrix.reshape(len(matrix), rows, *self.maps)
        if self.scale is not None:
            matrix = matrix * self.scale.unsqueeze(1)
        # Per position, the rows' coefficients in its window; then the windows are laid over each other.
        parts = torch.einsum("bjcp,bpcw->bpjw", matrix.flatten(3), self.patches)
        sums = laid(parts.reshape(len(parts), *self.maps[1:], -1, *self.window.size), self.window.stride)
        return Dense(self._cropped(sums).reshape(len(sums), rows, -1).transpose(1, 2))

    def to_dense(self) -> Dense:
        """Each window copied to where it lies in the image enlarged by what the windows reach over it."""
        early = len(self.patches) > 1  # factors before the windows are laid out, unless that would make B of one
        patches = self._scaled_patches() if early else self.patches
        (channels, *positions), (inputs, *_), size = self.maps, self.image, self.window.size
        count, extent = math.prod(positions), self.window.extent(self.maps[1:])
        rows = patches.expand(-1, count, -1, -1).reshape(len(patches), count, channels, inputs, -1)
        numbers = torch.arange(math.prod(extent), dtype=torch.float64).reshape(1, 1, *extent)
        pixels = F.unfold(numbers, size, stride=self.window.stride)[0].long()  # (size, positions)
        targets = pixels.t() * count + torch.arange(count).unsqueeze(1)
        batch = len(patches)
        full = rows.new_zeros(math.prod(extent) * count, batch * channels * inputs).index_copy(
            0, targets.flatten().to(rows.device), rows.permute(1, 4, 0, 2, 3).reshape(targets.numel(), -1)
        )
        full = full.reshape(*extent, count, batch, channels, inputs).permute(3, 5, 4, 2, 0, 1)
        full = self._cropped(full).permute(0, 1, 4, 5, 2, 3).reshape(batch, -1, *self.maps)
        if self.scale is not None and not early:
            full = full * self.scale.unsqueeze(1)
        return Dense(full.reshape(*full.shape[:2], *self.shape))

    # -- how -----------------------------------------------------------------------------------------

    @property
    def _shared(self) -> bool:
        return self.patches.shape[:2] == (1, 1)

    def _cropped(self, x: Tensor) -> Tensor:
        """To the image, from all that the windows reach."""
        return F.pad(x, [-margin for margin in self.window.margins(self.maps[1:], self.image[1:])])

    def _scaled_patches(self) -> Tensor:
        if self.scale is None:
            return self.patches
        return self.patches * self.scale.flatten(2).transpose(1, 2).unsqueeze(-1)

    def _widened(self, window: ReceptiveField) -> Tensor:
        """The scaled patches in a larger window of the same stride."""
        patches = self._scaled_patches()
        begin = [window.offset[i] - self.window.offset[i] for i in range(2)]
        end = [window.size[i] - self.window.size[i] - begin[i] for i in range(2)]
        maps = patches.reshape(*patches.shape[:3], self.image[0], *self.window.size)
        return F.pad(maps, [begin[1], end[1], begin[0], end[0]]).flatten(3)

    def _convolved(self, convolution: Convolution, window: ReceptiveField, maps: tuple[int, int, int]) -> Tensor:
        weight = convolution.weight.to(self.patches)
        if not self._shared:
            return self._convolved_windows(convolution, weight, maps)
        kernel = torch.einsum(
            "ocd,ciw,dwv->cdoiv",
            weight.flatten(2),
            self.patches.reshape(self.maps[0], self.image[0], -1),
            self._meetings(convolution, window),
        )
        if self.scale is None and self.window == ReceptiveField():
            # Padded positions are pixels outside the image.
            return kernel.sum((0, 1)).reshape(1, 1, maps[0], -1)
        scale = self.patches.new_ones(1, *self.maps) if self.scale is None else self.scale.expand(-1, *self.maps)
        columns = F.unfold(scale, convolution.size, padding=convolution.padding, stride=convolution.stride)
        mixed = columns.transpose(1, 2) @ kernel.reshape(columns.shape[1], -1)
        return mixed.reshape(len(columns), -1, maps[0], self.image[0] * math.prod(window.size))

    def _meetings(self, convolution: Convolution, window: ReceptiveField) -> Tensor:
        """1 where entry w of the window at kernel position d is entry v of the new one: (d, w, v)."""
        count = math.prod(window.size)
        entries = torch.eye(count, dtype=self.patches.dtype, device=self.patches.device).reshape(1, count, *window.size)
        windows = F.unfold(entries, self.window.size, stride=self.window.stride)  # (1, v · w, d)
        return windows.reshape(count, -1, windows.shape[-1]).permute(2, 1, 0)

    def _convolved_windows(self, convolution: Convolution, weight: Tensor, maps: tuple[int, int, int]) -> Tensor:
        """Windows that differ by position: the products of every kernel position, laid over each other."""
        patches = self._scaled_patches()
        (above, left), (down, right) = convolution.padding, convolution.stride
        grid = patches.reshape(len(patches), *self.maps[1:], self.maps[0], -1)
        grid = F.pad(grid, [0, 0, 0, 0, left, left, above, above])
        windows = grid.unfold(1, convolution.size[0], down).unfold(2, convolution.size[1], right)
        parts = torch.einsum("bpqcwxy,ocxy->bpqxyow", windows, weight)
        parts = parts.reshape(-1, *convolution.size, maps[0] * self.image[0], *self.window.size)
        return laid(parts, self.window.stride).reshape(len(patches), math.prod(maps[1:]), maps[0], -1)

"""A network put together layer by layer, with elementwise constants merged into their neighbours.

Networks from elsewhere write a bias as MatMul and Add and a normalisation as Sub and Div. Merged into
the layer before or after them they cost nothing, and the engine bounds them exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gls_lirpa.base.normalize import Normalize
from gls_lirpa.engine.elementwise import Elementwise, elementwise_layer, per_channel
from gls_lirpa.exchange.layers import Reshape, assembled


class Steps:
    """The layers so far. Values are numbered: 0 is the input, i + 1 the output of layer i.

    ``shared`` values have several readers, so the layer that makes them stays as it is. Constants of
    Elementwise layers are kept in float64 and in the full shape of a sample until ``network``.

    >>> steps = Steps((4,), torch.float32)
    >>> hidden = steps.elementwise(steps.linear(0, torch.ones(2, 4), None), None, torch.ones(2))
    >>> steps.network(hidden)
    Sequential(
      (0): Linear(in_features=4, out_features=2, bias=True)
    )
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._layers: list[tuple[nn.Module, tuple[int, ...]]] = []
        self.shapes = [tuple(shape)]
        self.shared: set[int] = set()

    def add(self, layer: nn.Module, inputs: tuple[int, ...], shape: Sequence[int]) -> int:
        self._layers.append((layer, inputs))
        self.shapes.append(tuple(shape))
        return len(self._layers)

    def reshape(self, value: int, shape: Sequence[int]) -> int:
        """An Elementwise layer before it is moved behind it, where a Linear may absorb it."""
        if self.shapes[value] == tuple(shape):
            return value
        before = self._elementwise(value)
        layer: nn.Module = nn.Flatten() if len(shape) == 1 else Reshape(shape)
        if before is None:
            return self.add(layer, (value,), shape)
        self._layers[value - 1] = (layer, self._layers[value - 1][1])
        self.shapes[value] = tuple(shape)
        moved = Elementwise(_viewed(before.scale, shape), _viewed(before.shift, shape))
        return self.add(moved, (value,), shape)

    def linear(self, value: int, weight: Tensor, bias: Tensor | None) -> int:
        """weight (out, in) · x + bias over samples of one dimension."""
        exact, offset = weight.double(), torch.zeros(len(weight)).double() if bias is None else bias.double()
        before = self._elementwise(value)
        if before is not None:
            offset = offset if before.shift is None else offset + exact @ before.shift
            exact = exact if before.scale is None else exact * before.scale
        layer = nn.Linear(weight.shape[1], len(weight), bias=bool(offset.any()) or bias is not None, dtype=self._dtype)
        _fill(layer, exact, offset)
        if before is None:
            return self.add(layer, (value,), (len(weight),))
        self._layers[value - 1] = (layer, self._layers[value - 1][1])
        self.shapes[value] = (len(weight),)
        return value

    def elementwise(self, value: int, scale: Tensor | None, shift: Tensor | None) -> int:
        """scale · x + shift, merged into what makes x if possible."""
        shape = self.shapes[value]
        scale, shift = (None if c is None else torch.broadcast_to(c.double(), shape) for c in (scale, shift))
        target = value
        while self._producer(target, (Reshape, nn.Flatten)) is not None:
            target = self._layers[target - 1][1][0]
        merged = self._merged(target, _viewed(scale, self.shapes[target]), _viewed(shift, self.shapes[target]))
        if merged is None:
            return self.add(Elementwise(scale, shift), (value,), shape)
        self._layers[target - 1] = (merged, self._layers[target - 1][1])
        return value

    def _merged(self, value: int, scale: Tensor | None, shift: Tensor | None) -> nn.Module | None:
        """The layer that makes ``value``, scaled and shifted, if it can be."""
        before = self._producer(value, (Elementwise, nn.Linear, nn.Conv2d))
        if isinstance(before, Elementwise):
            return Elementwise(*_composed((before.scale, before.shift), (scale, shift)))
        if isinstance(before, nn.Linear):
            return _scaled(before, scale, shift, self._dtype)
        channels = per_channel(scale), per_channel(shift)
        lost = any((c is None) != (whole is None) for c, whole in zip(channels, (scale, shift), strict=True))
        return _scaled(before, *channels, self._dtype) if isinstance(before, nn.Conv2d) and not lost else None

    def network(self, value: int) -> nn.Module:
        """The finished network, with one row of outputs per sample; ``value`` is the last one made."""
        if len(self.shapes[value]) != 1:
            value = self.reshape(value, (torch.Size(self.shapes[value]).numel(),))
        layers = [
            (
                elementwise_layer(layer.scale, layer.shift, self._dtype) if isinstance(layer, Elementwise) else layer,
                inputs,
            )
            for layer, inputs in self._layers[:value]
        ]
        if layers and isinstance(layers[0][0], nn.Conv2d):
            layers[0] = (_as_normalization(layers[0][0]), layers[0][1])
        return assembled(layers)

    def _producer(self, value: int, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> nn.Module | None:
        """The layer that makes ``value``, if it is of a kind and nothing else reads the value."""
        layer = self._layers[value - 1][0] if value else None
        return layer if isinstance(layer, kind) and value not in self.shared else None

    def _elementwise(self, value: int) -> Elementwise | None:
        layer = self._producer(value, Elementwise)
        return layer if isinstance(layer, Elementwise) else None


def _as_normalization(conv: nn.Conv2d) -> nn.Module:
    """A Normalize, which the engine applies to both ends of the box, if the layer scales channels by
    positive numbers and does nothing else."""
    channels = conv.in_channels
    if conv.weight.shape != (channels, channels, 1, 1) or conv.stride != (1, 1) or conv.padding != (0, 0):
        return conv
    kernel = conv.weight.detach()[:, :, 0, 0]
    if not bool((kernel.diagonal() > 0).all()) or bool((kernel != torch.diag(kernel.diagonal())).any()):
        return conv
    normalize = Normalize([0.0] * channels, [1.0] * channels)
    normalize.weight = conv.weight.detach().clone()
    normalize.bias = torch.zeros_like(kernel[0]) if conv.bias is None else conv.bias.detach().clone()
    return normalize


def _viewed(value: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if value is None else value.reshape(tuple(shape))


def _composed(
    first: tuple[Tensor | None, Tensor | None], then: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    scale, shift = first
    if then[0] is not None:
        scale = then[0] if scale is None else scale * then[0]
        shift = None if shift is None else shift * then[0]
    if then[1] is not None:
        shift = then[1] if shift is None else shift + then[1]
    return scale, shift


def _scaled(layer: nn.Linear | nn.Conv2d, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """A layer whose output channels are scaled and shifted."""
    weight = layer.weight.detach().double()
    bias = torch.zeros(len(weight)).double() if layer.bias is None else layer.bias.detach().double()
    if scale is not None:
        weight, bias = weight * scale.reshape(-1, *[1] * (weight.dim() - 1)), bias * scale
    if shift is not None:
        bias = bias + shift
    merged = copy.deepcopy(layer)
    merged.bias = nn.Parameter(torch.zeros(len(weight), dtype=dtype))
    _fill(merged, weight, bias)
    return merged


def _fill(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(bias)

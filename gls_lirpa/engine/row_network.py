"""A network in the form that row bounds walk over: few kinds of layers, channels last.

Every value is kept as (batch, height, width, channels), vectors as (batch, 1, 1, features). Flattening is
then nothing at all, and a linear layer behind it has its columns permuted once instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.engine.graph import Node
from gls_lirpa.errors import UnsupportedLayerError

Shape = tuple[int, int, int]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Layer:
    """One operation: input, conv, dense, scale, sum or relu. ``shape`` is (height, width, channels).

    ``outer`` is the shape that torch gives the value (without the batch), to which bounds are returned.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    shape: Shape
    outer: tuple[int, ...]
    node: Node
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    kernel: Pair = (1, 1)

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]


Tensors = dict[str, tuple[Tensor, Tensor | None]]
"""By layer: a convolution's (kernel (out, in, height, width), offset), a dense layer's (matrix (out, in), offset),
a scaling's (factor, offset) of its shape. Bounds take them with another axis in front, the members of a population."""


@dataclass(frozen=True)
class Chain:
    """ReLUs and the convolutions that they are of, from the top down to the input, nothing else in between."""

    pairs: tuple[tuple[Layer, Layer], ...]
    input: Layer


class RowNetwork:
    """The layers of a graph, inputs first; raises UnsupportedLayerError where one has no such form.

    A scaling directly behind a convolution or dense layer of its own, such as BatchNorm, is merged into it.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.layers: dict[str, Layer] = {}
        self._merged: dict[str, list[Layer]] = {}
        self._alias: dict[str, str] = {}
        uses = Counter(name for node in nodes for name in node.inputs)
        for node in nodes:
            self._add(node, uses)
        self.input = next(layer for layer in self.layers.values() if layer.kind == "input")
        self.final = self.layers[self._alias[nodes[-1].name]]
        self.relus = [layer for layer in self.layers.values() if layer.kind == "relu"]
        self.bounded = list(dict.fromkeys(layer.inputs[0] for layer in self.relus))
        self.consumers = Counter(name for layer in self.layers.values() for name in layer.inputs)
        chains = ((relu.name, self._chain(relu)) for relu in self.relus)
        self.chains = {name: chain for name, chain in chains if chain is not None}

    def _add(self, node: Node, uses: Counter[str]) -> None:
        inputs = tuple(self._alias[name] for name in node.inputs)
        if node.form == "reshape":
            self._flatten(node, inputs[0])
            return
        self._alias[node.name] = node.name
        layer = self._layer(node, inputs)
        if layer.kind == "scale" and self._mergeable(layer, node, uses):
            before = inputs[0]
            self._merged.setdefault(before, []).append(layer)
            self._alias[node.name] = before
            return
        self.layers[node.name] = layer

    def _mergeable(self, layer: Layer, node: Node, uses: Counter[str]) -> bool:
        before = self.layers[layer.inputs[0]]
        own = {before.name, *(scaling.name for scaling in self._merged.get(before.name, ()))}
        single = node.inputs[0] in own and uses[node.inputs[0]] == 1
        return single and (before.kind == "dense" or (before.kind == "conv" and node.channelwise))

    def _flatten(self, node: Node, before: str) -> None:
        layer = self.layers[before]
        if len(node.shape) != 1 and node.shape != layer.outer:
            raise UnsupportedLayerError(f"reshaping {layer.outer} to {node.shape} has no row form")
        self._alias[node.name] = before

    def _layer(self, node: Node, inputs: tuple[str, ...]) -> Layer:
        shape = _channels_last(node.shape)
        common: dict[str, Any] = {"name": node.name, "inputs": inputs, "outer": node.shape, "node": node}
        if node.kind in ("input", "relu", "sum"):
            if node.kind != "input":
                # Behind a flattening the value keeps the shape it had.
                shapes = {self.layers[name].shape for name in inputs}
                if len(shapes) > 1:
                    raise UnsupportedLayerError(f"adding values of different shapes ({node.name!r}) has no row form")
                shape = shapes.pop()
            return Layer(kind=node.kind, shape=shape, **common)
        if node.weight is not None and len(node.shape) == 1:
            return Layer(kind="dense", shape=shape, **common)
        if node.convolution is not None and len(node.shape) == 3:
            form = node.convolution()
            return Layer(kind="conv", shape=shape, stride=form.stride, padding=form.padding, kernel=form.size, **common)
        if node.form == "elementwise" and self.layers[inputs[0]].outer == node.shape:
            return Layer(kind="scale", shape=self.layers[inputs[0]].shape, **common)
        raise UnsupportedLayerError(f"node {node.name!r} has no row form")

    def _chain(self, layer: Layer) -> Chain | None:
        """What is below a ReLU, where it is a chain."""
        pairs: list[tuple[Layer, Layer]] = []
        while layer.kind == "relu":
            conv = self.layers[layer.inputs[0]]
            if conv.kind != "conv":
                return None
            pairs.append((layer, conv))
            layer = self.layers[conv.inputs[0]]
            if max(self.consumers[conv.name], self.consumers[layer.name]) > 1:
                return None
        return Chain(tuple(pairs), layer) if layer.kind == "input" else None

    def ancestors(self, layer: Layer) -> list[str]:
        """The names of a layer and all below it, inputs first."""
        wanted = {layer.name}
        for candidate in reversed(self.layers.values()):
            if candidate.name in wanted:
                wanted |= set(candidate.inputs)
        return [name for name in self.layers if name in wanted]

    def tensors(self, dtype: torch.dtype, device: torch.device) -> Tensors:
        """Weights and offsets as they are now, differentiably."""
        found: Tensors = {}
        for layer in self.layers.values():
            if layer.kind in ("conv", "dense", "scale"):
                weight, offset = self._own(layer, dtype, device)
                for scaling in self._merged.get(layer.name, ()):
                    weight, offset = self._scaled(layer, scaling, weight, offset)
                found[layer.name] = weight, offset
        return found

    def _own(self, layer: Layer, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
        node = layer.node
        if layer.kind == "dense" and node.weight is not None:
            weight, offset = node.weight()
            before = self.layers[layer.inputs[0]]
            height, width, channels = before.shape
            if height * width > 1:
                weight = weight.reshape(-1, channels, height, width).permute(0, 2, 3, 1).reshape(len(weight), -1)
            return weight, offset
        if layer.kind == "conv" and node.convolution is not None:
            form = node.convolution()
            return form.weight.to(device, dtype), form.bias
        return self._elementwise(layer, torch.ones(1, *node.shape, dtype=dtype, device=device))

    def _elementwise(self, layer: Layer, ones: Tensor) -> tuple[Tensor, Tensor]:
        apply = layer.node.affine
        if apply is None:
            raise UnsupportedLayerError(f"node {layer.name!r} has no row form")
        factor, offset = apply(ones, False, False), apply(torch.zeros_like(ones), False, True)
        return to_inner(factor, layer.shape)[0], to_inner(offset, layer.shape)[0]

    def _scaled(
        self, layer: Layer, scaling: Layer, weight: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """diag(s)(W a + b) + t, where s and t are the same at all places of a channel."""
        ones = torch.ones(1, *scaling.outer, dtype=weight.dtype, device=weight.device)
        factor, shift = self._elementwise(scaling, ones)
        factor, shift = factor[0, 0], shift[0, 0]
        scaled = weight * factor.view(-1, *[1] * (weight.dim() - 1))
        return scaled, shift if offset is None else offset * factor + shift


def _channels_last(outer: Sequence[int]) -> Shape:
    if len(outer) == 3:
        return outer[1], outer[2], outer[0]
    if len(outer) == 1:
        return 1, 1, outer[0]
    raise UnsupportedLayerError(f"values of shape {tuple(outer)} have no row form")


def to_inner(value: Tensor, shape: Shape) -> Tensor:
    """A batch of torch's shape, channels last."""
    height, width, channels = shape
    return value.reshape(len(value), channels, height, width).permute(0, 2, 3, 1).contiguous()


def to_outer(value: Tensor, outer: Sequence[int]) -> Tensor:
    """(batch, height, width, channels) in torch's shape."""
    return value.permute(0, 3, 1, 2).reshape(len(value), *outer)


def convolved(x: Tensor, weight: Tensor, offset: Tensor | None, layer: Layer) -> Tensor:
    """A convolution of channels-last values."""
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, offset, layer.stride, layer.padding)
    return y.permute(0, 2, 3, 1)

"""A typed view of auto_LiRPA's graph: affine maps, ReLUs, and how they are connected.

HBox and the exact oracles walk this view. Every affine node is one ``AffineMap`` that can be applied
with its weights, without its offset, or with the weights' absolute values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.base.batchnorm import batchnorm_map
from gls_lirpa.engine.convolutions import conv2d
from gls_lirpa.errors import UnsupportedLayerError

AffineMap = Callable[[Tensor, bool, bool], Tensor]
"""``apply(x, absolute, offset)``: |W| instead of W if ``absolute``; plus b if ``offset``."""

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Convolution:
    """A convolution without groups and dilation: weight (out, in, *size)."""

    weight: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]
    bias: Tensor | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.weight.shape[2], self.weight.shape[3]


@dataclass(frozen=True)
class Node:
    """One operation. ``kind`` is input, affine, sum or relu; ``inputs`` are names of earlier nodes.
    Other activations, of kind activation, are in the graph only where they are asked for.

    What an affine node is besides: ``form`` is elementwise or reshape, ``channelwise`` tells that an
    elementwise one does the same at all places of a channel, ``weight`` gives a linear layer's weight
    and bias, and ``convolution`` what a convolution or pooling does.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    affine: AffineMap | None = None
    signs: tuple[int, ...] = ()
    weight: Callable[[], tuple[Tensor, Tensor | None]] | None = None
    form: str = ""
    convolution: Callable[[], Convolution] | None = None
    channelwise: bool = False
    activation: Activation | None = None


def constant_value(node: Any) -> Any:
    return node.forward(*[constant_value(parent) for parent in node.inputs])


def _signed(value: Tensor, absolute: bool) -> Tensor:
    return value.abs() if absolute else value


def _linear_parameters(node: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a Gemm, or of the MatMul that a Linear without bias becomes."""
    weight = constant_value(node.inputs[1])
    weight = weight if node.transB else weight.t()
    return weight, constant_value(node.inputs[2]) if len(node.inputs) > 2 else None


def _linear(node: Any) -> AffineMap:
    def apply(x: Tensor, absolute: bool, offset: bool) -> Tensor:
        weight, bias = _linear_parameters(node)
        return F.linear(x, _signed(weight, absolute), bias if offset else None)

    return apply


def _conv(node: Any) -> AffineMap:
    def apply(x: Tensor, absolute: bool, offset: bool) -> Tensor:
        weight = _signed(constant_value(node.inputs[1]), absolute)
        bias = constant_value(node.inputs[2]) if offset and len(node.inputs) > 2 else None
        return conv2d(x, weight, bias, node.stride, node.padding, node.dilation, node.groups)

    return apply


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return int(values[0]), int(values[1])


def _conv_parameters(node: Any) -> Convolution:
    """A Conv, its groups and dilation written as zeros of the weight."""
    weight = constant_value(node.inputs[1])
    groups = node.groups
    if groups > 1:
        diagonal = torch.eye(groups, dtype=weight.dtype, device=weight.device).view(groups, 1, groups, 1, 1, 1)
        out, channels, *size = weight.shape
        weight = (weight.view(groups, out // groups, 1, channels, *size) * diagonal).reshape(out, -1, *size)
    dilation = _pair(node.dilation)
    if dilation != (1, 1):
        size = [(weight.shape[2 + a] - 1) * dilation[a] + 1 for a in (0, 1)]
        wide = weight.new_zeros(*weight.shape[:2], *size)
        wide[:, :, :: dilation[0], :: dilation[1]] = weight
        weight = wide
    bias = constant_value(node.inputs[2]) if len(node.inputs) > 2 else None
    return Convolution(weight, _pair(node.stride), _pair(node.padding), bias)


def _global_avgpool_parameters(node: Any) -> Convolution:
    """The mean over all places, likewise."""
    channels, size = node.output_shape[1], node.inputs[0].output_shape[2:]
    weight = torch.eye(channels, dtype=torch.float64).view(channels, channels, 1, 1)
    return Convolution(weight.expand(-1, -1, *size) / (size[0] * size[1]), (1, 1), (0, 0))


def _convolution(node: Any) -> Callable[[], Convolution] | None:
    kind = type(node).__name__
    if kind == "BoundConv":
        return lambda: _conv_parameters(node)
    if kind == "BoundGlobalAveragePool" and len(node.output_shape) == 4:
        return lambda: _global_avgpool_parameters(node)
    return None


def _batchnorm(node: Any) -> AffineMap:
    def apply(x: Tensor, absolute: bool, offset: bool) -> Tensor:
        weight, bias, mean, var = (constant_value(parent) for parent in node.inputs[1:5])
        shape = (1, -1) + (1,) * (x.dim() - 2)
        scale, shift = batchnorm_map(mean, var, weight, bias, node.eps)
        result = x * _signed(scale, absolute).view(shape)
        return result + shift.view(shape) if offset else result

    return apply


def _conv_transpose(node: Any) -> AffineMap:
    def apply(x: Tensor, absolute: bool, offset: bool) -> Tensor:
        weight = _signed(constant_value(node.inputs[1]), absolute)
        bias = constant_value(node.inputs[2]) if offset and len(node.inputs) > 2 else None
        return F.conv_transpose2d(x, weight, bias, node.stride)

    return apply


def _global_avgpool(node: Any) -> AffineMap:
    return lambda x, absolute, offset: x.mean((2, 3), keepdim=True)


def _reshape(node: Any) -> AffineMap:
    tail = tuple(node.output_shape[1:])
    return lambda x, absolute, offset: x.reshape(len(x), *tail)


def _elementwise(node: Any, perturbed: int) -> AffineMap:
    """Add, subtract, multiply or divide by something that does not depend on the input."""
    name = type(node).__name__

    def apply(x: Tensor, absolute: bool, offset: bool) -> Tensor:
        other: Tensor = constant_value(node.inputs[1 - perturbed])
        if name == "BoundMul":
            return x * _signed(other, absolute)
        if name == "BoundDiv":
            return x / _signed(other, absolute)
        if name == "BoundAdd":
            return x + other if offset else x.expand(torch.broadcast_shapes(x.shape, other.shape))
        sign = 1.0 if perturbed == 0 or absolute else -1.0
        shaped = x.expand(torch.broadcast_shapes(x.shape, other.shape))
        return sign * shaped - sign * other if offset else sign * shaped

    return apply


def _negate(node: Any) -> AffineMap:
    return lambda x, absolute, offset: x if absolute else -x


_AFFINE: dict[str, Callable[[Any], AffineMap]] = {
    "BoundLinear": _linear,
    "BoundMatMul": _linear,
    "BoundConv": _conv,
    "BoundBatchNormalization": _batchnorm,
    "BoundConvTranspose": _conv_transpose,
    "BoundGlobalAveragePool": _global_avgpool,
    "BoundFlatten": _reshape,
    "BoundReshape": _reshape,
    "BoundNeg": _negate,
}
_FORMS = {
    "BoundBatchNormalization": "elementwise",
    "BoundNeg": "elementwise",
    "BoundFlatten": "reshape",
    "BoundReshape": "reshape",
}
_BINARY = ("BoundAdd", "BoundSub", "BoundMul", "BoundDiv")
_ACTIVATIONS: dict[str, Callable[[Any], Activation]] = {
    "BoundRelu": lambda node: torch.relu,
    "BoundSigmoid": lambda node: torch.sigmoid,
    "BoundTanh": lambda node: torch.tanh,
    "BoundMaxPool": lambda node: lambda x: F.max_pool2d(x, node.kernel_size, node.stride, node.padding),
}
"""What is not affine, as a function; HBox and the exact oracles know ReLUs alone."""


def _depends_on_input(node: Any, input_name: str, memo: dict[str, bool]) -> bool:
    if node.name not in memo:
        memo[node.name] = node.name == input_name or (
            type(node).__name__ != "BoundShape" and any(_depends_on_input(p, input_name, memo) for p in node.inputs)
        )
    return memo[node.name]


def perturbed_nodes(bounded: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Every node that depends on the input, inputs first, with those of its inputs that do."""
    memo: dict[str, bool] = {}
    seen: set[str] = set()

    def visit(node: Any) -> Iterator[tuple[Any, list[Any]]]:
        if node.name in seen or not _depends_on_input(node, bounded.input_name[0], memo):
            return
        for parent in node.inputs:
            yield from visit(parent)
        seen.add(node.name)
        yield node, [parent for parent in node.inputs if memo.get(parent.name)]

    return visit(bounded[bounded.final_name])


def read_graph(bounded: Any, *, all_activations: bool = False) -> list[Node]:
    """The nodes between the input and the output of a BoundedModule, in topological order.

    Raises UnsupportedLayerError for what is neither affine nor a ReLU, or with ``all_activations`` nor
    another known activation.
    """
    name = bounded.input_name[0]
    return [_typed(node, parents, name, all_activations=all_activations) for node, parents in perturbed_nodes(bounded)]


def evaluate(nodes: Sequence[Node], x: Tensor) -> dict[str, Tensor]:
    """The value of every node at the input ``x``, by name."""
    values: dict[str, Tensor] = {}
    for node in nodes:
        inputs = [values[name] for name in node.inputs]
        if node.kind == "input":
            values[node.name] = x
        elif node.activation is not None:
            values[node.name] = node.activation(inputs[0])
        elif node.kind == "sum":
            values[node.name] = inputs[0] + node.signs[1] * inputs[1]
        elif node.affine is not None:
            values[node.name] = node.affine(inputs[0], False, True)
    return values


def _typed(node: Any, parents: list[Any], input_name: str, *, all_activations: bool) -> Node:
    kind = type(node).__name__
    names = tuple(parent.name for parent in parents)
    shape = tuple(node.output_shape[1:])
    if node.name == input_name:
        return Node(node.name, "input", (), tuple(node.value.shape[1:]))
    if kind == "BoundRelu" or (all_activations and kind in _ACTIVATIONS):
        name = "relu" if kind == "BoundRelu" else "activation"
        return Node(node.name, name, names, shape, activation=_ACTIVATIONS[kind](node))
    if kind in ("BoundAdd", "BoundSub") and len(parents) == 2:
        return Node(node.name, "sum", names, shape, signs=(1, 1 if kind == "BoundAdd" else -1))
    if kind in _BINARY and len(parents) == 1 and not (kind == "BoundDiv" and node.inputs[1] is parents[0]):
        affine = _elementwise(node, node.inputs.index(parents[0]))
        return Node(node.name, "affine", names, shape, affine, form="elementwise")
    if kind in ("BoundLinear", "BoundMatMul") and parents == [node.inputs[0]]:
        return Node(node.name, "affine", names, shape, _linear(node), weight=lambda: _linear_parameters(node))
    if kind in _AFFINE and parents == [node.inputs[0]]:
        if kind == "BoundConv" and len(shape) != 3:
            raise UnsupportedLayerError(f"operation onnx::Conv with {len(shape) - 1} spatial dimensions")
        form, convolution = _FORMS.get(kind, ""), _convolution(node)
        return Node(
            node.name,
            "affine",
            names,
            shape,
            _AFFINE[kind](node),
            form=form,
            convolution=convolution,
            channelwise=kind == "BoundBatchNormalization",
        )
    raise UnsupportedLayerError(
        f"operation onnx::{kind.removeprefix('Bound')} (graph node {node.name!r}) is neither affine nor a ReLU"
    )


def activations(bounded: Any) -> Iterator[Any]:
    """Every node that is not affine, in network order."""
    return (node for node in bounded._modules.values() if type(node).__name__ in _ACTIVATIONS)


def relu_inputs(bounded: Any) -> Iterator[tuple[Any, Any]]:
    """Every ReLU node with the node that feeds it, in network order."""
    for node in activations(bounded):
        if type(node).__name__ == "BoundRelu":
            yield node, node.inputs[0]

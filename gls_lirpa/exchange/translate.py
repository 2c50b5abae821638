"""What onnx2torch reads, rebuilt from plain torch layers that take any batch size.

ONNX files often fix the batch size to 1 and write shapes as constants. The graph is run once in the
shape it declares; what does not depend on the input is a constant from then on, and every other
operation becomes a layer over samples.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from gls_lirpa.errors import UnsupportedLayerError
from gls_lirpa.exchange.affine import affine_form, as_selection
from gls_lirpa.exchange.layers import Sum
from gls_lirpa.exchange.steps import Steps

_KEPT = (nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh)
_NOTHING = ("Identity", "OnnxCopyIdentity", "Dropout", "OnnxDropoutDynamic", "OnnxCast")
_SHAPES = (
    *("Flatten", "OnnxFlatten", "OnnxReshape", "OnnxSqueezeStaticAxes", "OnnxSqueezeDynamicAxes"),
    *("OnnxUnsqueezeStaticAxes", "OnnxUnsqueezeDynamicAxes"),
)
_ARITHMETIC = ("OnnxBinaryMathOperation", "OnnxNeg", "OnnxSum")
_PRODUCTS = ("Linear", "OnnxMatMul", "OnnxGemm")
_SPLITS = ("OnnxSplit", "OnnxSplit13")
_AFFINE = (
    *("OnnxTranspose", "OnnxSlice", "OnnxSliceV9", "OnnxGather", "OnnxConcat", "OnnxExpand", "OnnxTile"),
    *("OnnxPadStatic", "OnnxPadDynamic", "OnnxReduceSumStaticAxes", "OnnxReduceSumDynamicAxes", "OnnxReduceStaticAxes"),
    *("OnnxMean", "Conv1d"),
)
"""Rebuilt from their matrices. What turns out not to be affine, like a maximum, is refused there."""
_MEANS = ("OnnxGlobalAveragePool", "OnnxGlobalAveragePoolWithKnownInputShape")


class _Values(fx.Interpreter):
    """Keeps the value of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)  # type: ignore[no-untyped-call]
        self.of: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.of[n] = super().run_node(n)
        return self.of[n]


def translate(module: fx.GraphModule, example: Tensor) -> nn.Module:
    """A network over batches of samples, from one that takes inputs of the shape of ``example``.

    The first dimension of ``example`` is the batch if it is 1 and not the only one. Raises
    UnsupportedLayerError for operations that have no such layer.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    >>> translate(graph, torch.zeros(1, 1, 2, 2))(torch.zeros(5, 1, 2, 2)).shape
    torch.Size([5, 2])
    """
    return _Translation(module.eval(), example).network()


def batched(shape: tuple[int, ...]) -> bool:
    """Whether the first dimension of a shape is the batch.

    >>> batched((1, 784)), batched((784,)), batched((5, 1))
    (True, False, False)
    """
    return len(shape) > 1 and shape[0] == 1


class _Translation:
    def __init__(self, module: fx.GraphModule, example: Tensor) -> None:
        self._module = module
        self._nodes = list(module.graph.nodes)
        values = _Values(module)
        with torch.no_grad():
            values.run(example)  # type: ignore[no-untyped-call]
        self._constants = values.of
        self._has_batch: dict[fx.Node, bool] = {}
        self._value: dict[fx.Node, int] = {}
        self._pieces: set[fx.Node] = set()
        self._steps = Steps(self._sample(example, batched(tuple(example.shape))), example.dtype)

    def network(self) -> nn.Module:
        for node in self._nodes:
            if node.op == "placeholder":
                self._place(node, 0, batched(tuple(self._constants[node].shape)))
            elif node.op == "output":
                last = node.args[0]
                if not isinstance(last, fx.Node) or last not in self._value:
                    raise UnsupportedLayerError("the network has several outputs or none that depends on its input")
                return self._steps.network(self._value[last])
            elif node.op == "call_function" and node.target is operator.getitem and node.args[0] in self._pieces:
                self._place(node, *self._affine(node))
            elif node.op == "call_module" and any(parent in self._value for parent in node.all_input_nodes):
                self._translate(node, self._module.get_submodule(str(node.target)))
            elif any(parent in self._value for parent in node.all_input_nodes):
                raise _unsupported(node, str(node.target))
        raise UnsupportedLayerError("the network has no output")

    def _translate(self, node: fx.Node, layer: nn.Module) -> None:
        kind = type(layer).__name__
        inputs = node.all_input_nodes
        if kind == "OnnxShape":  # a constant, because shapes are those of one sample from here on
            return
        inside = [parent for parent in inputs if parent in self._value]
        first = inside[0]
        value, with_batch = self._value[first], self._has_batch[first]
        if kind in _SPLITS:  # its readers are the pieces, all of them of the same value
            self._pieces.add(node)
            self._steps.shared.add(value)
            return
        out = self._constants[node]
        if kind in _SHAPES:
            with_batch = batched(tuple(out.shape))
            value = self._steps.reshape(value, self._sample(out, with_batch))
        elif kind in _ARITHMETIC or kind in _PRODUCTS:
            value, with_batch = self._simplest(node, layer, kind, with_batch)
        elif kind in _AFFINE:
            value, with_batch = self._affine(node)
        elif type(layer) in _ACTIVATIONS or (type(layer) in _KEPT and with_batch):
            value = self._steps.add(layer, (value,), self._sample(out, with_batch))
        elif kind in _MEANS and with_batch and out.dim() == 4:
            value = self._steps.add(nn.AdaptiveAvgPool2d(1), (value,), self._sample(out, True))
        elif kind not in _NOTHING or out.dtype != self._constants[first].dtype:
            raise _unsupported(node, kind)
        self._place(node, value, with_batch)

    def _place(self, node: fx.Node, value: int, with_batch: bool) -> None:
        self._value[node], self._has_batch[node] = value, with_batch
        if len(node.users) > 1:
            self._steps.shared.add(value)

    def _sample(self, value: Tensor, with_batch: bool) -> tuple[int, ...]:
        return tuple(value.shape[1:] if with_batch else value.shape)

    def _simplest(self, node: fx.Node, layer: Any, kind: str, with_batch: bool) -> tuple[int, bool]:
        """The node as a plain layer, or from its matrix where shapes change on the way."""
        try:
            return (self._arithmetic if kind in _ARITHMETIC else self._linear)(node, layer, kind), with_batch
        except UnsupportedLayerError as error:
            try:
                return self._affine(node)
            except UnsupportedLayerError:
                raise error from None

    def _affine(self, node: fx.Node) -> tuple[int, bool]:
        """W_1 x_1 + … + b over the values that the node reads, and whether its result has a batch dimension."""
        source = node.args[0] if node.op == "call_function" else node
        assert isinstance(source, fx.Node)
        layer = copy.deepcopy(self._module.get_submodule(str(source.target))).double()
        inside = [parent for parent in source.all_input_nodes if parent in self._value]

        def operation(*values: Tensor) -> Tensor:
            known: dict[Any, Any] = dict(zip(inside, values, strict=True))
            arguments = [known.get(a, _exact(self._constants[a])) if isinstance(a, fx.Node) else a for a in source.args]
            result: Any = layer(*arguments)
            piece: Tensor = result if source is node else result[node.args[1]]
            return piece

        with torch.no_grad():
            matrices, offset = affine_form(operation, [tuple(self._constants[parent].shape) for parent in inside])
        total: int | None = None
        for parent, matrix in zip(inside, matrices, strict=True):
            value = self._steps.reshape(self._value[parent], (matrix.shape[1],))
            last = parent is inside[-1]
            shift = offset if last and bool(offset.any()) else None
            if shift is not None or not as_selection(matrix):
                value = self._steps.linear(value, matrix, shift)
            total = value if total is None else self._steps.add(Sum(), (total, value), (len(offset),))
        assert total is not None
        with_batch = batched(tuple(self._constants[node].shape))
        return self._steps.reshape(total, self._sample(self._constants[node], with_batch)), with_batch

    def _arithmetic(self, node: fx.Node, layer: Any, kind: str) -> int:
        operands = list(node.args)
        operation = {"OnnxNeg": "neg", "OnnxSum": "add"}.get(kind) or layer.math_op_function.__name__
        if operation == "neg":
            return self._steps.elementwise(self._value[node.all_input_nodes[0]], -torch.ones(()), None)
        operation = operation.removeprefix("_onnx_")
        if len(operands) != 2:
            raise _unsupported(node, kind)
        a, b = operands
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            raise _unsupported(node, kind)
        if a in self._value and b in self._value:
            same = self._constants[a].shape == self._constants[b].shape and self._has_batch[a] == self._has_batch[b]
            if operation not in ("add", "sub") or not same:
                raise _unsupported(node, operation)
            inputs = self._value[a], self._value[b]
            return self._steps.add(Sum(1 if operation == "add" else -1), inputs, self._steps.shapes[inputs[0]])
        left = a in self._value
        inside, constant = (a, self._constants[b]) if left else (b, self._constants[a])
        if self._constants[node].shape != self._constants[inside].shape or (operation == "div" and not left):
            raise _unsupported(node, operation)
        constant = constant.double()
        if self._has_batch[inside] and constant.dim() == self._constants[inside].dim():
            constant = constant[0]
        value = self._value[inside]
        if operation == "add":
            return self._steps.elementwise(value, None, constant)
        if operation == "sub":
            return self._steps.elementwise(value, None if left else -torch.ones(()), -constant if left else constant)
        return self._steps.elementwise(value, 1 / constant if operation == "div" else constant, None)

    def _linear(self, node: fx.Node, layer: Any, kind: str) -> int:
        """One matrix times a sample that is a vector, however many dimensions of size 1 it has."""
        if kind == "Linear":
            inside, weight, bias = node.all_input_nodes[0], layer.weight.detach(), layer.bias
        else:
            operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
            inside, other = operands[:2] if operands[0] in self._value else (operands[1], operands[0])
            if other in self._value or any(rest in self._value for rest in operands[2:]):
                raise _unsupported(node, "product of two values that depend on the input")
            weight, bias = self._constants[other], None
            if weight.dim() != 2:
                raise _unsupported(node, "product with more than a matrix")
            if operands[0] is inside:
                weight = weight if kind == "OnnxGemm" and layer.trans_b else weight.t()
            if kind == "OnnxGemm":
                if layer.trans_a or operands[0] is not inside:
                    raise _unsupported(node, "Gemm with a transposed input")
                weight = weight * layer.alpha
                bias = self._constants[operands[2]].flatten() * layer.beta if len(operands) > 2 else None
                bias = None if bias is None else torch.broadcast_to(bias, (len(weight),))
        value = self._value[inside]
        size = torch.Size(self._steps.shapes[value]).numel()
        if size != weight.shape[1]:
            raise _unsupported(node, "matrix times several vectors")
        result = self._steps.linear(
            self._steps.reshape(value, (size,)), weight, None if bias is None else bias.detach()
        )
        return self._steps.reshape(result, self._sample(self._constants[node], self._has_batch[inside]))


def _exact(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _unsupported(node: fx.Node, what: str) -> UnsupportedLayerError:
    name = what.removeprefix("Onnx")
    return UnsupportedLayerError(f"operation {name!r} (graph node {node.name!r}) is not supported here")

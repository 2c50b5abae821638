"""ONNX graphs in a form that onnx2torch reads: a current operator set, inference only, constants folded."""

from __future__ import annotations

import importlib
from typing import Any

from gls_lirpa.exchange.constants import inline_constants, keep_nodes

OPSET = 13
"""onnx2torch knows every operator of this version that it knows at all."""

NEWEST = 17
"""The newest set in which it knows most of them; later ones renumber nearly all."""

_FOLDED = (
    *("Reshape", "Transpose", "Flatten", "Unsqueeze", "Squeeze", "Cast", "Identity", "Concat", "Slice", "Gather"),
    *("Add", "Sub", "Mul", "Div", "Neg", "MatMul", "Shape"),
)
"""None of these makes a tensor much larger than its inputs."""

_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)
"""What onnx raises where it cannot convert a graph or evaluate a node."""


def modern(proto: Any) -> Any:
    """``proto`` for inference, in a current operator set and with constants folded; what cannot be converted stays.

    >>> from onnx import TensorProto, helper
    >>> nodes = [helper.make_node("Dropout", ["x"], ["d"]), helper.make_node("Flatten", ["d"], ["y"])]
    >>> info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    >>> graph = helper.make_graph(nodes, "g", info[:1], info[1:])
    >>> old = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 7)], ir_version=3)
    >>> new = modern(old)
    >>> [node.op_type for node in new.graph.node], new.opset_import[0].version
    (['Flatten'], 13)
    """
    _constants_are_no_inputs(proto)
    _bypass(proto, ("Dropout", "Identity"))
    proto = _converted(proto)
    inline_constants(proto)
    _fold(proto)
    _bypass(proto, ("Cast",))
    return proto


def _constants_are_no_inputs(proto: Any) -> None:
    """Before IR version 4 every initialiser was an input as well, and onnx insists on it there."""
    known = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in known]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.ir_version = max(proto.ir_version, 4)


def _bypass(proto: Any, kinds: tuple[str, ...]) -> None:
    """Let readers of a node that changes nothing in inference read its input instead.

    A node stays where its result is an output of the graph, where its second result (Dropout's mask) is
    read, or where it changes the type of its input.
    """
    graph = proto.graph
    if not any(node.op_type in kinds for node in graph.node):
        return
    outputs = {value.name for value in graph.output}
    read = {name for node in graph.node for name in node.input} | outputs
    types = _types(proto) if "Cast" in kinds else {}
    source: dict[str, str] = {}
    kept = []
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = source.get(name, name)
        same = node.op_type != "Cast" or _same_type(node, types)
        needed = node.output[0] in outputs or any(name in read for name in node.output[1:] if name)
        if node.op_type in kinds and same and not needed:
            source[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _types(proto: Any) -> dict[str, int]:
    onnx: Any = importlib.import_module("onnx")
    graph = proto.graph
    try:
        graph = onnx.shape_inference.infer_shapes(proto).graph
    except (onnx.shape_inference.InferenceError, *_FAILURES):
        pass
    known = {v.name: v.type.tensor_type.elem_type for v in [*graph.value_info, *graph.input, *graph.output]}
    return known | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _same_type(node: Any, types: dict[str, int]) -> bool:
    target = next((attribute.i for attribute in node.attribute if attribute.name == "to"), None)
    return target is not None and types.get(node.input[0]) == target


def _converted(proto: Any) -> Any:
    onnx: Any = importlib.import_module("onnx")
    version = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), OPSET)
    if OPSET <= version <= NEWEST:
        return proto
    try:
        return onnx.version_converter.convert_version(proto, OPSET)
    except (onnx.version_converter.ConvertError, *_FAILURES):
        return _relabelled(proto) if version > NEWEST else proto


def _relabelled(proto: Any) -> Any:
    """Later sets mostly admit more types. The graph as one of the older set, if it is valid there; what
    it computes is compared with onnxruntime's answers for the original in any case."""
    onnx: Any = importlib.import_module("onnx")
    older = onnx.ModelProto()
    older.CopyFrom(proto)
    for entry in older.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = NEWEST
    try:
        onnx.checker.check_model(older)
    except onnx.checker.ValidationError:
        return proto
    return older


def _fold(proto: Any) -> None:
    """Replace nodes whose inputs are all constants by their results."""
    onnx: Any = importlib.import_module("onnx")
    reference: Any = importlib.import_module("onnx.reference")
    graph = proto.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    arrays: dict[str, Any] = {}
    outputs = {value.name for value in graph.output}
    kept = []
    for node in graph.node:
        result = None
        foldable = node.op_type in _FOLDED and len(node.output) == 1 and node.output[0] not in outputs
        if foldable and all(name in tensors or name in arrays for name in node.input if name):
            needed = [name for name in node.input if name and name not in arrays]
            arrays |= {name: onnx.numpy_helper.to_array(tensors[name]) for name in needed}
            result = _evaluated(node, arrays, proto.opset_import, reference)
        if result is None:
            kept.append(node)
        else:
            arrays[node.output[0]] = result
            graph.initializer.append(onnx.numpy_helper.from_array(result, node.output[0]))
    keep_nodes(graph, kept)


def _evaluated(node: Any, arrays: dict[str, Any], opsets: Any, reference: Any) -> Any:
    versions = {entry.domain: entry.version for entry in opsets}
    try:
        return reference.ReferenceEvaluator(node, opsets=versions).run(
            None, {name: arrays[name] for name in node.input if name}
        )[0]
    except _FAILURES:
        return None

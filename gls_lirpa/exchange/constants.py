"""ONNX graphs whose constants are all initialisers."""

from __future__ import annotations

import importlib
from typing import Any


def inline_constants(proto: Any) -> None:
    """Turn Constant nodes and Identity copies of initialisers into initialisers, in place.

    Initialisers that are unused then are dropped. torch's exporter stores equal tensors once and refers to them
    through Identity; not every reader knows a bias that is the output of a node.

    >>> from onnx import TensorProto, helper
    >>> value = helper.make_tensor("v", TensorProto.FLOAT, [1], [2.0])
    >>> nodes = [helper.make_node("Identity", ["v"], ["w"]), helper.make_node("Add", ["x", "w"], ["y"])]
    >>> info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    >>> proto = helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:], [value]))
    >>> inline_constants(proto)
    >>> [node.op_type for node in proto.graph.node], [tensor.name for tensor in proto.graph.initializer]
    (['Add'], ['w'])
    """
    onnx: Any = importlib.import_module("onnx")
    graph = proto.graph
    known = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    kept = []
    for node in graph.node:
        tensor = None
        if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].name == "value":
            tensor = node.attribute[0].t
        elif node.op_type == "Identity":
            tensor = known.get(node.input[0])
        if tensor is None or node.output[0] in outputs:
            kept.append(node)
            continue
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        copy.name = node.output[0]
        known[copy.name] = copy
        graph.initializer.append(copy)
    keep_nodes(graph, kept)


def keep_nodes(graph: Any, kept: list[Any]) -> None:
    """Drop all other nodes of a graph, and initialisers that are unused then; nothing where all are kept."""
    if len(kept) == len(graph.node):
        return
    used = {name for node in kept for name in node.input} | {value.name for value in graph.output}
    initialisers = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(initialisers)

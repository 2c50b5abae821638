"""ONNX graphs as other tools write them: fixed batch size, constants as nodes, biases as Add."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

node = helper.make_node
Arrays = dict[str, np.ndarray]


def save(
    file: Path,
    nodes: list[Any],
    constants: Arrays,
    shape: list[Any],
    out: list[Any],
    *,
    kind: int = TensorProto.FLOAT,
    opset: int = 13,
) -> Path:
    """Below operator set 9 every constant is an input as well, as files of that time have it."""
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    also = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors] if opset < 9 else []
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", kind, shape), *also],
        [helper.make_tensor_value_info("y", kind, out)],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 3 if opset < 9 else 10 if opset > 17 else 8
    onnx.save(model, file)
    return file


def _numbers(seed: int) -> Callable[..., np.ndarray]:
    generator = np.random.default_rng(seed)
    return lambda *shape: generator.normal(size=shape).astype(np.float32)


def _dense(shape: list[int], out: list[int], first: list[Any], **more: np.ndarray) -> Callable[[Path], Path]:
    n = _numbers(0)

    def write(file: Path) -> Path:
        nodes = [
            *first,
            node("MatMul", ["s", "W"], ["a"]),
            node("Add", ["b", "a"], ["c"]),
            node("Relu", ["c"], ["d"]),
            node("MatMul", ["d", "V"], ["e"]),
            node("Add", ["e", "q"], ["y"]),
        ]
        return save(file, nodes, {"W": n(5, 8), "b": n(8), "V": n(8, 3), "q": n(3), **more}, shape, out)

    return write


def _column(file: Path) -> Path:
    n = _numbers(1)
    nodes = [
        node("MatMul", ["W", "x"], ["a"]),
        node("Add", ["a", "b"], ["c"]),
        node("Relu", ["c"], ["d"]),
        node("MatMul", ["V", "d"], ["y"]),
    ]
    return save(file, nodes, {"W": n(8, 5), "b": n(8, 1), "V": n(3, 8)}, [5, 1], [3, 1])


def _convolution(file: Path) -> Path:
    """Normalised per channel, BatchNorm, a reshape with the batch size written in."""
    n = _numbers(2)
    nodes = [
        node("Sub", ["x", "mean"], ["s"]),
        node("Div", ["s", "std"], ["t"]),
        node("Conv", ["t", "K", "k"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["a", "g", "h", "mu", "var"], ["n"]),
        node("Relu", ["n"], ["d"]),
        node("Reshape", ["d", "shape"], ["e"]),
        node("Gemm", ["e", "V", "q"], ["y"], transB=1),
    ]
    constants = {"mean": n(1, 2, 1, 1), "std": np.abs(n(1, 2, 1, 1)) + 0.5, "K": n(3, 2, 3, 3), "k": n(3), "g": n(3)}
    constants |= {
        "h": n(3),
        "mu": n(3),
        "var": np.abs(n(3)) + 0.1,
        "shape": np.array([1, -1]),
        "V": n(4, 48),
        "q": n(4),
    }
    return save(file, nodes, constants, [1, 2, 4, 4], [1, 4])


def _mean_image(file: Path) -> Path:
    n = _numbers(3)
    nodes = [
        node("Sub", ["x", "mean"], ["s"]),
        node("Div", ["s", "std"], ["t"]),
        node("Conv", ["t", "K"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["d"]),
        node("Flatten", ["d"], ["e"]),
        node("Gemm", ["e", "V", "q"], ["y"], transB=1),
    ]
    constants = {"mean": n(2, 4, 4), "std": np.float32([[2.0]]), "K": n(3, 2, 3, 3), "V": n(4, 48), "q": n(1, 4)}
    return save(file, nodes, constants, ["batch", 2, 4, 4], ["batch", 4])


def _vector_to_image(file: Path) -> Path:
    """A flat input, and a flattening computed from the shape, as torch's exporter writes ``view``."""
    n = _numbers(4)
    nodes = [
        node("Reshape", ["x", "image"], ["s"]),
        node("Conv", ["s", "K"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", ["a"], ["d"]),
        node("Shape", ["d"], ["z"]),
        node("Gather", ["z", "zero"], ["z0"]),
        node("Unsqueeze", ["z0", "axis"], ["z1"]),
        node("Concat", ["z1", "rest"], ["shape"], axis=0),
        node("Reshape", ["d", "shape"], ["e"]),
        node("Gemm", ["e", "V"], ["y"], transB=1),
    ]
    constants = {"image": np.array([-1, 1, 4, 4]), "K": n(3, 1, 3, 3), "zero": np.array(0), "axis": np.array([0])}
    return save(file, nodes, constants | {"rest": np.array([-1]), "V": n(4, 12)}, ["batch", 16], ["batch", 4])


def _residual(file: Path) -> Path:
    n = _numbers(5)
    nodes = [
        node("Conv", ["x", "K"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["a", "g", "h", "mu", "var"], ["n"]),
        node("Relu", ["n"], ["d"]),
        node("Conv", ["d", "L"], ["b"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Add", ["b", "d"], ["r"]),
        node("Dropout", ["r"], ["u"]),
        node("Relu", ["u"], ["v"]),
        node("GlobalAveragePool", ["v"], ["p"]),
        node("Flatten", ["p"], ["e"]),
        node("Gemm", ["e", "V", "q"], ["f"], transB=1, alpha=2.0, beta=0.5),
        node("Neg", ["f"], ["y"]),
    ]
    constants = {"K": n(3, 2, 3, 3), "L": n(3, 3, 3, 3), "g": n(3), "h": n(3), "mu": n(3), "var": np.abs(n(3)) + 0.1}
    return save(file, nodes, constants | {"V": n(4, 3), "q": n(4)}, [1, 2, 4, 4], [1, 4])


FLATTEN = [node("Flatten", ["x"], ["f"], axis=1), node("Sub", ["f", "mean"], ["s"])]
MEAN = np.linspace(-1, 1, 5, dtype=np.float32)

NETS: dict[str, Callable[[Path], Path]] = {
    "flattened": _dense([1, 1, 1, 5], [1, 3], FLATTEN, mean=MEAN),
    "four dimensions": _dense([1, 1, 1, 5], [1, 1, 1, 3], [node("Sub", ["x", "mean"], ["s"])], mean=MEAN),
    "no batch": _dense([5], [3], [node("Identity", ["x"], ["s"])]),
    "column": _column,
    "convolution": _convolution,
    "mean image": _mean_image,
    "vector to image": _vector_to_image,
    "residual": _residual,
}

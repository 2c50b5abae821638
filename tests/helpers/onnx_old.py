"""ONNX graphs like those of published benchmarks: old and new operator sets, no batch, affine shuffling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.helpers.onnx_nets import Arrays, node, save

Write = Callable[[Path], Path]


def _numbers(seed: int) -> Callable[..., np.ndarray]:
    generator = np.random.default_rng(seed)
    return lambda *shape: generator.normal(size=shape).astype(np.float32)


def _collision(file: Path) -> Path:
    """Collision avoidance: Sub, Flatten-1, MatMul and Add, with every constant among the inputs."""
    n = _numbers(0)
    nodes = [node("Sub", ["x", "mean"], ["s"]), node("Flatten", ["s"], ["h0"], axis=1)]
    constants = {"mean": n(1, 1, 1, 5)}
    widths = [5, 12, 12, 5]
    for i in range(3):
        nodes += [node("MatMul", [f"h{i}", f"W{i}"], [f"a{i}"]), node("Add", [f"a{i}", f"b{i}"], [f"c{i}"])]
        nodes += [node("Relu", [f"c{i}"], [f"h{i + 1}"])] if i < 2 else []
        constants |= {f"W{i}": n(widths[i], widths[i + 1]) / 2, f"b{i}": n(widths[i + 1])}
    nodes[-1].output[0] = "y"
    return save(file, nodes, constants, [1, 1, 1, 5], [1, 5], opset=8)


def _useful_life(file: Path) -> Path:
    """Remaining useful life: convolutions, Dropout-7 before the last one, Flatten-1."""
    n = _numbers(1)
    nodes = [
        node("Conv", ["x", "K", "k"], ["a"], kernel_shape=[3, 1], pads=[1, 0, 1, 0]),
        node("Relu", ["a"], ["b"]),
        node("Dropout", ["b"], ["c"], ratio=0.5),
        node("Conv", ["c", "L", "l"], ["d"], kernel_shape=[6, 1]),
        node("Flatten", ["d"], ["e"]),
        node("Gemm", ["e", "V", "q"], ["y"], transB=1),
    ]
    constants = {"K": n(3, 1, 3, 1), "k": n(3), "L": n(2, 3, 6, 1), "l": n(2), "V": n(2, 8), "q": n(2)}
    return save(file, nodes, constants, [1, 1, 6, 4], [1, 2], opset=8)


def _gemm(shape: list[int], *, opset: int = 11, **attributes: float) -> Write:
    """A Gemm with any transposes over an input that is a row or a column."""

    def write(file: Path) -> Path:
        n = _numbers(2)
        weight = n(6, 4) if attributes.get("transB") else n(4, 6)
        nodes = [
            node("Gemm", ["x", "W", "b"], ["a"], **attributes),
            node("Relu", ["a"], ["c"]),
            node("MatMul", ["c", "V"], ["y"]),
        ]
        return save(file, nodes, {"W": weight, "b": n(1, 6), "V": n(6, 3)}, shape, [1, 3], opset=opset)

    return write


def _pieces(opset: int) -> Write:
    """A control network: the state split in two, one part squeezed and scaled, both joined again."""

    def write(file: Path) -> Path:
        n = _numbers(3)
        own = {"axes": [1]} if opset < 13 else {}
        more: Arrays = {} if opset < 13 else {"one": np.array([1]), "parts": np.array([2, 4])}
        axes = [] if opset < 13 else ["one"]
        split = {"split": [2, 4]} if opset < 13 else {}
        nodes = [
            node("Sub", ["x", "mean"], ["s"]),
            node("Split", ["s", *(["parts"] if opset >= 13 else [])], ["p", "q"], axis=1, **split),
            node("Unsqueeze", ["q", *axes], ["q1"], **own),
            node("Squeeze", ["q1", *axes], ["q2"], **own),
            node("Mul", ["q2", "scale"], ["q3"]),
            node("Concat", ["q3", "p", "p"], ["j"], axis=1),
            node("MatMul", ["j", "W"], ["a"]),
            node("Relu", ["a"], ["c"]),
            node("MatMul", ["c", "V"], ["y"]),
        ]
        constants = {"mean": n(6), "scale": n(4), "W": n(8, 9), "V": n(9, 3), **more}
        return save(file, nodes, constants, ["batch", 6], ["batch", 3], opset=opset)

    return write


def _shuffled(file: Path) -> Path:
    """Channels last, turned to channels first; rows cut off; a mean over what is left."""
    n = _numbers(4)
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        node("Conv", ["t", "K"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"]),
        node("Slice", ["b", "from", "to", "axis"], ["c"]),
        node("ReduceMean", ["c"], ["d"], axes=[3], keepdims=0),
        node("Transpose", ["d"], ["e"], perm=[0, 2, 1]),
        node("Flatten", ["e"], ["f"]),
        node("Gemm", ["f", "V"], ["y"]),
    ]
    constants = {"K": n(3, 2, 3, 3), "from": np.array([1]), "to": np.array([4]), "axis": np.array([2]), "V": n(9, 3)}
    return save(file, nodes, constants, [1, 4, 4, 2], [1, 3], opset=11)


def _several_vectors(file: Path) -> Path:
    """Without a batch: a matrix of two rows, each times the same matrix; the bias reaches both."""
    n = _numbers(5)
    nodes = [
        node("MatMul", ["x", "W"], ["a"]),
        node("Add", ["a", "b"], ["c"]),
        node("Relu", ["c"], ["d"]),
        node("Reshape", ["d", "flat"], ["e"]),
        node("MatMul", ["e", "V"], ["y"]),
    ]
    constants = {"W": n(3, 4), "b": n(4), "flat": np.array([-1]), "V": n(8, 3)}
    return save(file, nodes, constants, [2, 3], [3], opset=9)


def _folded(opset: int) -> Write:
    """Weights computed from constants: transposed, reshaped, scaled; a Cast that changes nothing."""

    def write(file: Path) -> Path:
        n = _numbers(6)
        nodes = [
            node("Cast", ["x"], ["s"], to=1),
            node("Transpose", ["W"], ["W1"], perm=[1, 0]),
            node("Mul", ["W1", "two"], ["W2"]),
            node("Reshape", ["b", "flat"], ["b1"]),
            node("MatMul", ["s", "W2"], ["a"]),
            node("Add", ["a", "b1"], ["c"]),
            node("Relu", ["c"], ["d"]),
            node("Div", ["d", "std"], ["e"]),
            node("Flatten", ["e"], ["f"]),
            node("Gemm", ["f", "V", "q"], ["y"], alpha=0.5, beta=2.0),
        ]
        constants = {"W": n(7, 5), "two": np.float32(2), "b": n(7, 1), "flat": np.array([-1]), "V": n(7, 3), "q": n(3)}
        return save(file, nodes, constants | {"std": np.abs(n(7)) + 0.5}, ["n", 5], ["n", 3], opset=opset)

    return write


OLD: dict[str, Write] = {
    "collision avoidance": _collision,
    "useful life": _useful_life,
    "gemm": _gemm([1, 4]),
    "gemm B": _gemm([1, 4], transB=1),
    "gemm A": _gemm([4, 1], transA=1, alpha=0.5),
    "gemm A and B": _gemm([4, 1], transA=1, transB=1, beta=-2.0),
    "gemm 7": _gemm([1, 4], opset=7, transB=1),
    "pieces 11": _pieces(11),
    "pieces 13": _pieces(13),
    "shuffled": _shuffled,
    "several vectors": _several_vectors,
    "folded 9": _folded(9),
    "folded 21": _folded(21),
}

"""The operations of a traced network that may be bounded: one row each, and nothing else.

A row says which relaxations bound the operation rightly and with which attributes; it was put there
because the tests sample, attack and enumerate it. What auto_LiRPA bounds wrongly (overlapping average
pooling, slopes outside [0, 1], …) has no row: ``rewrite`` expresses it by operations that have one.
The rows are those of both auto_LiRPA versions; where one of them cannot do a row, it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gls_lirpa.engine.graph import constant_value, perturbed_nodes
from gls_lirpa.errors import UnsupportedLayerError

LINEAR = ("ibp", "hbox", "crown-ibp", "crown", "crown-plain", "alpha-crown", "alpha-crown-step")
"""Every relaxation: what affine operations and ReLUs allow."""

SMOOTH = ("ibp", "crown-ibp", "crown", "crown-plain")
"""The relaxations in which auto_LiRPA bounds other activations too."""

BACKWARD = ("crown-ibp", "crown", "crown-plain")

SUPPORTED = (
    "Linear, Conv2d, ConvTranspose2d, BatchNorm, average pooling, padding, slices, concatenation, permutations, sums, "
    "means, Flatten, ReLU, LeakyReLU, Hardtanh, ReLU6, clamp, normalisation and other elementwise affine operations; "
    "and except in hbox and alpha-crown MaxPool2d, Sigmoid and Tanh"
)


@dataclass(frozen=True)
class Attribute:
    """A condition on a node: what it is called, what is accepted, and in which relaxations it is asked."""

    name: str
    accepted: str
    value: Callable[[Any], Any]
    holds: Callable[[Any], bool]
    relaxations: tuple[str, ...] = LINEAR


@dataclass(frozen=True)
class Operator:
    """One row of the table."""

    name: str
    relaxations: tuple[str, ...] = LINEAR
    attributes: tuple[Attribute, ...] = field(default=())


def _of(name: str, default: Any) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        return (node.attr or {}).get(name, default)

    return read


def _equals(name: str, attribute: str, expected: Any) -> Attribute:
    read = _of(attribute, expected)
    return Attribute(name, str(expected), read, lambda node: read(node) == expected)


def _dimensions(node: Any) -> int:
    return len(node.output_shape)


def _rests(node: Any) -> tuple[int, ...]:
    image = node.inputs[0].output_shape[2:]
    return tuple(int(side) % int(size) for side, size in zip(image, node.kernel_size, strict=True))


def _plain_product(node: Any) -> bool:
    given = node.attr or {}
    return given.get("alpha", 1.0) == 1.0 and given.get("beta", 1.0) == 1.0 and not given.get("transA", 0)


_IMAGE = Attribute("rank", "images (N, C, H, W)", _dimensions, lambda n: _dimensions(n) == 4)
_SYMMETRIC = Attribute(
    "padding",
    "the same at both ends",
    _of("pads", (0, 0, 0, 0)),
    lambda n: list(_of("pads", (0, 0, 0, 0))(n))[:2] == list(_of("pads", (0, 0, 0, 0))(n))[2:],
)
_PRODUCT = (
    Attribute("factors", "alpha = beta = 1 and transA = 0", lambda n: n.attr, _plain_product),
    Attribute("rank", "one row of features per sample", _dimensions, lambda n: _dimensions(n) == 2),
)
_TRANSPOSED = (
    _IMAGE,
    _equals("padding", "pads", [0, 0, 0, 0]),
    _equals("output padding", "output_padding", [0, 0]),
    _equals("dilation", "dilations", [1, 1]),
    _equals("groups", "group", 1),
)
_POOLING = (
    _IMAGE,
    _SYMMETRIC,
    _equals("dilation", "dilations", [1, 1]),
    _equals("ceil_mode", "ceil_mode", 0),
    Attribute(
        "stride",
        "that of the kernel",
        lambda n: list(n.stride),
        lambda n: list(n.stride) == list(n.kernel_size),
        BACKWARD,
    ),
    Attribute("padding", "none", lambda n: list(n.padding), lambda n: not any(n.padding), BACKWARD),
    Attribute("rest of the image", "as many rows as columns", _rests, lambda n: len(set(_rests(n))) == 1, BACKWARD),
)

_POSITIVE = Attribute(
    "the smallest divisor",
    "above 0; multiply by the reciprocal instead",
    lambda n: float(constant_value(n.inputs[1]).min()),
    lambda n: bool((constant_value(n.inputs[1]) > 0).all()),
    ("ibp", "crown-ibp"),
)

OPERATORS: Mapping[str, Operator] = {
    "BoundRelu": Operator("ReLU"),
    "BoundLinear": Operator("Linear", attributes=_PRODUCT),
    "BoundMatMul": Operator("Linear without bias", attributes=_PRODUCT),
    "BoundConv": Operator("Conv2d", attributes=(_IMAGE, _SYMMETRIC)),
    "BoundConvTranspose": Operator("ConvTranspose2d", attributes=_TRANSPOSED),
    "BoundBatchNormalization": Operator("BatchNorm"),
    "BoundGlobalAveragePool": Operator("global average pooling", attributes=(_IMAGE,)),
    "BoundFlatten": Operator("Flatten", attributes=(_equals("axis", "axis", 1),)),
    "BoundReshape": Operator("Reshape"),
    "BoundNeg": Operator("negation"),
    "BoundAdd": Operator("sum"),
    "BoundSub": Operator("difference"),
    "BoundMul": Operator("product with a constant"),
    "BoundDiv": Operator("quotient by a constant", attributes=(_POSITIVE,)),
    "BoundMaxPool": Operator("MaxPool2d", SMOOTH, _POOLING),
    "BoundSigmoid": Operator("Sigmoid", SMOOTH),
    "BoundTanh": Operator("Tanh", SMOOTH),
}
"""The table, by the node's class in auto_LiRPA."""


def check_operations(bounded: Any, relaxation: str | None = None) -> None:
    """Raise UnsupportedLayerError for what has no row, or not with these attributes or in this relaxation.

    Without a relaxation, what none of them could bound.
    """
    for node, _ in perturbed_nodes(bounded):
        if node.name == bounded.input_name[0]:
            continue
        kind = type(node).__name__
        name = f"operation onnx::{kind.removeprefix('Bound')}"
        row = OPERATORS.get(kind)
        if row is None:
            raise UnsupportedLayerError(f"{name} is not supported")
        if relaxation is not None and relaxation not in row.relaxations:
            raise UnsupportedLayerError(f"{name} is bounded by {', '.join(row.relaxations)} alone")
        for attribute in row.attributes:
            asked = set(attribute.relaxations) & set(row.relaxations)
            if (relaxation in asked if relaxation else asked == set(row.relaxations)) and not attribute.holds(node):
                raise UnsupportedLayerError(
                    f"{name} with {attribute.name} {attribute.value(node)} (accepted: {attribute.accepted})"
                )

"""HBox: hybrid zonotopes with one shared coefficient tensor.

Every value is written z = c + Σᵢ Aᵢ eᵢ + b with |eᵢ| ≤ rᵢ (the input's error terms, r the radius of
the input box) and |b| ≤ β elementwise, so that z ∈ [c − R, c + R] with R = Σᵢ |Aᵢ| rᵢ + β.

- Affine layers act exactly on c and A, and as |W| on β.
- A stable ReLU is exact. An unstable one forgets its error terms and becomes the box [0, u]:
  c = u/2, A = 0, β = u/2.

Induction gives R ≤ the IBP radius: |W A| r ≤ |W| |A| r, and [0, u] is IBP's own image.

Until the first ReLU A is the same for every sample, and is computed once per call, not once per
sample; the per-sample radii only enter when R is evaluated. Behind convolutions A is kept as the
window of input pixels that a neuron sees (``hbox_windows``), and otherwise in full (``hbox_dense``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.engine.graph import AffineMap, Node
from gls_lirpa.engine.hbox_dense import Coefficients, Dense
from gls_lirpa.engine.hbox_windows import Windows


@dataclass(frozen=True)
class _Zonotope:
    """Centre (B, *s), coefficients of the error terms, and box radius (B, *s), or None where it is 0."""

    center: Tensor
    coefficients: Coefficients
    radius: Tensor | None

    def interval(self, input_radius: Tensor) -> tuple[Tensor, Tensor]:
        total = self.coefficients.total_radius(input_radius)
        if self.radius is not None:
            total = total + self.radius
        return self.center - total, self.center + total


def _affine(value: _Zonotope, node: Node, apply: AffineMap) -> _Zonotope:
    return _Zonotope(
        apply(value.center, False, True),
        value.coefficients.through(node, apply),
        None if value.radius is None else apply(value.radius, True, False),
    )


def _sum(first: _Zonotope, second: _Zonotope, sign: int) -> _Zonotope:
    radii = [r for r in (first.radius, second.radius) if r is not None]
    center = first.center + sign * second.center
    if radii and len(radii) == 1:  # of the shape of the sum, where one of the two is broadcast
        radii = [radii[0].expand_as(center)]
    return _Zonotope(
        center,
        first.coefficients.plus(second.coefficients, sign),
        sum(radii[1:], radii[0]) if radii else None,
    )


def _relu(value: _Zonotope, lower: Tensor, upper: Tensor) -> _Zonotope:
    active = lower >= 0
    # Written so that NaN counts as unstable and stays NaN.
    unstable = ~(active | (upper <= 0))
    half = torch.where(unstable, upper / 2, 0.0)
    radius = half if value.radius is None else half + torch.where(active, value.radius, 0.0)
    return _Zonotope(torch.where(active, value.center, half), value.coefficients.scaled(active.to(lower.dtype)), radius)


def _specified(value: _Zonotope, node: Node | None, spec: Tensor) -> _Zonotope:
    """The rows of ``spec`` times a final linear layer, merged into one matrix per sample."""
    if node is not None and node.weight is not None:
        weight, bias = node.weight()
        matrix = spec @ weight
        offset = 0.0 if bias is None else spec @ bias
    else:
        matrix, offset = spec, 0.0
    return _Zonotope(
        (matrix @ value.center.unsqueeze(-1)).squeeze(-1) + offset,
        value.coefficients.contracted(matrix),
        None if value.radius is None else (matrix.abs() @ value.radius.unsqueeze(-1)).squeeze(-1),
    )


def hbox_bounds(nodes: Sequence[Node], box: Box, spec: Tensor, *, windows: bool = True) -> Bounds:
    """Bounds of ``spec`` · f over ``box``, and of every pre-activation; without ``windows`` all in full."""
    center = box.center
    input_radius = (box.upper - box.lower) / 2
    identity: Coefficients = Windows.identity(center) if windows and center.dim() == 4 else Dense.identity(center)
    values: dict[str, _Zonotope] = {}
    intermediate: dict[str, tuple[Tensor, Tensor]] = {}
    last = nodes[-1]
    for node in nodes:
        if node is last and node.weight is not None:
            break
        values[node.name] = _propagate(node, values, intermediate, center, identity, input_radius)
    if last.weight is not None:
        final = _specified(values[last.inputs[0]], last, spec)
    else:
        final = _specified(values[last.name], None, spec)
    return Bounds(final.interval(input_radius)[0], intermediate)


def _propagate(
    node: Node,
    values: dict[str, _Zonotope],
    intermediate: dict[str, tuple[Tensor, Tensor]],
    center: Tensor,
    identity: Coefficients,
    input_radius: Tensor,
) -> _Zonotope:
    if node.kind == "input":
        return _Zonotope(center, identity, None)
    value = values[node.inputs[0]]
    if node.kind == "relu":
        bounds = value.interval(input_radius)
        intermediate[node.inputs[0]] = bounds
        return _relu(value, *bounds)
    if node.kind == "sum":
        return _sum(value, values[node.inputs[1]], node.signs[1])
    if node.affine is None:
        raise TypeError(f"node {node.name!r} of kind {node.kind!r} has no affine map")
    return _affine(value, node, node.affine)

"""A network over one box, written in its unstable neurons alone.

Over a box most ReLUs are stable: their neuron is a linear function or zero. What is left is

    z_k = W_k [t; v_1; …; v_{k−1}] + b_k,    v_k = max(z_k, 0),    rows = W [t; v_1; …; v_K] + b,

with t ∈ [−1, 1] the position in the box (x = centre + radius · t; pixels of radius 0 drop out) and one
z and v per unstable neuron. Branch and bound, the LP of a leaf and the MILP all read this form, which
is kept in float64: rounding of the network's own float32 arithmetic is no part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box
from gls_lirpa.base.normalize import Normalize
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.graph import Node
from gls_lirpa.errors import ConfigError, EngineError
from gls_lirpa.relaxations import RELAXATIONS

WIDENING = 1e-7
"""Relative widening of pre-activation bounds. They are float64, so this covers their rounding (1e-13)
and keeps a neuron whose bound is zero up to the LP solver's tolerances among the unstable ones."""

_CHUNK_VALUES = 2**24
"""Values of the widest layer that a chunk of columns may occupy: 128 MiB of float64."""


class FormTooLargeError(EngineError):
    """The split form of a box would need more memory than was set for it."""


@dataclass(frozen=True)
class Layer:
    """Unstable neurons of one ReLU: z = ``weight`` · [t; earlier v] + ``offset`` ∈ [``lower``, ``upper``].

    ``name`` and ``index``: the node that feeds the ReLU and the flat positions of the neurons in it.
    """

    name: str
    index: Tensor
    weight: Tensor
    offset: Tensor
    lower: Tensor
    upper: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def both_sides(self) -> tuple[Tensor, Tensor]:
        """Rows whose minima are the neurons' lower bounds, then minus the upper ones: weights and offsets."""
        return torch.cat([self.weight, -self.weight]), torch.cat([self.offset, -self.offset])


@dataclass(frozen=True)
class SplitForm:
    """See the module. ``weight`` (rows, inputs + neurons) and ``offset`` (rows,) give the rows asked for."""

    center: Tensor
    radius: Tensor
    movable: Tensor
    layers: tuple[Layer, ...]
    weight: Tensor
    offset: Tensor

    @property
    def inputs(self) -> int:
        return len(self.movable)

    @property
    def neurons(self) -> int:
        return sum(len(layer) for layer in self.layers)

    @property
    def lower(self) -> Tensor:
        return torch.cat([layer.lower for layer in self.layers]) if self.layers else self.offset[:0]

    @property
    def upper(self) -> Tensor:
        return torch.cat([layer.upper for layer in self.layers]) if self.layers else self.offset[:0]

    def point(self, t: Tensor) -> Tensor:
        """Inputs of the network at positions ``t`` (n, inputs)."""
        x = self.center.flatten().expand(len(t), -1).clone()
        x[:, self.movable] += self.radius.flatten()[self.movable] * t.to(x)
        return x.reshape(len(t), *self.center.shape)

    def evaluate(self, t: Tensor) -> Tensor:
        """The rows at positions ``t``, exactly: (n, rows).

        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> box = Box(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
        >>> form = FormBuilder(model, box.lower).form(box, torch.eye(3))
        >>> t = torch.rand(5, form.inputs) * 2 - 1
        >>> torch.allclose(form.evaluate(t).float(), model(form.point(t).float()), atol=1e-5)
        True
        """
        known = t.to(self.weight)
        for layer in self.layers:
            known = torch.cat([known, (known @ layer.weight.t() + layer.offset).clamp(min=0)], 1)
        return known @ self.weight.t() + self.offset

    def with_layer(self, number: int, lower: Tensor, upper: Tensor) -> SplitForm:
        """Tighter bounds for one layer; neurons that they make stable are removed from the form.

        An active one is replaced by its own linear function wherever it was used: v = z.
        """
        layer = self.layers[number]
        lower, upper = torch.maximum(layer.lower, lower), torch.minimum(layer.upper, upper)
        active, kept = lower >= 0, (lower < 0) & (upper > 0)
        start = self.inputs + sum(len(before) for before in self.layers[:number])
        columns = slice(start, start + len(layer))

        def without(weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
            used = weight[:, columns][:, active]
            head = weight[:, :start] + used @ layer.weight[active]
            rest = weight[:, columns.stop :]
            return torch.cat([head, weight[:, columns][:, kept], rest], 1), offset + used @ layer.offset[active]

        layers = list(self.layers)
        layers[number] = Layer(
            layer.name, layer.index[kept], layer.weight[kept], layer.offset[kept], lower[kept], upper[kept]
        )
        for later in range(number + 1, len(layers)):
            weight, offset = without(layers[later].weight, layers[later].offset)
            layers[later] = replace(layers[later], weight=weight, offset=offset)
        weight, offset = without(self.weight, self.offset)
        return replace(self, layers=tuple(layers), weight=weight, offset=offset)


class FormBuilder:
    """Makes the split form of one network over many boxes, from a float64 copy of the network.

    The copy is taken once: weights changed afterwards are not seen.
    """

    def __init__(self, model: nn.Module, example: Tensor, *, max_mib: int = 2048) -> None:
        if max_mib < 1:
            raise ConfigError(f"expected max_mib >= 1, got {max_mib}")
        self._max_values = max_mib * 2**17
        exact = copy.deepcopy(model).double().eval()
        for parameter in exact.parameters():
            parameter.requires_grad_(False)
        self.engine = BoundEngine(exact, example.double())
        self._nodes = self.engine.graph()
        self.relus = sum(torch.Size(node.shape).numel() for node in self._nodes if node.kind == "relu")

    def form(self, box: Box, spec: Tensor) -> SplitForm:
        """The rows ``spec`` (rows, classes) · f over a box of one sample, with CROWN's bounds."""
        if len(box) != 1:
            raise ConfigError(f"expected the box of one sample, got {len(box)}")
        box, spec = Box(box.lower.double(), box.upper.double()), spec.double()
        with torch.no_grad():
            crown = self.engine.bounds(box, spec.unsqueeze(0), RELAXATIONS.get("crown"))
            return self._extract(box, spec, {k: (lo[0], up[0]) for k, (lo, up) in crown.intermediate.items()})

    def _extract(self, box: Box, spec: Tensor, bounds: dict[str, tuple[Tensor, Tensor]]) -> SplitForm:
        center, radius = box.center[0], ((box.upper - box.lower) / 2)[0]
        movable = radius.flatten().nonzero().flatten()
        passing: dict[str, Tensor] = {}
        unstable: dict[str, Tensor] = {}
        widened: dict[str, tuple[Tensor, Tensor]] = {}
        for node in self._nodes:
            if node.kind == "relu":
                lower, upper = (side.flatten() for side in bounds[node.inputs[0]])
                slack = WIDENING * (1 + torch.maximum(lower.abs(), upper.abs()))
                lower, upper = lower - slack, upper + slack
                passing[node.name] = (lower >= 0).to(center).reshape(node.shape)
                unstable[node.name] = ((lower < 0) & (upper > 0)).nonzero().flatten()
                widened[node.name] = (lower, upper)
        neurons = sum(len(index) for index in unstable.values())
        if neurons * (len(movable) + neurons) > self._max_values:
            raise FormTooLargeError(
                f"{neurons} unstable neurons over {len(movable)} inputs exceed the memory set for branch and bound"
            )
        walk = _Walk(self._nodes, passing, unstable)
        base, base_out = walk.run(self._nodes[0].name, self._input(center.unsqueeze(0), offset=True), offset=True)
        columns: dict[str, list[Tensor]] = {name: [] for name in unstable}
        outputs: list[Tensor] = []

        def collect(start: str, flat: Tensor, shape: Sequence[int], scale: Tensor | None) -> None:
            """One column per entry of ``flat``: how everything later depends on that entry of ``start``."""
            for part in flat.split(walk.chunk):
                batch = torch.zeros(len(part), center.new_empty(tuple(shape)).numel()).to(center)
                batch[torch.arange(len(part)), part] = 1.0 if scale is None else scale[part]
                seed = batch.reshape(len(part), *shape)
                if scale is not None:
                    seed = self._input(seed, offset=False)
                rows, out = walk.run(start, seed, offset=False)
                for name, value in rows.items():
                    columns[name].append(value)
                outputs.append(out)

        collect(self._nodes[0].name, movable, center.shape, radius.flatten())
        layers: list[Layer] = []
        for node in self._nodes:
            if node.kind == "relu":
                index = unstable[node.name]
                weight = torch.cat(columns[node.name]).t().contiguous()
                lower, upper = (side[index] for side in widened[node.name])
                layers.append(Layer(node.inputs[0], index, weight, base[node.name][0], lower, upper))
                collect(node.name, index, node.shape, None)
        return SplitForm(
            center, radius, movable, tuple(layers), spec @ torch.cat(outputs).t(), (spec @ base_out.t()).flatten()
        )

    def _input(self, x: Tensor, *, offset: bool) -> Tensor:
        normalize: Normalize | None = self.engine.normalize
        if normalize is None:
            return x
        return nn.functional.conv2d(x, normalize.weight, normalize.bias if offset else None)


class _Walk:
    """Forward passes in which every unstable ReLU outputs 0, since its output is a variable of its own."""

    def __init__(self, nodes: Sequence[Node], passing: dict[str, Tensor], unstable: dict[str, Tensor]) -> None:
        self._nodes = nodes
        self._passing = passing
        self._unstable = unstable
        widest = max(torch.Size(node.shape).numel() for node in nodes)
        self.chunk = max(1, _CHUNK_VALUES // widest)

    def run(self, start: str, seed: Tensor, *, offset: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Unstable pre-activations of every later ReLU and the output, where ``start`` has the value ``seed``.

        Without ``offset`` the maps are linear, and what does not depend on ``start`` is zero.
        """
        values: dict[str, Tensor] = {start: seed}
        rows: dict[str, Tensor] = {}
        names = [node.name for node in self._nodes]
        for node in self._nodes[names.index(start) + 1 :]:
            parents = [values.get(name) for name in node.inputs]
            value = self._apply(node, parents, offset)
            if node.kind == "relu":
                index = self._unstable[node.name]
                pre = parents[0]
                rows[node.name] = seed.new_zeros(len(seed), len(index)) if pre is None else pre.flatten(1)[:, index]
            if value is not None:
                values[node.name] = value
        last = values.get(names[-1])
        return rows, seed.new_zeros(len(seed), *self._nodes[-1].shape) if last is None else last

    def _apply(self, node: Node, parents: list[Tensor | None], offset: bool) -> Tensor | None:
        first = parents[0]
        if node.kind == "sum":
            terms = [sign * p for sign, p in zip(node.signs, parents, strict=True) if p is not None]
            return sum(terms[1:], terms[0]) if terms else None
        if first is None:
            return None
        if node.kind == "relu":
            return first * self._passing[node.name]
        if node.affine is None:
            raise TypeError(f"node {node.name!r} of kind {node.kind!r} has no affine map")
        return node.affine(first, False, offset)

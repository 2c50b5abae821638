"""From a network and a box to a problem in unstable neurons: the split form, or the network's own maps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box
from gls_lirpa.base.checks import require
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.graph import Node
from gls_lirpa.errors import ConfigError, EngineError
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.solver.form import SplitForm, UnstableLayer
from gls_lirpa.solver.operators import OperatorForm, Relu

WIDENING = 1e-7
"""Relative widening of pre-activation bounds. They are float64, so this covers their rounding (1e-13)
and keeps a neuron whose bound is zero up to the LP solver's tolerances among the unstable ones."""

_CHUNK_VALUES = 2**24
"""Values of the widest layer that a chunk of columns may occupy: 128 MiB of float64."""


class FormTooLargeError(EngineError):
    """The split form of a box would need more memory than was set for it."""


@dataclass(frozen=True)
class Stability:
    """What CROWN's bounds over a box say: per ReLU where it is active, which neurons are unstable, their bounds."""

    box: Box
    spec: Tensor
    relus: dict[str, Relu]

    @property
    def region(self) -> tuple[Tensor, Tensor, Tensor]:
        """The box's centre and radius, and the flat positions of the inputs that vary in it."""
        radius = ((self.box.upper - self.box.lower) / 2)[0]
        return self.box.center[0], radius, radius.flatten().nonzero().flatten()

    @property
    def neurons(self) -> int:
        return sum(len(relu.index) for relu in self.relus.values())


class FormBuilder:
    """Makes the split form of one network over many boxes, from a float64 copy of the network.

    The copy is taken once: weights changed afterwards are not seen. ``max_mib``: memory that a form may take.
    """

    def __init__(self, model: nn.Module, example: Tensor, *, max_mib: int = 2048) -> None:
        require(max_mib >= 1, "max_mib >= 1", max_mib)
        self._max_values = max_mib * 2**17
        exact = copy.deepcopy(model).double().eval()
        for parameter in exact.parameters():
            parameter.requires_grad_(False)
        self.engine = BoundEngine(exact, example.double())
        self._nodes = self.engine.graph()
        self.relus = sum(torch.Size(node.shape).numel() for node in self._nodes if node.kind == "relu")

    def form(self, box: Box, spec: Tensor) -> SplitForm:
        """The specification rows ``spec`` (rows, classes) · f over a box of one sample, with CROWN's bounds."""
        return self.split(self.stability(box, spec))

    def stability(self, box: Box, spec: Tensor) -> Stability:
        """CROWN's bounds over a box of one sample, widened by what rounding may have done to them."""
        if len(box) != 1:
            raise ConfigError(f"expected the box of one sample, got {len(box)}")
        box, spec = Box(box.lower.double(), box.upper.double()), spec.double()
        with torch.no_grad():
            crown = self.engine.bounds(box, spec.unsqueeze(0), RELAXATIONS.get("crown"))
        relus: dict[str, Relu] = {}
        for node in self._nodes:
            if node.kind == "relu":
                lower, upper = (side[0].flatten() for side in crown.intermediate[node.inputs[0]])
                slack = WIDENING * (1 + torch.maximum(lower.abs(), upper.abs()))
                lower, upper = lower - slack, upper + slack
                if not bool((torch.isfinite(lower) & torch.isfinite(upper) & (lower <= upper)).all()):
                    raise EngineError("bounds of a pre-activation are not finite or cross: nothing to search over")
                index = ((lower < 0) & (upper > 0)).nonzero().flatten()
                relus[node.name] = Relu((lower >= 0).to(lower), index, lower[index], upper[index])
        return Stability(box, spec, relus)

    def operators(self, stable: Stability) -> OperatorForm:
        """The same problem without a matrix: for networks with too many unstable neurons for one."""
        box = self.engine.normalized_box(stable.box)
        return OperatorForm(*stable.region, box, stable.spec, tuple(self._nodes), stable.relus)

    def split(self, stable: Stability) -> SplitForm:
        """The split form; :class:`FormTooLargeError` where it does not fit the memory."""
        spec, relus, neurons = stable.spec, stable.relus, stable.neurons
        center, radius, movable = stable.region
        if neurons * (len(movable) + neurons) > self._max_values:
            raise FormTooLargeError(
                f"{neurons} unstable neurons over {len(movable)} inputs exceed the memory set for branch and bound"
            )
        walk = _Columns(self._nodes, relus)
        base, base_out = walk.run(self._nodes[0].name, self._input(center.unsqueeze(0), offset=True), offset=True)
        columns: dict[str, list[Tensor]] = {name: [] for name in relus}
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

        with torch.no_grad():
            collect(self._nodes[0].name, movable, center.shape, radius.flatten())
            layers: list[UnstableLayer] = []
            for node in self._nodes:
                if node.kind == "relu":
                    relu = relus[node.name]
                    weight = torch.cat(columns[node.name]).t().contiguous()
                    offset = base[node.name][0]
                    layers.append(UnstableLayer(node.inputs[0], relu.index, weight, offset, relu.lower, relu.upper))
                    collect(node.name, relu.index, node.shape, None)
        return SplitForm(
            center, radius, movable, tuple(layers), spec @ torch.cat(outputs).t(), (spec @ base_out.t()).flatten()
        )

    def _input(self, x: Tensor, *, offset: bool) -> Tensor:
        normalize = self.engine.normalize
        if normalize is None:
            return x
        return nn.functional.conv2d(x, normalize.weight, normalize.bias if offset else None)


class _Columns:
    """Forward passes in which every unstable ReLU outputs 0, since its output is a variable of its own."""

    def __init__(self, nodes: Sequence[Node], relus: dict[str, Relu]) -> None:
        self._nodes = nodes
        self._relus = relus
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
                index = self._relus[node.name].index
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
            return first * self._relus[node.name].passing.reshape(first.shape[1:])
        if node.affine is None:
            raise TypeError(f"node {node.name!r} of kind {node.kind!r} has no affine map")
        return node.affine(first, False, offset)

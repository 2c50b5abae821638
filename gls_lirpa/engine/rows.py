"""Bounds only where they matter: CROWN for the neurons that interval arithmetic leaves unstable.

A stable ReLU is exact, so its pre-activation's bounds are used for nothing. Layer by layer, interval arithmetic from
the last tightened layer says which (sample, neuron) pairs are unstable; those alone become rows, all samples' in one
list, lower and upper bounds together, and go back to the input. Their bounds are intersected with the intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.engine.row_alpha import one_step, optimised
from gls_lirpa.engine.row_compiled import compiled_chain, is_crowded
from gls_lirpa.engine.row_members import chosen, count, mapped
from gls_lirpa.engine.row_network import Layer, RowNetwork, Tensors, to_inner, to_outer
from gls_lirpa.engine.row_neurons import NeuronRows, Prepared, bounds
from gls_lirpa.engine.row_patches import Patch, Rows
from gls_lirpa.engine.row_places import by_places
from gls_lirpa.engine.row_relaxation import Slopes, crown_slopes, is_sparse
from gls_lirpa.engine.row_walk import Relaxed, lower_bounds, made

Interval = tuple[Tensor, Tensor]

FINAL_VALUES = 2**22
"""Coefficients that the specification's rows of several members may have at one layer: 16 MiB in float32."""


@dataclass
class State:
    """What is known on the way to the output: intervals of layers, slopes of ReLUs.

    The box has a batch of samples; everything else has as many of each member of ``tensors``.
    """

    network: RowNetwork
    tensors: Tensors
    box: Interval
    intervals: dict[str, Interval] = field(default_factory=dict)
    slopes: dict[str, Slopes] = field(default_factory=dict)
    sparse: set[str] = field(default_factory=set)
    crowded: set[str] = field(default_factory=set)
    boxes: Prepared = field(default_factory=Prepared)

    @property
    def members(self) -> int:
        return count(self.tensors)

    @property
    def batch(self) -> int:
        return len(self.box[0])

    def interval(self, name: str) -> Interval:
        """A layer's interval for every member, that of the input repeated."""
        lower, upper = self.intervals[name]
        if name != self.network.input.name or self.members == 1:
            return lower, upper
        return lower.repeat(self.members, 1, 1, 1), upper.repeat(self.members, 1, 1, 1)

    def relaxed(self) -> Relaxed:
        lower, upper = self.box
        return Relaxed(
            self.network,
            self.tensors,
            self.slopes,
            (lower + upper) / 2,
            (upper - lower) / 2,
            prepared_boxes=made if torch.is_grad_enabled() else self.boxes,
            sparse=frozenset(self.sparse),
            crowded=frozenset(self.crowded),
        )

    def parts(self, size: int) -> Iterator[State]:
        """The same of ``size`` members at a time, without intervals."""
        if size >= self.members:
            yield self
            return
        for first in range(0, self.members, size):
            part = slice(first * self.batch, (first + size) * self.batch)
            slopes = {name: (a[part], b[part], c[part]) for name, (a, b, c) in self.slopes.items()}
            tensors = chosen(self.tensors, slice(first, first + size))
            yield State(self.network, tensors, self.box, {}, slopes, self.sparse, self.crowded, self.boxes)


def relaxed(network: RowNetwork, tensors: Tensors, box: Box, spec: Tensor, *, method: str) -> Bounds:
    """IBP, CROWN-IBP, or CROWN with intermediate bounds intersected with intervals."""
    if method == "IBP":
        return ibp(network, tensors, box, spec)
    return crown(network, tensors, box, spec, tighten=method == "CROWN")


def ibp(network: RowNetwork, tensors: Tensors, box: Box, spec: Tensor) -> Bounds:
    """Interval arithmetic."""
    state = _forward(network, tensors, box, tighten=False, relax=False)
    final = network.final
    below = final.inputs[0] if final.kind == "dense" else final.name
    lower, upper = (end.reshape(state.members, state.batch, -1) for end in state.interval(below))
    distinct = _distinct_rows(spec)
    if distinct is None:
        rows, offset = _through_final(_inner_spec(spec, final), state)
        center, radius = ((upper + lower).unsqueeze(3), (upper - lower).unsqueeze(3))
        value = (rows @ center - rows.abs() @ radius).squeeze(3) / 2
        return Bounds((value if offset is None else value + offset).flatten(0, 1), _outer(state))
    common, inverse = distinct
    rows, offset = _through_final(_inner_spec(common.unsqueeze(0), final), state)
    rows = rows.transpose(2, 3).squeeze(1) / 2
    every = (upper + lower) @ rows - (upper - lower) @ rows.abs()
    every = every if offset is None else every + offset
    return Bounds(every.gather(2, inverse.expand(state.members, -1, -1)).flatten(0, 1), _outer(state))


def _through_final(rows: Tensor, state: State) -> tuple[Tensor, Tensor | None]:
    """Rows (samples, rows, outputs) as rows over the values below a dense output layer, and what it adds to them:
    (members, samples, rows, values), (members, samples, rows)."""
    final = state.network.final
    if final.kind != "dense":
        return rows.expand(state.members, *rows.shape), None
    weight, bias = state.tensors[final.name]
    flat, shape = rows.flatten(0, 1), rows.shape[:2]
    return (flat @ weight).unflatten(1, shape), None if bias is None else (flat @ bias.t()).t().unflatten(1, shape)


DISTINCT = 16
"""Products with every distinct row of a batch pay up to this many times the rows of one sample: they are matrix
products, where rows of each sample's own are passes over memory."""


def _distinct_rows(spec: Tensor) -> tuple[Tensor, Tensor] | None:
    """The rows that samples have in common, (rows, outputs), and which of them each sample has, (batch, rows of one).

    None where they are too many. Margins of ten classes have 90 at most.

    >>> rows, index = _distinct_rows(torch.tensor([[[1.0, -1.0]], [[-1.0, 1.0]], [[1.0, -1.0]]]))
    >>> rows[index].flatten(1).tolist()
    [[1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]]
    """
    rows = spec.flatten(0, 1)
    mix = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64, device=rows.device).exp()
    _, inverse = torch.unique(rows.double() @ mix, return_inverse=True)
    count = int(inverse.max()) + 1
    if count > DISTINCT * spec.shape[1]:
        return None
    chosen = rows.new_empty(count, rows.shape[1]).index_copy_(0, inverse, rows)
    # Different rows may have the same sum.
    return (chosen, inverse.view(spec.shape[:2])) if torch.equal(chosen[inverse], rows) else None


def crown(network: RowNetwork, tensors: Tensors, box: Box, spec: Tensor, *, tighten: bool) -> Bounds:
    """CROWN over interval bounds (CROWN-IBP), or with ``tighten`` over CROWN's own intersected with intervals."""
    state = _forward(network, tensors, box, tighten=tighten, relax=True)
    return Bounds(final_rows(state, spec), _outer(state))


def alpha_crown(network: RowNetwork, tensors: Tensors, box: Box, spec: Tensor, *, iterations: int | None) -> Bounds:
    """CROWN with lower slopes optimised for the rows of ``spec``, or stepped once where ``iterations`` is None."""
    state = _forward(network, tensors, box, tighten=True, relax=True)
    found = []
    for member in state.parts(1):
        lower = final_rows(member, spec)
        if iterations is None:
            found.append(one_step(member.relaxed(), spec, lower))
        else:
            found.append(optimised(member.relaxed(), spec, lower, iterations=iterations))
    return Bounds(torch.cat(found), _outer(state))


def final_rows(state: State, spec: Tensor) -> Tensor:
    """Lower bounds of the rows of a specification over slopes that are known: (members · samples, rows)."""
    final = state.network.final
    values = _inner_spec(spec, final).view(*spec.shape[:2], *final.shape)
    largest = max(layer.size for layer in state.network.layers.values())
    found = []
    for part in state.parts(max(1, FINAL_VALUES // (spec.shape[0] * spec.shape[1] * largest))):
        patch = Patch(values.repeat(part.members, 1, 1, 1, 1), (0, 0), (0, 0))
        rows = Rows(members=part.members, batch=part.batch, device=spec.device)
        found.append(lower_bounds(part.relaxed(), final.name, patch, rows))
    return torch.cat(found)


def _inner_spec(spec: Tensor, final: Layer) -> Tensor:
    return to_inner(spec.flatten(0, 1), final.shape).reshape(spec.shape)


def _outer(state: State) -> dict[str, Interval]:
    found = {}
    for relu in state.network.relus:
        (name,) = relu.node.inputs
        lower, upper = state.interval(relu.inputs[0])
        found[name] = to_outer(lower, relu.outer), to_outer(upper, relu.outer)
    return found


# -- forward: intervals, tightened on the way ------------------------------------------------------


def _forward(network: RowNetwork, tensors: Tensors, box: Box, *, tighten: bool, relax: bool) -> State:
    ends = to_inner(box.lower, network.input.shape), to_inner(box.upper, network.input.shape)
    state = State(network, tensors, ends)
    exact = {network.input.name}
    for layer in network.layers.values():
        if layer is network.final and layer.kind == "dense":
            break
        interval = _propagated(layer, state)
        if layer.name in network.bounded and tighten and not exact >= set(layer.inputs):
            interval = tightened(state, layer, interval)
        state.intervals[layer.name] = interval
        if layer.kind == "relu" and relax:
            slopes = crown_slopes(*state.interval(layer.inputs[0]))
            state.slopes[layer.name] = slopes
            if is_sparse(slopes):
                state.sparse.add(layer.name)
            if is_crowded(slopes):
                state.crowded.add(layer.name)
    return state


def _propagated(layer: Layer, state: State) -> Interval:
    if layer.kind == "input":
        return state.box
    shared = layer.kind in ("conv", "dense", "scale") and layer.inputs == (state.network.input.name,)
    inputs = [state.box] if shared else [state.interval(name) for name in layer.inputs]
    lower, upper = inputs[0]
    if layer.kind == "relu":
        return lower.clamp(min=0), upper.clamp(min=0)
    if layer.kind == "sum":
        ends = [pair if sign > 0 else (-pair[1], -pair[0]) for pair, sign in zip(inputs, layer.node.signs, strict=True)]
        return ends[0][0] + ends[1][0], ends[0][1] + ends[1][1]
    weight, offset = state.tensors[layer.name]
    # Twice the centre and radius with half the weight: exact, and one pass over the larger tensors less.
    weight = weight / 2
    center = mapped(layer, lower + upper, weight, offset, shared=shared)
    radius = mapped(layer, upper - lower, weight.abs(), None, shared=shared)
    return center - radius, center + radius


# -- rows of neurons --------------------------------------------------------------------------------


def tightened(state: State, layer: Layer, interval: Interval) -> Interval:
    """The interval of a pre-activation with CROWN's bounds of its unstable neurons, where those are tighter."""
    lower, upper = interval
    with torch.no_grad():
        # NaN counts as unstable, and stays NaN.
        index = (~((lower >= 0) | (upper <= 0))).nonzero(as_tuple=True)
    if not len(index[0]):
        return interval
    low, high = neuron_bounds(state, layer, index).unbind(1)
    return (
        lower.index_put(index, torch.maximum(lower[index], low)),
        upper.index_put(index, torch.minimum(upper[index], -high)),
    )


def neuron_bounds(state: State, layer: Layer, index: tuple[Tensor, ...]) -> Tensor:
    """Lower bounds of neurons and of their negatives, (neurons, 2), by CROWN over the slopes below them.

    ``index``: sample, row, column and channel of each, in ascending order.
    """
    over = state.relaxed()
    if state.members == 1 and compiled_chain(over, layer.inputs[0]) is None:
        found = by_places(state.network, layer, state.tensors, index)
        if found is not None:
            every = torch.cat([bounds(job, found.places, over) for job in found.jobs], dim=2)
            return every[found.place, :, found.neuron]
    return bounds(NeuronRows(state.network, layer, state.tensors), index, over)

"""A network over one box, written in its unstable neurons alone: the split form.

Over a box most ReLUs are stable: their neuron is a linear function or zero. What is left is

    z_k = W_k [t; v_1; …; v_{k−1}] + b_k,    v_k = max(z_k, 0),    rows = W [t; v_1; …; v_K] + b,

with t ∈ [−1, 1] the position in the box (x = centre + radius · t; pixels of radius 0 drop out) and one
z and v per unstable neuron. The bounds of domains, the LP of a leaf and the MILP all read this form, which
is kept in float64: rounding of the network's own float32 arithmetic is no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnstableLayer:
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
class Problem:
    """Unstable neurons over one box: ``center``, ``radius``; ``movable``: flat positions of the inputs that vary."""

    center: Tensor
    radius: Tensor
    movable: Tensor

    @property
    def lower(self) -> Tensor:
        """Lower bounds l of the neurons' pre-activations."""
        raise NotImplementedError

    @property
    def upper(self) -> Tensor:
        """Upper bounds u of the neurons' pre-activations."""
        raise NotImplementedError

    @property
    def inputs(self) -> int:
        return len(self.movable)

    @property
    def neurons(self) -> int:
        return len(self.lower)

    @cached_property
    def upper_slope(self) -> Tensor:
        """Of the triangle's upper line, v ≤ u (z − l) / (u − l)."""
        return self.upper / (self.upper - self.lower)

    @cached_property
    def intercept(self) -> Tensor:
        """What the triangle's upper line is at z = 0."""
        return -self.lower * self.upper_slope

    def point(self, t: Tensor) -> Tensor:
        """Inputs of the network at positions ``t`` (n, inputs)."""
        x = self.center.flatten().expand(len(t), -1).clone()
        x[:, self.movable] += self.radius.flatten()[self.movable] * t.to(x)
        return x.reshape(len(t), *self.center.shape)


@dataclass(frozen=True)
class SplitForm(Problem):
    """See the module. ``weight`` (rows, inputs + neurons) and ``offset`` (rows,) are the specification rows."""

    layers: tuple[UnstableLayer, ...]
    weight: Tensor
    offset: Tensor

    @property
    def work(self) -> float:
        """Multiplications of one backward and forward pass."""
        return 2.0 * self.neurons * (self.inputs + self.neurons)

    @cached_property
    def spans(self) -> tuple[slice, ...]:
        """Where each layer's neurons are among all; their columns are ``inputs`` further."""
        spans, end = [], 0
        for layer in self.layers:
            spans.append(slice(end, end + len(layer)))
            end += len(layer)
        return tuple(spans)

    @cached_property
    def lower(self) -> Tensor:
        return torch.cat([self.offset[:0], *(layer.lower for layer in self.layers)])

    @cached_property
    def upper(self) -> Tensor:
        return torch.cat([self.offset[:0], *(layer.upper for layer in self.layers)])

    def evaluate(self, t: Tensor) -> Tensor:
        """The rows at positions ``t``, exactly: (n, rows).

        >>> from torch import nn
        >>> from gls_lirpa.base.boxes import Box
        >>> from gls_lirpa.solver.builder import FormBuilder
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

    def of_rows(self, rows: Tensor) -> SplitForm:
        """The same form for some of its rows."""
        return replace(self, weight=self.weight[rows], offset=self.offset[rows])

    def below(self, number: int) -> SplitForm:
        """The layers before one, and as rows both sides of its neurons."""
        weight, offset = self.layers[number].both_sides()
        return replace(self, layers=self.layers[:number], weight=weight, offset=offset)

    def with_layer(self, number: int, lower: Tensor, upper: Tensor) -> SplitForm:
        """Tighter bounds for one layer; neurons that they make stable are removed from the form.

        An active one is replaced by its own linear function wherever it was used: v = z.
        """
        layer = self.layers[number]
        lower, upper = torch.maximum(layer.lower, lower), torch.minimum(layer.upper, upper)
        active, kept = lower >= 0, (lower < 0) & (upper > 0)
        start = self.inputs + self.spans[number].start
        columns = slice(start, start + len(layer))

        def without(weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
            used = weight[:, columns][:, active]
            head = weight[:, :start] + used @ layer.weight[active]
            rest = weight[:, columns.stop :]
            return torch.cat([head, weight[:, columns][:, kept], rest], 1), offset + used @ layer.offset[active]

        layers = list(self.layers)
        layers[number] = UnstableLayer(
            layer.name, layer.index[kept], layer.weight[kept], layer.offset[kept], lower[kept], upper[kept]
        )
        for later in range(number + 1, len(layers)):
            weight, offset = without(layers[later].weight, layers[later].offset)
            layers[later] = replace(layers[later], weight=weight, offset=offset)
        weight, offset = without(self.weight, self.offset)
        return replace(self, layers=tuple(layers), weight=weight, offset=offset)

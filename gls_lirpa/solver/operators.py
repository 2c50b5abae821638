"""Bounds of domains by the network's own maps, for networks with too many unstable neurons for a split form.

The same backward pass as in ``bounds``, with triangles alone: coefficients go from the specification row to the input
through the transposed layers, and at every unstable neuron v is replaced by a linear function of z. In float64, so
that every value is a proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Box
from gls_lirpa.engine.graph import Node
from gls_lirpa.solver.domains import Domains, Pass
from gls_lirpa.solver.form import Problem

_CHUNK_VALUES = 2**26
"""Values of all layers that are kept for the domains evaluated at a time: 512 MiB."""


@dataclass(frozen=True)
class Relu:
    """One ReLU over a box: ``passing`` (flat): 1 where it is active; ``index``: its unstable neurons, with bounds."""

    passing: Tensor
    index: Tensor
    lower: Tensor
    upper: Tensor


@dataclass(frozen=True)
class OperatorForm(Problem):
    """A network as it is over a box: ``box``: after the network's normalisation; ``spec`` (rows, classes)."""

    box: Box
    spec: Tensor
    nodes: tuple[Node, ...]
    relus: dict[str, Relu]

    @cached_property
    def spans(self) -> dict[str, slice]:
        """Where each ReLU's unstable neurons are among all."""
        found, end = {}, 0
        for name, relu in self.relus.items():
            found[name] = slice(end, end + len(relu.index))
            end += len(relu.index)
        return found

    @cached_property
    def lower(self) -> Tensor:
        return torch.cat([self.spec[0, :0], *(relu.lower for relu in self.relus.values())])

    @cached_property
    def upper(self) -> Tensor:
        return torch.cat([self.spec[0, :0], *(relu.upper for relu in self.relus.values())])

    @cached_property
    def values(self) -> int:
        """Values of all layers."""
        return sum(torch.Size(node.shape).numel() for node in self.nodes)

    @cached_property
    def work(self) -> float:
        """Multiplications of one backward and forward pass; a transposed layer takes two passes through it."""
        found = 0.0
        for node in self.nodes:
            if node.weight is not None:
                found += node.weight()[0].numel()
            elif node.convolution is not None:
                found += node.convolution().weight[0].numel() * torch.Size(node.shape).numel()
        return 3.0 * found

    def of_rows(self, rows: Tensor) -> OperatorForm:
        """The same for some of its rows."""
        return replace(self, spec=self.spec[rows])


class OperatorBounds:
    """The backward pass over an :class:`OperatorForm`."""

    dtype = torch.float64

    def __init__(self, form: OperatorForm) -> None:
        self.form = form
        box = form.box
        self._center, self._radius = box.center, (box.upper - box.lower) / 2
        # What every layer adds by itself.
        with torch.no_grad():
            self._constants = {
                node.name: node.affine(torch.zeros(1, *self._shape(node.inputs[0])).to(form.spec), False, True)
                for node in form.nodes
                if node.affine is not None
            }

    def evaluate(self, batch: Domains, *, primal: bool = True) -> Pass:
        """The bounds for the batch's α and β; ``primal`` False leaves z and v empty."""
        count = max(1, _CHUNK_VALUES // max(1, self.form.values))
        return Pass.joined([self._evaluate(batch[i : i + count], primal) for i in range(0, len(batch), count)])

    def evaluator(self) -> Callable[[Domains], Pass]:
        """``evaluate`` for a series of passes over one batch."""
        return self.evaluate

    def _evaluate(self, batch: Domains, primal: bool) -> Pass:
        form, count = self.form, len(batch)
        signs, alpha, beta, unsplit = batch.signs.double(), batch.alpha.double(), batch.beta.double(), batch.unsplit
        lam, slopes, shifts = torch.zeros_like(alpha), torch.zeros_like(alpha), torch.zeros_like(alpha)
        value = torch.zeros(count, dtype=torch.float64, device=alpha.device)
        last = form.nodes[-1]
        found: dict[str, Tensor] = {last.name: form.spec[batch.rows].reshape(count, *last.shape)}

        def add(name: str, coefficient: Tensor) -> None:
            found[name] = found[name] + coefficient if name in found else coefficient

        for node in reversed(form.nodes[1:]):
            if node.name not in found:
                continue
            above = found.pop(node.name)
            if node.kind == "sum":
                for sign, name in zip(node.signs, node.inputs, strict=True):
                    add(name, sign * above)
            elif node.kind == "relu":
                relu, span = form.relus[node.name], form.spans[node.name]
                flat = above.flatten(1)
                own = flat[:, relu.index]
                upper = unsplit[:, span] & (own < 0)
                slope = torch.where(upper, form.upper_slope[span], alpha[:, span])
                slope = torch.where(unsplit[:, span], slope, signs[:, span].clamp(min=0))
                shift = torch.where(upper, form.intercept[span], 0.0)
                lam[:, span], slopes[:, span], shifts[:, span] = own, slope, shift
                value = value + (shift * own).sum(1)
                through = flat * relu.passing
                through[:, relu.index] = slope * own - signs[:, span] * beta[:, span]
                add(node.inputs[0], through.reshape(above.shape))
            else:
                value = value + (above * self._constants[node.name]).flatten(1).sum(1)
                add(node.inputs[0], self._transposed(node, above))
        head = found.get(form.nodes[0].name, torch.zeros(count, *form.nodes[0].shape).to(form.spec))
        value = value + ((head * self._center).flatten(1) - head.abs().flatten(1) * self._radius.flatten(1)).sum(1)
        corner = -head.sign()
        t = corner.flatten(1)[:, form.movable]
        if not primal:
            return Pass(value, t, alpha[:, :0], alpha[:, :0], lam, alpha[:, :0])
        z, v = self._forward(self._center + self._radius * corner, slopes, shifts)
        return Pass(value, t, z, v, lam, torch.zeros_like(z))

    def _forward(self, x: Tensor, slopes: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
        """z and v of the unstable neurons at inputs x, with every v the linear function that the bound used."""
        form = self.form
        z, v = torch.zeros_like(slopes), torch.zeros_like(slopes)
        values = {form.nodes[0].name: x}
        for node in form.nodes[1:]:
            inputs = [values[name] for name in node.inputs]
            if node.kind == "sum":
                values[node.name] = node.signs[0] * inputs[0] + node.signs[1] * inputs[1]
            elif node.kind == "relu":
                relu, span, flat = form.relus[node.name], form.spans[node.name], inputs[0].flatten(1)
                z[:, span] = flat[:, relu.index]
                v[:, span] = slopes[:, span] * z[:, span] + shifts[:, span]
                out = flat * relu.passing
                out[:, relu.index] = v[:, span]
                values[node.name] = out.reshape(inputs[0].shape)
            elif node.affine is not None:
                values[node.name] = node.affine(inputs[0], False, True)
        return z, v

    def _transposed(self, node: Node, coefficient: Tensor) -> Tensor:
        """A layer's transposed weights applied: the gradient of its linear part."""
        assert node.affine is not None
        with torch.enable_grad():
            x = torch.zeros(len(coefficient), *self._shape(node.inputs[0])).to(coefficient).requires_grad_()
            (gradient,) = torch.autograd.grad(node.affine(x, False, False), x, coefficient)
        return gradient

    def _shape(self, name: str) -> tuple[int, ...]:
        return next(node.shape for node in self.form.nodes if node.name == name)

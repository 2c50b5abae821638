"""Upper bounds of ReLUs over the box of their inputs, which the triangle over z alone cannot see.

Write one neuron as z = l + Σᵢ aᵢ yᵢ with every aᵢ ≥ 0 and yᵢ ∈ [0, 1] (an input, or one minus it). The
convex function max(z, 0) is supermodular on the corners, so for any order π of the inputs

    v ≤ max(l, 0) + Σₖ y_{π(k)} · (max(z_k, 0) − max(z_{k−1}, 0)),    z_k = l + Σ_{j ≤ k} a_{π(j)},

holds at every corner and, the left side being convex, in the whole box. The order of descending y
gives the tightest of these facets at y: together they are the concave envelope of one neuron over the box of its
inputs (the single-neuron relaxation of Anderson et al.). For each specification row ``facets_of`` mixes facets into
one upper bound per neuron, by Frank-Wolfe steps on the dual bound towards the facet at the averaged minimising point.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.solver.form import SplitForm, UnstableLayer

_SLOPE_RATE, _SLOPE_DECAY = 0.1, 0.98
"""Sign steps of the lower slopes between the steps of the facets, and their factor per step."""


@dataclass(frozen=True)
class Facets:
    """Per layer an upper bound v ≤ weight[row] · [t; earlier v] + offset[row] for every row of the form."""

    weights: tuple[Tensor, ...]
    offsets: tuple[Tensor, ...]

    def to(self, dtype: torch.dtype) -> Facets:
        return Facets(*(tuple(part.to(dtype) for part in parts) for parts in (self.weights, self.offsets)))


class _Neurons:
    """One layer's weights on the inputs they use, as padded lists: neuron i reads ``index[i]``."""

    def __init__(self, layer: UnstableLayer, low: Tensor, width: Tensor) -> None:
        used = layer.weight != 0
        most = max(1, int(used.sum(1).max())) if len(layer) else 1
        # The padding points at inputs of weight zero, which change nothing.
        self.index = used.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        self.weight = layer.weight.gather(1, self.index)
        self.offset = layer.offset
        self.low = low[self.index]
        self.width = width[self.index].clamp(min=1e-300)
        step = self.weight * self.width
        self.falling = step < 0
        self.step = step.abs()
        self.least = layer.offset + (self.weight * self.low).sum(1) + step.clamp(max=0).sum(1)
        slope = layer.upper / (layer.upper - layer.lower)
        self.upper = slope.unsqueeze(1) * self.weight
        self.upper_offset = slope * (layer.offset - layer.lower)
        self.alpha = (layer.upper > -layer.lower).to(layer.weight)

    def facet(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The tightest facet where the inputs on ``index`` have these values: their weights, and an offset."""
        y = ((values - self.low) / self.width).clamp(0.0, 1.0)
        y = torch.where(self.falling, 1 - y, y)
        order = y.argsort(dim=1, descending=True, stable=True)
        reached = (self.least.unsqueeze(1) + self.step.gather(1, order).cumsum(1)).clamp(min=0)
        start = self.least.clamp(min=0)
        rise = torch.diff(reached, dim=1, prepend=start.unsqueeze(1))
        slope = torch.zeros_like(y).scatter_(1, order, rise)
        offset = start + torch.where(self.falling, slope, 0.0).sum(1)
        weight = torch.where(self.falling, -slope, slope) / self.width
        return weight, offset - (weight * self.low).sum(1)

    def move(self, values: Tensor, rate: float) -> None:
        """Mix the facet at ``values`` in, where it is lower there than what is held."""
        weight, offset = self.facet(values)
        lower = (weight * values).sum(1) + offset < (self.upper * values).sum(1) + self.upper_offset
        share = torch.where(lower, rate, 0.0).to(offset)
        self.upper = torch.lerp(self.upper, weight, share.unsqueeze(1))
        self.upper_offset = torch.lerp(self.upper_offset, offset, share)

    def dense(self, columns: int) -> Tensor:
        """The upper bounds' weights on all inputs and earlier neurons."""
        return self.upper.new_zeros(len(self.upper), columns).scatter_(1, self.index, self.upper)


def facets_of(form: SplitForm, *, iterations: int, deadline: float = math.inf) -> Facets:
    """An upper bound per neuron and specification row of the form."""
    found = [_facets_of_row(form, row, iterations, deadline) for row in range(len(form.offset))]
    return Facets(
        tuple(torch.stack([weights[k] for weights, _ in found]) for k in range(len(form.layers))),
        tuple(torch.stack([offsets[k] for _, offsets in found]) for k in range(len(form.layers))),
    )


def _facets_of_row(form: SplitForm, row: int, iterations: int, deadline: float) -> tuple[list[Tensor], list[Tensor]]:
    ends = [form.inputs + span.start for span in form.spans]
    low, width = _input_box(form)
    layers = [_Neurons(layer, low[:end], width[:end]) for layer, end in zip(form.layers, ends, strict=True)]
    average = low + width / 2
    for step in range(iterations):
        if time.monotonic() > deadline:
            break
        point, alpha_gradients = _minimiser(form, row, layers, ends)
        average = torch.lerp(average, point, 2.0 / (step + 2))
        for neurons, gradient in zip(layers, alpha_gradients, strict=True):
            neurons.alpha = (neurons.alpha + _SLOPE_RATE * _SLOPE_DECAY**step * gradient.sign()).clamp(0.0, 1.0)
            # Facets of later layers depend on the first layer's v, which have to settle first.
            if neurons is layers[0] or step >= iterations // 2:
                neurons.move(average[neurons.index], 2.0 / (step + 3))
    return [n.dense(end) for n, end in zip(layers, ends, strict=True)], [n.upper_offset for n in layers]


def _minimiser(form: SplitForm, row: int, layers: list[_Neurons], ends: list[int]) -> tuple[Tensor, list[Tensor]]:
    """The point [t; v] at which the row's bound is attained, and the bound's gradients in the lower slopes."""
    coefficients = form.weight[row].clone()
    lams = [coefficients[:0]] * len(layers)
    for k in reversed(range(len(layers))):
        neurons = layers[k]
        lam = coefficients[ends[k] : ends[k] + len(neurons.upper)].clone()
        lams[k] = lam
        weights = torch.where((lam < 0).unsqueeze(1), neurons.upper, neurons.alpha.unsqueeze(1) * neurons.weight)
        coefficients.index_add_(0, neurons.index.flatten(), (lam.unsqueeze(1) * weights).flatten())
    point = coefficients.clone()
    point[: form.inputs] = -coefficients[: form.inputs].sign()
    gradients = []
    for neurons, lam, end in zip(layers, lams, ends, strict=True):
        values = point[neurons.index]
        z = (neurons.weight * values).sum(1) + neurons.offset
        above = (neurons.upper * values).sum(1) + neurons.upper_offset
        point[end : end + len(lam)] = torch.where(lam < 0, above, neurons.alpha * z)
        gradients.append(lam.clamp(min=0) * z)
    return point, gradients


def _input_box(form: SplitForm) -> tuple[Tensor, Tensor]:
    """Lower end and width of the ranges of t and of every v."""
    low = torch.cat([-torch.ones(form.inputs, dtype=form.weight.dtype, device=form.weight.device), 0 * form.upper])
    return low, torch.cat([2 * torch.ones_like(low[: form.inputs]), form.upper])

"""What a tree can spend on better bounds: tighter pre-activations, and envelopes for its subproblems."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from gls_lirpa.engine.split import SplitForm
from gls_lirpa.engine.split_ascend import ascend
from gls_lirpa.engine.split_bounds import SplitBounds, Subproblems
from gls_lirpa.engine.split_envelopes import Envelopes, Slopes
from gls_lirpa.engine.split_groups import Groups
from gls_lirpa.engine.split_hull import second_layer_bounds

_ROWS_AT_ONCE = 512


def envelopes_of(
    bounds: SplitBounds,
    batch: Subproblems,
    groups: Groups,
    *,
    iterations: int,
    start: Slopes | None = None,
    first: int = 0,
    deadline: float = math.inf,
) -> tuple[Envelopes, Slopes, Subproblems] | None:
    """Slopes for every subproblem of a batch, and the batch with each as a family of its own, to go on with them.

    They are made for the linear function of [t; v₁] that the subproblem's bound rests on, and hold for every other.
    ``start``: slopes of similar subproblems, to begin with; ``first``: the number of the first family.
    """
    layer = bounds.form.layers[0]
    weight, constant = bounds.over_first_layer(batch)
    begin = None if start is None else (batch.alpha[:, : len(layer)], start)
    found = ascend(layer, groups, weight, constant, iterations=iterations, start=begin, deadline=deadline)
    if found is None:
        return None
    alpha = batch.alpha.clone()
    alpha[:, : len(layer)] = found.alpha.to(alpha)
    family = first + torch.arange(len(batch), device=batch.rows.device)
    envelopes = Envelopes(groups, found.slopes.of_neurons(groups), first)
    return envelopes, found.slopes, replace(batch, family=family, alpha=alpha)


def tightened(form: SplitForm, *, iterations: int, group_iterations: int = 0, deadline: float = math.inf) -> SplitForm:
    """The form with optimised bounds of its pre-activations: with a hull of the first layer for those of the
    second (and, if asked, its groups), with slopes α for later ones, each neuron's side with its own."""
    for number in range(1, len(form.layers)):
        if not len(form.layers[number]) or not any(len(before) for before in form.layers[:number]):
            continue
        if number == 1:
            form = form.with_layer(1, *second_layer_bounds(form, iterations=iterations, deadline=deadline))
            if group_iterations and len(form.layers[1]):
                form = form.with_layer(1, *_group_bounds(form, iterations=group_iterations, deadline=deadline))
            continue
        weight, offset = form.layers[number].both_sides()
        below = replace(form, layers=form.layers[:number], weight=weight, offset=offset)
        bounds = SplitBounds(below, dtype=torch.float64)
        index = torch.arange(len(below.offset), device=below.offset.device)
        values = [
            bounds.optimise(bounds.start(part), iterations=iterations, target=0.0, deadline=deadline)[1].value
            for part in index.split(_ROWS_AT_ONCE)
        ]
        lower, upper = torch.cat(values).chunk(2)
        form = form.with_layer(number, lower, -upper)
    return form


def _group_bounds(form: SplitForm, *, iterations: int, deadline: float) -> tuple[Tensor, Tensor]:
    """Bounds of the second layer's neurons from groups of the first; infinite where groups are too large."""
    weight, offset = form.layers[1].both_sides()
    groups = Groups.of(form.layers[0])
    values = []
    for part in torch.arange(len(offset), device=offset.device).split(_ROWS_AT_ONCE):
        found = None
        if groups is not None:
            found = ascend(form.layers[0], groups, weight[part], offset[part], iterations=iterations, deadline=deadline)
        values.append(torch.full_like(offset[part], -torch.inf) if found is None else found.value)
    lower, upper = torch.cat(values).chunk(2)
    return lower, -upper

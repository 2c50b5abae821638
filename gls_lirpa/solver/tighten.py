"""Tighter bounds of pre-activations, layer by layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gls_lirpa.solver.ascent import optimise
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.group_ascent import ascend_groups
from gls_lirpa.solver.groups import Groups

_ROWS_AT_ONCE = 512
"""Rows that are bounded together, so that a deadline is noticed between them."""


def tightened(form: SplitForm, *, iterations: int, group_iterations: int = 0, deadline: float = math.inf) -> SplitForm:
    """The form with optimised bounds of its pre-activations, each neuron's side with slopes of its own.

    Those of the second layer are bounded with ``group_iterations`` over the first one's groups alone: facets for each
    of them decided one sample more on one network of six.
    """
    for number in range(1, len(form.layers)):
        if not len(form.layers[number]) or not any(len(before) for before in form.layers[:number]):
            continue
        if iterations and number > 1:
            form = form.with_layer(number, *_slope_bounds(form, number, iterations=iterations, deadline=deadline))
        if number == 1 and group_iterations and len(form.layers[1]):
            form = form.with_layer(1, *_group_bounds(form, iterations=group_iterations, deadline=deadline))
    return form


def _slope_bounds(form: SplitForm, number: int, *, iterations: int, deadline: float) -> tuple[Tensor, Tensor]:
    below = form.below(number)
    bounds = SplitBounds(below, dtype=torch.float64)
    index = torch.arange(len(below.offset), device=below.offset.device)
    values = [
        optimise(
            bounds,
            Domains.roots(below, part, torch.float64),
            iterations=iterations,
            # A neuron that is stable needs no better bound.
            target=0.0,
            deadline=deadline,
        )[1].value
        for part in index.split(_ROWS_AT_ONCE)
    ]
    lower, upper = torch.cat(values).chunk(2)
    return lower, -upper


def _group_bounds(form: SplitForm, *, iterations: int, deadline: float) -> tuple[Tensor, Tensor]:
    """Bounds of the second layer's neurons from groups of the first; infinite where groups are too large."""
    below = form.below(1)
    groups = Groups.of(form.layers[0])
    values = []
    for part in torch.arange(len(below.offset), device=below.offset.device).split(_ROWS_AT_ONCE):
        rows, found = below.of_rows(part), None
        if groups is not None:
            found = ascend_groups(rows, groups, iterations=iterations, deadline=deadline)
        values.append(torch.full_like(rows.offset, -torch.inf) if found is None else found.value)
    lower, upper = torch.cat(values).chunk(2)
    return lower, -upper

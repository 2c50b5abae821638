"""Which unstable neuron to split: scores from a bounding pass, and a look at the children."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gls_lirpa.base.registry import Registry
from gls_lirpa.engine.split import SplitForm
from gls_lirpa.engine.split_bounds import Pass, SplitBounds, Subproblems

Rule = Callable[[SplitForm, Pass], Tensor]
"""Scores (b, neurons) ≥ 0; the neuron with the highest is split."""


def _widest(form: SplitForm, done: Pass) -> Tensor:
    """The height of the relaxation's triangle over z = 0, whatever the network does with it."""
    return torch.minimum(form.upper, -form.lower).to(done.value).expand_as(done.coefficient)


def _intercept(form: SplitForm, done: Pass) -> Tensor:
    """What the upper line's offset −ul/(u−l) costs the bound; a split removes it (the idea of BaBSR)."""
    intercept = (-form.lower * form.upper / (form.upper - form.lower)).to(done.value)
    return -done.coefficient.clamp(max=0.0) * intercept + 1e-3 * done.coefficient.clamp(min=0.0) * intercept


def _gap(form: SplitForm, done: Pass) -> Tensor:
    """|λ| · |v − max(z, 0)| at the minimising point: how much of the bound is relaxation error there."""
    return done.coefficient.abs() * (done.v - done.z.clamp(min=0)).abs()


def _mixed(form: SplitForm, done: Pass) -> Tensor:
    """By the better of a neuron's places under ``gap`` and under ``intercept``: each misses neurons the other finds."""
    places = torch.minimum(_places(_gap(form, done)), _places(_intercept(form, done)))
    return (form.neurons - places).to(done.value)


def _places(scores: Tensor) -> Tensor:
    """0 for the highest score of each row, 1 for the next, …"""
    return scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)


RULES: Registry[Rule] = Registry("branching rule")
RULES.register("widest", _widest)
RULES.register("intercept", _intercept)
RULES.register("gap", _gap)
RULES.register("mixed", _mixed)


def ranked(form: SplitForm, batch: Subproblems, done: Pass, rule: Rule, count: int) -> Tensor:
    """The ``count`` best neurons to split per subproblem, best first; −1 where fewer are left."""
    scores = torch.where(batch.signs == 0, rule(form, done), -1.0)
    best = scores.topk(min(count, form.neurons), dim=1)
    return torch.where(best.values >= 0, best.indices, -1)


def children(batch: Subproblems, neurons: Tensor) -> Subproblems:
    """Every combination of signs of ``neurons`` (b, d): subproblem i becomes rows i, i + b, i + 2b, …

    The new neurons' β starts at 0: where λ < 0 a child's linear function is then nowhere below its parent's.
    """
    depth = neurons.shape[1]
    copies = []
    for code in range(2**depth):
        signs = torch.tensor([1 if code >> bit & 1 else -1 for bit in range(depth)], dtype=torch.int8)
        copies.append(batch.signs.scatter(1, neurons, signs.to(neurons.device).expand(len(batch), -1)))
    times = len(copies)
    return Subproblems(
        batch.rows.repeat(times),
        batch.family.repeat(times),
        torch.cat(copies),
        batch.alpha.repeat(times, 1),
        batch.beta.repeat(times, 1),
        batch.gamma.repeat(times, 1),
        batch.bound.repeat(times),
    )


def by_children(bounds: SplitBounds, batch: Subproblems, candidates: Tensor) -> Tensor:
    """Candidates reordered by one bounding pass over both children of each: highest worse child first."""
    count = candidates.shape[1]
    if count < 2:
        return candidates
    usable = candidates >= 0
    which = torch.arange(len(batch), device=batch.rows.device).repeat_interleave(count)
    first = candidates[:, :1].expand_as(candidates)
    trial = children(batch[which], torch.where(usable, candidates, first).reshape(-1, 1))
    terms = bounds.evaluate(batch, primal=False).terms
    like = None if terms is None else (terms, which.repeat(2))
    worse = bounds.evaluate(trial, primal=False, like=like).value.reshape(2, len(batch), count).amin(0)
    order = torch.where(usable, worse, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return candidates.gather(1, order)

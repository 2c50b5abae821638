"""Which unstable neuron to split: scores from a bounding pass, and a look at the children."""

from __future__ import annotations

import torch
from torch import Tensor

from gls_lirpa.solver.ascent import DomainBounds
from gls_lirpa.solver.domains import Domains, Pass
from gls_lirpa.solver.form import Problem


def candidates(problem: Problem, batch: Domains, done: Pass, count: int) -> Tensor:
    """The ``count`` best neurons to split per domain (b, count), best first; −1 where fewer are left.

    By the better of a neuron's ranks under two scores, each of which misses neurons that the other finds: the error
    |λ| · |v − max(z, 0)| of the relaxation at the minimising point, and what the upper line's intercept costs.
    """
    intercept = problem.intercept.to(done.value)
    error = done.coefficient.abs() * (done.v - done.z.clamp(min=0)).abs()
    cost = -done.coefficient.clamp(max=0.0) * intercept + 1e-3 * done.coefficient.clamp(min=0.0) * intercept
    rank = torch.minimum(_ranks(error), _ranks(cost))
    rank = torch.where(batch.unsplit, rank, problem.neurons)
    best = rank.topk(min(count, problem.neurons), dim=1, largest=False)
    return torch.where(best.values < problem.neurons, best.indices, -1)


def _ranks(scores: Tensor) -> Tensor:
    """0 for the highest score of each domain, 1 for the next, …"""
    return scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)


def by_children(bounds: DomainBounds, batch: Domains, tried: Tensor) -> Tensor:
    """Candidates reordered by a pass over both children of each: highest worse child first."""
    count = tried.shape[1]
    if count < 2:
        return tried
    usable = tried >= 0
    which = torch.arange(len(batch), device=batch.rows.device).repeat_interleave(count)
    neurons = torch.where(usable, tried, tried[:, :1])
    trial = batch[which].children(neurons.reshape(-1, 1))
    worse = bounds.evaluate(trial, primal=False).value.reshape(2, len(batch), count).amin(0)
    order = torch.where(usable, worse, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return tried.gather(1, order)

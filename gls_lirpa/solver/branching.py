"""Which unstable neuron to split."""

from __future__ import annotations

import torch
from torch import Tensor

from gls_lirpa.solver.domains import Domains, Pass
from gls_lirpa.solver.form import Problem


def neurons_to_split(problem: Problem, batch: Domains, done: Pass) -> Tensor:
    """The neuron to split of every domain: (b,). Each has one that is not split yet.

    The first by the better of a neuron's ranks under two scores, each of which misses neurons that the other finds: the
    error |λ| · |v − max(z, 0)| of the relaxation at the minimising point, and what the upper line's intercept costs.
    """
    if not len(batch):  # of no domains argmin refuses to take any where there are no neurons either
        return batch.rows
    intercept = problem.intercept.to(done.value)
    error = done.coefficient.abs() * (done.v - done.z.clamp(min=0)).abs()
    cost = -done.coefficient.clamp(max=0.0) * intercept + 1e-3 * done.coefficient.clamp(min=0.0) * intercept
    rank = torch.minimum(_ranks(error), _ranks(cost))
    return torch.where(batch.unsplit, rank, problem.neurons).argmin(1)


def _ranks(scores: Tensor) -> Tensor:
    """0 for the highest score of each domain, 1 for the next, …"""
    return scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)

"""The one ascent of the solver: Adam on the bounds of many rows at once, each keeping the best it met."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gls_lirpa.engine.ascent import adam
from gls_lirpa.solver.domains import Domains, Pass

ALPHA_RATE = 0.25
BETA_RATE = 0.5
GAMMA_RATE = 0.25
DECAY = 0.95
"""Adam's steps for α, γ ∈ [0, 1] and β ≥ 0 of domains, and their factor per step. With β's at 0.1 the bounds
of split domains were far looser after as many steps."""


@dataclass(frozen=True)
class Variable:
    """What is moved: ``value`` (entries, …) within [``low``, ``high``] by steps of ``rate``; ``rows``: the row each
    entry belongs to, None where entry i is row i's."""

    value: Tensor
    rate: float | Tensor
    low: float = -math.inf
    high: float = math.inf
    rows: Tensor | None = None


@dataclass(frozen=True)
class Evaluated:
    """Values of the rows, the gradient in every variable, and what else to keep of the best evaluation of each row.

    ``bound`` False: the values only give a direction, and none is kept.
    """

    value: Tensor
    gradients: Sequence[Tensor]
    kept: tuple[Tensor, ...] = ()
    bound: bool = True


@dataclass(frozen=True)
class Best:
    """Of every row: its value, its entries of the variables, and what was kept."""

    value: Tensor
    variables: list[Tensor]
    kept: tuple[Tensor, ...]


Evaluate = Callable[[list[Tensor], bool], Evaluated]
"""At these variables; True: this is the last evaluation, which must give bounds."""


def ascend(
    evaluate: Evaluate,
    variables: Sequence[Variable],
    *,
    iterations: int,
    rate: Callable[[int], float],
    target: float = math.inf,
    deadline: float = math.inf,
    narrow: Callable[[Tensor], Evaluate] | None = None,
) -> Best:
    """At most ``iterations`` evaluations, ``rate`` (step) times the variables' steps between them.

    Rows above ``target`` are done with; where more than half are and ``narrow`` can evaluate some of the rows alone,
    only the others go on. The first evaluation must give bounds. After ``deadline`` (of ``time.monotonic``) the best
    so far is returned.

    >>> parabola = lambda x, last: Evaluated(-(x[0] - 0.3).square(), [0.6 - 2 * x[0]])
    >>> start = Variable(torch.tensor([0.0, 1.0]), 0.1, 0.0, 1.0)
    >>> best = ascend(parabola, [start], iterations=60, rate=lambda step: 0.95**step)
    >>> [round(value, 2) for value in best.variables[0].tolist()]
    [0.3, 0.3]
    """
    values = [variable.value for variable in variables]
    moments = [(torch.zeros_like(value), torch.zeros_like(value)) for value in values]
    rates = [variable.rate for variable in variables]
    live: Tensor | None = None
    best: Best | None = None
    for step in range(iterations):
        last = step + 1 == iterations or time.monotonic() > deadline
        found = evaluate(values, last)
        if best is None:
            best = Best(found.value.clone(), [value.clone() for value in values], tuple(k.clone() for k in found.kept))
            live = torch.arange(len(found.value), device=found.value.device)
        elif found.bound:
            _keep(best, found, values, live, variables)
        is_open = ~(best.value[live] > target)
        if last or not bool(is_open.any()):
            break
        for i, (variable, gradient) in enumerate(zip(variables, found.gradients, strict=True)):
            move = rate(step) * rates[i] * adam(gradient, *moments[i], step)
            values[i] = (values[i] + move).clamp_(variable.low, variable.high)
        if narrow is not None and live is not None and int(is_open.sum()) * 2 < len(live):
            live = live[is_open]
            evaluate, values = narrow(live), [value[is_open] for value in values]
            moments = [(first[is_open], second[is_open]) for first, second in moments]
    assert best is not None
    return best


def _keep(
    best: Best, found: Evaluated, values: list[Tensor], live: Tensor | None, variables: Sequence[Variable]
) -> None:
    better = found.value > best.value[live]
    at = better.nonzero().flatten() if live is None else live[better]
    best.value[at] = found.value[better]
    for kept, new in zip(best.kept, found.kept, strict=True):
        kept[at] = new[better]
    for kept, new, variable in zip(best.variables, values, variables, strict=True):
        if variable.rows is None:
            kept[at] = new[better]
        else:
            chosen = better[variable.rows]
            kept[chosen] = new[chosen]


class DomainBounds(Protocol):
    """A backward pass over one problem; ``evaluator`` is ``evaluate`` for a series of passes over one batch."""

    dtype: torch.dtype

    def evaluate(self, batch: Domains, *, primal: bool = True) -> Pass: ...

    def evaluator(self) -> Callable[[Domains], Pass]: ...


def optimise(
    bounds: DomainBounds, batch: Domains, *, iterations: int, target: float, deadline: float = math.inf
) -> tuple[Domains, Pass]:
    """The batch with the best α, β, γ found and the pass at those; its ``bound`` is left to the caller.

    If t minimises the final linear function over the box and z, v, q are its images under the same linear pieces, then
    ∂/∂α = max(λ, 0) z and ∂/∂γ = min(λ, 0) (q − u (z − l) / (u − l)) where a neuron is not split, and ∂/∂β = −s z where
    its sign is s.
    """

    def narrowed(live: Tensor | slice) -> Evaluate:
        part, evaluate = batch[live], bounds.evaluator()
        unsplit, signs = part.unsplit, part.signs.to(bounds.dtype)

        def at(values: list[Tensor], last: bool) -> Evaluated:
            done = evaluate(replace(part, alpha=values[0], beta=values[1], gamma=values[2]))
            alpha = torch.where(unsplit, done.coefficient.clamp(min=0) * done.z, 0.0)
            gamma = torch.where(unsplit, -done.coefficient.clamp(max=0) * done.saving, 0.0)
            kept = (done.t, done.z, done.v, done.coefficient, done.saving)
            return Evaluated(done.value, (alpha, -signs * done.z, gamma), kept)

        return at

    alpha, beta, gamma = (part.to(bounds.dtype) for part in (batch.alpha, batch.beta, batch.gamma))
    best = ascend(
        narrowed(slice(None)),
        [
            Variable(alpha, ALPHA_RATE, 0.0, 1.0),
            Variable(beta, BETA_RATE, 0.0),
            Variable(gamma, GAMMA_RATE, 0.0, 1.0),
        ],
        iterations=iterations,
        rate=lambda step: DECAY**step,
        target=target,
        deadline=deadline,
        narrow=narrowed,
    )
    alpha, beta, gamma = best.variables
    return replace(batch, alpha=alpha, beta=beta, gamma=gamma), Pass(best.value, *best.kept)

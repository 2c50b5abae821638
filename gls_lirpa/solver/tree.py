"""One tree over ReLU splits.

Domains are bounded in batches with α and β (``bounds``, or ``operators``), optimised in the pass's own precision and
closed only by a float64 evaluation; a domain with no neuron left to split is an LP. A bound is never below its
parent's. With iterations for groups of neurons every domain that is split first gets multi-neuron slopes of its own,
whose bounds cost far more and are far tighter.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gls_lirpa.solver.ascent import DomainBounds, optimise
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.branching import neurons_to_split
from gls_lirpa.solver.descent import Descent
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.envelopes import Slopes
from gls_lirpa.solver.exact import minimise
from gls_lirpa.solver.facets import facets_of
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.group_ascent import slopes_for
from gls_lirpa.solver.groups import Groups
from gls_lirpa.solver.operators import OperatorBounds, OperatorForm
from gls_lirpa.solver.query import SearchOutcome
from gls_lirpa.solver.queue import Queue
from gls_lirpa.solver.settings import SolverSettings

_ROOT_ATTACK_STEPS = 30
"""Of the descent before the first bound: a counterexample found here saves the tree."""

_BATCH_WORK = 2.0e10
"""Multiplications per batch, about a second of one core, so that a time limit is noticed in time."""


@dataclass(frozen=True)
class Goal:
    """What a search is for: rows above ``target`` are proven; ``known``: bounds that were proven before.

    ``deadline``: of ``time.monotonic``; ``seed``: of the attacks and the LP solver.
    """

    known: Tensor
    target: float
    deadline: float = math.inf
    seed: int = 0


class Tree:
    """The tree of one sample, over all the rows of its form together."""

    def __init__(self, form: SplitForm | OperatorForm, descent: Descent, goal: Goal, settings: SolverSettings) -> None:
        self._form = form
        self._descent = descent
        self._goal = goal
        self._settings = settings
        self._fast: DomainBounds
        self._exact: DomainBounds
        if isinstance(form, OperatorForm):
            self._fast = self._exact = OperatorBounds(form)
        else:
            steps = settings.facet_iterations
            facets = facets_of(form, iterations=steps, deadline=goal.deadline) if steps else None
            self._fast = SplitBounds(form, facets=facets)
            self._exact = SplitBounds(form, facets=facets, dtype=torch.float64)
        # Without the multi-neuron relaxation, which is another for every batch.
        self._plain, self._proving = self._fast, self._exact
        self._queue = Queue(max_mib=settings.queue_mib)
        self._groups: Groups | None = None
        self._slopes: list[Slopes] = []
        # Domains that are given slopes at a time, 0 where there are none to be had.
        split = isinstance(form, SplitForm) and settings.group_iterations
        self._at_once = settings.slopes_at_once if split else 0
        # The lowest bound among the finished domains of each row.
        self._closed = torch.full_like(goal.known, torch.inf)
        self._counterexample: Tensor | None = None
        self._nodes = 0
        self._unsolved = False
        work = max(1.0, 2.0 * settings.iterations * form.work)
        self._batch = max(2, min(settings.batch_size, int(_BATCH_WORK / work)))

    def run(self) -> SearchOutcome:
        """Search until every row is decided or a limit is met; lower bounds hold in either case."""
        rows = torch.arange(len(self._goal.known), device=self._goal.known.device)
        self._nodes = len(rows)
        root = replace(Domains.roots(self._form, rows, self._fast.dtype), bound=self._goal.known.clone())
        self._attack(root)
        steps = 1 if self._counterexample is not None else self._settings.root_iterations
        self._queue.push(*self._bounded(root, steps))
        while len(self._queue) and not self._finished():
            self._expand()
        lower = [min(float(done), self._queue.lowest(i)) for i, done in enumerate(self._closed.tolist())]
        exhausted = (len(self._queue) > 0 or self._unsolved) and self._counterexample is None
        return SearchOutcome(torch.tensor(lower, dtype=torch.float64), self._counterexample, exhausted, self._nodes)

    def _attack(self, root: Domains) -> None:
        """Descend towards every row: from the centre, random corners, and CROWN's minimising corner."""
        starts = self._settings.attack_starts
        if not starts:
            return
        generator = torch.Generator().manual_seed(self._goal.seed)
        corners = torch.randint(0, 2, (starts, self._form.inputs), generator=generator) * 2.0 - 1.0
        t = torch.cat([torch.zeros(1, self._form.inputs), corners]).to(root.alpha).repeat(len(root), 1)
        rows = torch.cat([root.rows.repeat_interleave(starts + 1), root.rows])
        t = torch.cat([t, self._fast.evaluate(replace(root, gamma=0 * root.gamma), primal=False).t])
        self._counterexample = self._descent.search(self._form.point(t), rows, starts=len(t), steps=_ROOT_ATTACK_STEPS)

    def _remaining(self) -> int:
        limit = self._settings.max_nodes
        return self._batch if limit is None else min(self._batch, limit - self._nodes)

    def _finished(self) -> bool:
        late = time.monotonic() > self._goal.deadline
        return self._counterexample is not None or late or self._remaining() < 2

    def _expand(self) -> None:
        """Split the most promising domains and bound their children, in one batch."""
        room = self._remaining()
        batch, neurons, slopes = self._queue.pop(min(room // 2, self._at_once) if self._at_once else room // 2)
        if self._at_once:
            batch, neurons = self._renewed(batch, neurons, slopes)
            if not len(batch) or self._finished():
                self._queue.push(batch, neurons, self._slopes)
                return
        children = batch.children(neurons)
        self._nodes += len(children)
        self._queue.push(*self._bounded(children, self._settings.iterations), self._slopes)

    def _renewed(self, batch: Domains, neurons: Tensor, slopes: list[Slopes | None]) -> tuple[Domains, Tensor]:
        """Domains that are about to be split, bounded with multi-neuron slopes of their own, which their children keep.

        Slopes are made for one linear function of the first layer, and splits change it.
        """
        form, plain, exact = self._form, self._plain, self._proving
        assert isinstance(form, SplitForm) and isinstance(plain, SplitBounds) and isinstance(exact, SplitBounds)
        if self._groups is None:
            (row,) = exact.over_first_layer(batch[:1]).weight
            self._groups = Groups.of(form.layers[0], (-row[form.inputs :]).clamp(min=0))
        found = None
        if self._groups is not None:
            found = slopes_for(
                exact, batch, self._groups, slopes, settings=self._settings, deadline=self._goal.deadline
            )
        if found is None:
            # Too large for so many, or for any: these are split without.
            self._at_once = len(batch) // 2 if self._groups is not None else 0
            self._slopes, self._fast, self._exact = [], plain, exact
            return batch, neurons
        relaxation, self._slopes, batch = found
        self._fast, self._exact = plain.with_relaxation(relaxation), exact.with_relaxation(relaxation)
        return self._bounded(batch, self._settings.iterations)

    def _bounded(self, batch: Domains, iterations: int) -> tuple[Domains, Tensor]:
        """Bound a batch, close what is decided, look for counterexamples; the rest with the neurons to split it by."""
        target = self._goal.target
        batch, done = optimise(self._fast, batch, iterations=iterations, target=target, deadline=self._goal.deadline)
        # Above a finished domain of its row, a bound no longer matters to the row's minimum.
        enough = self._closed.clamp(max=target)[batch.rows]
        # Less the margin for float32 rounding; what may close a domain is bounded in float64.
        bound = done.value.double() - 0.5 * target
        near = (~(done.value <= enough - target)).nonzero().flatten()
        if len(near):
            bound[near] = self._exact.evaluate(batch[near], primal=False).value
        batch = replace(batch, bound=torch.fmax(batch.bound, bound))
        proven = batch.bound > enough
        leaves = (batch.signs != 0).all(1) & ~proven
        self._close(batch.rows[proven], batch.bound[proven])
        for i in leaves.nonzero().flatten().tolist():
            self._leaf(batch, i)
        rest = ~(proven | leaves)
        batch, done = batch[rest], done[rest]
        if len(batch) and self._counterexample is None and self._settings.attack_starts:
            x = self._form.point(done.t)
            self._counterexample = self._descent.search(
                x, batch.rows, starts=self._settings.attack_starts, steps=self._settings.attack_steps
            )
        return batch, neurons_to_split(self._form, batch, done)

    def _close(self, rows: Tensor, bounds: Tensor) -> None:
        self._closed = self._closed.scatter_reduce(0, rows, bounds, "amin")

    def _leaf(self, batch: Domains, i: int) -> None:
        """Every sign is fixed: the network is linear here and its minimum an LP's."""
        if isinstance(self._form, OperatorForm):
            self._unsolved = True
            self._close(batch.rows[i : i + 1], batch.bound[i : i + 1])
            return
        answer = minimise(
            self._form,
            int(batch.rows[i]),
            signs=batch.signs[i],
            time_limit=max(0.0, self._goal.deadline - time.monotonic()),
            seed=self._goal.seed,
        )
        self._unsolved |= answer.status == "limit"
        bound = max(float(batch.bound[i]), answer.bound)
        self._close(batch.rows[i : i + 1], batch.bound.new_tensor([bound]))
        if answer.t is not None and answer.value <= 0 and self._counterexample is None:
            x = self._descent.inside(self._form.point(answer.t.unsqueeze(0)))
            found = self._descent.search(
                x, batch.rows[i : i + 1], starts=self._settings.attack_starts, steps=self._settings.attack_steps
            )
            # A margin of zero up to rounding may not replay; the row is refuted all the same.
            self._counterexample = x[0] if found is None else found

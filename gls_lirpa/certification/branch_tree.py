"""One tree over ReLU splits.

Subproblems are bounded in batches with α and β (``engine.split_bounds``), optimised in float32 and closed only by a
float64 evaluation; a subproblem with no neuron left to split is an LP. A bound is never below its parent's. With
iterations for groups of neurons every subproblem that is split first gets slopes of its own for them, whose bounds cost
far more and are far tighter.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gls_lirpa.certification.branch_attack import Descent
from gls_lirpa.certification.branch_families import Families
from gls_lirpa.certification.branch_queue import Queue
from gls_lirpa.certification.branch_rules import RULES, Rule, by_children, children, ranked
from gls_lirpa.certification.branch_settings import Settings
from gls_lirpa.certification.exact_lp import minimise
from gls_lirpa.engine.split import SplitForm
from gls_lirpa.engine.split_bounds import Pass, SplitBounds, Subproblems
from gls_lirpa.engine.split_hull import hull_of

_ROOT_ATTACK_STEPS = 30

_BATCH_WORK = 2.0e10
"""Multiplications per batch, about a second of one core, so that a time limit is noticed in time."""


@dataclass(frozen=True)
class Outcome:
    """Lower bounds of the rows, a counterexample or None, whether a limit ended the search, nodes bounded."""

    lower: Tensor
    counterexample: Tensor | None
    exhausted: bool
    nodes: int


class Tree:
    """The tree of one sample, over all the rows of its form together.

    A row that is above ``target`` is proven; ``known`` are bounds that were proven before.
    """

    def __init__(
        self,
        form: SplitForm,
        descent: Descent,
        known: Tensor,
        target: float,
        deadline: float,
        seed: int,
        settings: Settings,
    ) -> None:
        self._form = form
        self._descent = descent
        self._known = known
        self._target = target
        self._deadline = deadline
        self._seed = seed
        self._settings = settings
        self._rule: Rule = RULES.get(settings.rule)
        steps = settings.hull_iterations
        hull = hull_of(form, iterations=steps, deadline=deadline) if steps else None
        self._fast = SplitBounds(form, hull=hull)
        self._exact = SplitBounds(form, hull=hull, dtype=torch.float64)
        self._queue = Queue(max_mib=settings.queue_mib)
        # Those that are not below the subproblems which were last given slopes of their own.
        self._waiting = Queue(max_mib=settings.queue_mib)
        self._families = Families(settings, rows=len(known))
        # The lowest bound among the finished subproblems of each row.
        self._closed = torch.full_like(known, torch.inf)
        self._counterexample: Tensor | None = None
        self._nodes = 0
        self._leaf_limit = False
        work = 4.0 * settings.iterations * max(1, form.neurons) * max(1, form.inputs + form.neurons)
        self._batch = max(2, min(settings.batch_size, int(_BATCH_WORK / work)))

    def run(self) -> Outcome:
        rows = torch.arange(len(self._known), device=self._known.device)
        root = replace(self._fast.start(rows), bound=self._known.clone())
        self._attack(root)
        self._bound(root, 1 if self._counterexample is not None else self._settings.root_iterations)
        while (len(self._queue) or len(self._waiting)) and not self._finished():
            if self._families.at_once:
                self._renew()
            enough = self._nodes + self._families.lifetime
            while len(self._queue) and not self._finished() and self._nodes < enough:
                self._expand()
        lower = [
            min(float(done), self._queue.lowest(i), self._waiting.lowest(i))
            for i, done in enumerate(self._closed.tolist())
        ]
        left = len(self._queue) + len(self._waiting)
        exhausted = (left > 0 or self._leaf_limit) and self._counterexample is None
        return Outcome(torch.tensor(lower, dtype=torch.float64), self._counterexample, exhausted, self._nodes)

    def _attack(self, root: Subproblems) -> None:
        """Descend towards every row: from the centre, random corners, and CROWN's minimising corner."""
        starts = self._settings.attack_starts
        if not starts:
            return
        generator = torch.Generator().manual_seed(self._seed)
        corners = torch.randint(0, 2, (starts, self._form.inputs), generator=generator) * 2.0 - 1.0
        t = torch.cat([torch.zeros(1, self._form.inputs), corners]).to(root.alpha).repeat(len(root), 1)
        rows = torch.cat([root.rows.repeat_interleave(starts + 1), root.rows])
        t = torch.cat([t, self._fast.evaluate(replace(root, gamma=0 * root.gamma), primal=False).t])
        self._counterexample = self._descent.search(self._form.point(t), rows, starts=len(t), steps=_ROOT_ATTACK_STEPS)

    def _remaining(self) -> int:
        limit = self._settings.max_nodes
        return self._batch if limit is None else min(self._batch, limit - self._nodes)

    def _finished(self) -> bool:
        late = time.monotonic() > self._deadline
        return self._counterexample is not None or late or self._remaining() < 2

    def _renew(self) -> None:
        """Give the lowest subproblems slopes of their own, and go on below them alone.

        Slopes are made for one linear function of the first layer, and splits change it.
        """
        self._queue.move_to(self._waiting)
        batch, candidates = self._waiting.pop(min(self._families.at_once, self._remaining()))
        others = self._waiting.families()
        found = self._families.make(self._exact, batch, others=others, deadline=self._deadline)
        if found is not None:
            envelopes, batch = found
            self._fast, self._exact = self._fast.with_envelopes(envelopes), self._exact.with_envelopes(envelopes)
            self._bound(batch, self._settings.iterations)
            return
        self._waiting.push(batch, candidates)
        if not self._families.at_once:
            self._fast, self._exact = self._fast.with_envelopes(None), self._exact.with_envelopes(None)
            self._waiting.move_to(self._queue)

    def _expand(self) -> None:
        """Split the most promising subproblems and bound their children, in one batch.

        Where there are few, each is split by several neurons at once to fill the batch.
        """
        room = self._remaining()
        batch, candidates = self._queue.pop(room // 2)
        available = int((candidates >= 0).sum(1).min())
        levels = max(1, min(self._settings.max_levels, available, int(math.log2(room / len(batch)))))
        neurons = by_children(self._fast, batch, candidates)[:, :levels]
        self._bound(children(batch, neurons), self._settings.iterations)

    def _bound(self, batch: Subproblems, iterations: int) -> None:
        """Bound a batch, close what is decided, look for counterexamples, queue the rest."""
        self._nodes += len(batch)
        batch, done = self._fast.optimise(batch, iterations=iterations, target=self._target, deadline=self._deadline)
        # Above a finished subproblem of its row, a bound no longer matters to the row's minimum.
        enough = self._closed.clamp(max=self._target)[batch.rows]
        # Less the margin for float32 rounding; what may close a subproblem is bounded in float64.
        bound = done.value.double() - 0.5 * self._target
        near = (~(done.value <= enough - self._target)).nonzero().flatten()
        if len(near):
            bound[near] = self._exact.evaluate(batch[near], primal=False).value
        batch = replace(batch, bound=torch.maximum(batch.bound, bound))
        proven = batch.bound > enough
        leaves = (batch.signs != 0).all(1) & ~proven
        self._close(batch.rows[proven], batch.bound[proven])
        for i in leaves.nonzero().flatten().tolist():
            self._leaf(batch, i)
        rest = ~(proven | leaves)
        if not rest.any():
            return
        batch, done = batch[rest], _part(done, rest)
        if self._counterexample is None and self._settings.attack_starts:
            x = self._form.point(done.t)
            self._counterexample = self._descent.search(
                x, batch.rows, starts=self._settings.attack_starts, steps=self._settings.attack_steps
            )
        count = max(self._settings.candidates, self._settings.max_levels)
        self._queue.push(batch, ranked(self._form, batch, done, self._rule, count))

    def _close(self, rows: Tensor, bounds: Tensor) -> None:
        self._closed = self._closed.scatter_reduce(0, rows, bounds, "amin")

    def _leaf(self, batch: Subproblems, i: int) -> None:
        """Every sign is fixed: the network is linear here and its minimum an LP's."""
        row = int(batch.rows[i])
        answer = minimise(
            self._form,
            row,
            signs=batch.signs[i],
            time_limit=max(0.0, self._deadline - time.monotonic()),
            seed=self._seed,
        )
        self._leaf_limit |= answer.status == "limit"
        bound = max(float(batch.bound[i]), answer.bound)
        self._close(batch.rows[i : i + 1], batch.bound.new_tensor([bound]))
        if answer.t is not None and answer.value <= 0 and self._counterexample is None:
            x = self._descent.inside(self._form.point(answer.t.unsqueeze(0)))
            found = self._descent.search(
                x, batch.rows[i : i + 1], starts=self._settings.attack_starts, steps=self._settings.attack_steps
            )
            # A margin of zero up to rounding may not replay; the row is refuted all the same.
            self._counterexample = x[0] if found is None else found


def _part(done: Pass, index: Tensor) -> Pass:
    parts = (done.value, done.t, done.z, done.v, done.coefficient, done.saving)
    value, t, z, v, coefficient, saving = (part[index] for part in parts)
    return Pass(value, t, z, v, coefficient, saving)

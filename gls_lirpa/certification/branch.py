"""Branch and bound over ReLU splits: the complete last stage of the cascade.

One search per sample, over all its open classes together. Subproblems are bounded in batches with
α and β (``engine.split_bounds``), optimised in float32 and closed only by a float64 evaluation; a
subproblem with no neuron left to split is an LP. A bound is never below its parent's. What a small first
tree leaves open is attacked with points that exchange parts of their inputs; then a second tree begins anew
with bounds of groups of neurons, which cost far more but are far tighter: every subproblem that is split
first gets slopes of its own for them.
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
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from gls_lirpa.engine.boxes import Box, margin_spec
from gls_lirpa.engine.split import FormBuilder, FormTooLargeError, SplitForm
from gls_lirpa.engine.split_bounds import Pass, SplitBounds, Subproblems
from gls_lirpa.engine.split_hull import hull_of
from gls_lirpa.engine.split_tighten import tightened

AIM = 2e-4
"""Subproblems are bounded until above AIM · max(1, |logits|): twice the margin below which a bound in
float32 does not count as a proof."""

_ROOT_ATTACK_STEPS = 30

_ATTACK_SHARE = 1 / 3
"""Of the time after the first tree, for large networks; on a cnn3 all rounds take less."""

_BATCH_WORK = 2.0e10
"""Multiplications per batch, about a second of one core, so that a time limit is noticed in time."""


@dataclass(frozen=True)
class Outcome:
    """Lower bounds of the rows, a counterexample or None, whether a limit ended the search, nodes bounded."""

    lower: Tensor
    counterexample: Tensor | None
    exhausted: bool
    nodes: int


class BranchAndBound:
    """The stage ``bab``.

    >>> from torch import nn
    >>> from gls_lirpa.engine.bounds import BoundEngine
    >>> from gls_lirpa.engine.boxes import linf_box
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    >>> x = torch.rand(1, 1, 2, 2)
    >>> label, box = model(x).argmax(1), linf_box(x, 0.01)
    >>> samples = OpenSamples(torch.arange(1), x, label, box, torch.full((1, 2), -1.0), torch.zeros(1, 2).bool())
    >>> found = BranchAndBound()(Subject(model, BoundEngine(model, x)), samples, timeout=10.0)
    >>> bool((found.lower > 0).all()), found.exhausted
    (True, [False])
    """

    name = "bab"
    batch = 1

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = Settings() if settings is None else settings
        self._subject: Subject | None = None
        self._builder: FormBuilder | None = None

    def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
        lower = torch.full_like(samples.lower, -torch.inf)
        counterexamples: list[Tensor | None] = []
        exhausted: list[bool] = []
        for i in range(len(samples)):
            deadline = time.monotonic() + timeout
            rows = (~samples.proven[i]).nonzero().flatten()
            spec = margin_spec(samples.labels[i : i + 1], subject.engine.classes, samples.x.dtype)[0]
            outcome = self.search(
                subject, samples.x[i], samples.box[i : i + 1], spec[rows], samples.lower[i][rows], deadline=deadline
            )
            lower[i, rows] = outcome.lower.to(lower)
            counterexamples.append(outcome.counterexample)
            exhausted.append(outcome.exhausted)
        return Findings(lower, counterexamples, exhausted)

    def search(
        self, subject: Subject, x: Tensor, box: Box, spec: Tensor, known: Tensor, *, deadline: float = math.inf
    ) -> Outcome:
        """Decide the rows ``spec`` of one sample, whose lower bounds ``known`` are already proven.

        A sample with too many unstable neurons for the memory set aside counts as stopped by a limit.
        """
        with torch.no_grad():
            try:
                form = self._form_builder(subject, x).form(box, spec)
            except FormTooLargeError:
                return Outcome(known.double(), None, True, 0)
            logits = subject.model(x.unsqueeze(0))
            target = AIM * max(1.0, float(logits.abs().max()))
            settings = self.settings

            def tree(form: SplitForm, spec: Tensor, known: Tensor, settings: Settings) -> Outcome:
                steps, more = settings.tightening_iterations, settings.group_iterations
                if steps or more:
                    form = tightened(form, iterations=steps, group_iterations=more, deadline=deadline)
                descent = Descent(subject.model, box, spec)
                return _Search(form, descent, known, target, deadline, subject.seed, settings).run()

            first = tree(form, spec, known.double(), settings.first)
            rows = (first.lower <= target).nonzero().flatten()
            left = math.inf if settings.max_nodes is None else settings.max_nodes - first.nodes
            enough = settings.group_iterations and len(rows) and left >= 2 * len(rows)
            if not first.exhausted or not enough or time.monotonic() > deadline:
                return first
            found = self._recombined(Descent(subject.model, box, spec[rows]), subject.seed, deadline)
            if found is not None:
                return replace(first, counterexample=found, exhausted=False)
            settings = replace(settings, iterations=settings.second_iterations)
            if settings.max_nodes is not None:
                settings = replace(settings, max_nodes=int(left))
            form = replace(form, weight=form.weight[rows], offset=form.offset[rows])
            second = tree(form, spec[rows], first.lower[rows], settings)
            lower = first.lower.index_copy(0, rows, torch.maximum(first.lower[rows], second.lower))
            return Outcome(lower, second.counterexample, second.exhausted, first.nodes + second.nodes)

    def _recombined(self, descent: Descent, seed: int, deadline: float) -> Tensor | None:
        """A counterexample of the attack between the trees, which gets a share of the time that is left."""
        population, rounds = self.settings.population, self.settings.rounds
        if not rounds:
            return None
        now = time.monotonic()
        until = now + _ATTACK_SHARE * (deadline - now)
        return descent.recombine(population=population, rounds=rounds, seed=seed, deadline=until)

    def _form_builder(self, subject: Subject, x: Tensor) -> FormBuilder:
        if self._builder is None or self._subject is not subject:
            self._subject, self._builder = subject, FormBuilder(subject.model, x.unsqueeze(0))
        return self._builder


class _Search:
    """The tree of one sample."""

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

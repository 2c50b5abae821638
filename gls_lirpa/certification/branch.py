"""Branch and bound over ReLU splits: the complete last stage of the cascade.

One search per sample, over all its open classes together, in steps of growing cost. A small first tree decides easy
samples. What it leaves open is attacked with points that exchange parts of their inputs; then bounded in blocks, each
with a tree of its own, whose sizes add up; and at last by a second tree with bounds of groups of neurons, which goes on
until it ends or a limit does.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Box, margin_spec
from gls_lirpa.certification.branch_attack import Descent
from gls_lirpa.certification.branch_blocks import bound_in_blocks
from gls_lirpa.certification.branch_settings import Settings
from gls_lirpa.certification.branch_tree import Outcome, Tree
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from gls_lirpa.engine.split import FormBuilder, FormTooLargeError, SplitForm
from gls_lirpa.engine.split_tighten import tightened

AIM = 2e-4
"""Subproblems are bounded until above AIM · max(1, |logits|): twice the margin below which a bound in
float32 does not count as a proof."""

ABOVE = 1.05
"""Of what a proof needs, so that a bound at the aim suffices after rounding."""

_ATTACK_SHARE = 1 / 3
"""Of the time after the first tree, for large networks; on a cnn3 all rounds take less."""

_BLOCK_SHARE = 1 / 2
"""Of the time and the nodes left after the attack; the second tree has the rest."""


class BranchAndBound:
    """The stage ``bab``.

    >>> from torch import nn
    >>> from gls_lirpa.engine.bounds import BoundEngine
    >>> from gls_lirpa.base.boxes import linf_box
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
    exact = True

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
            spec = margin_spec(samples.labels[i : i + 1], subject.engine.classes, samples.x.dtype)[0][rows]
            box, known, needed = samples.box[i : i + 1], samples.lower[i][rows], needed_of(samples, i, rows)
            outcome = self.search(subject, samples.x[i], box, spec, known, deadline=deadline, needed=needed)
            lower[i, rows] = outcome.lower.to(lower)
            counterexamples.append(outcome.counterexample)
            exhausted.append(outcome.exhausted)
        return Findings(lower, counterexamples, exhausted)

    def search(
        self,
        subject: Subject,
        x: Tensor,
        box: Box,
        spec: Tensor,
        known: Tensor,
        *,
        deadline: float = math.inf,
        needed: float = 0.0,
    ) -> Outcome:
        """Decide the rows ``spec`` of one sample, whose lower bounds ``known`` are already proven: above ``needed``.

        A sample with too many unstable neurons for the memory set aside counts as stopped by a limit.
        """
        with torch.no_grad():
            try:
                form = self._form_builder(subject, x).form(box, spec)
            except FormTooLargeError:
                return Outcome(known.double(), None, True, 0)
            logits = subject.model(x.unsqueeze(0))
            target = max(AIM * max(1.0, float(logits.abs().max())), ABOVE * needed)
            settings = self.settings
            steps = settings.tightening_iterations
            if steps:
                form = tightened(form, iterations=steps, deadline=deadline)
            descent = Descent(subject.model, box, spec)
            first = Tree(form, descent, known.double(), target, deadline, subject.seed, settings.first).run()
            rows = (first.lower <= target).nonzero().flatten()
            left = math.inf if settings.max_nodes is None else settings.max_nodes - first.nodes
            enough = settings.group_iterations and len(rows) and left >= 2 * len(rows)
            if not first.exhausted or not enough or time.monotonic() > deadline:
                return first
            descent = descent.of_rows(rows)
            found = self._recombined(descent, subject.seed, deadline)
            if found is not None:
                return replace(first, counterexample=found, exhausted=False)
            more = settings.group_iterations
            form = tightened(_rows(form, rows), iterations=steps, group_iterations=more, deadline=deadline)
            second = self._tight(form, descent, first.lower[rows], target, left, deadline, subject.seed)
            lower = first.lower.index_copy(0, rows, torch.maximum(first.lower[rows], second.lower))
            return replace(second, lower=lower, nodes=first.nodes + second.nodes)

    def _tight(
        self,
        form: SplitForm,
        descent: Descent,
        known: Tensor,
        target: float,
        left: float,
        deadline: float,
        seed: int,
    ) -> Outcome:
        """What the first tree left open: in blocks, then by the second tree."""
        lower, nodes = self._in_blocks(form, known, target, _BLOCK_SHARE * left, deadline)
        rows = (lower <= target).nonzero().flatten()
        left -= nodes
        if not len(rows) or left < 2 * len(rows) or time.monotonic() > deadline:
            return Outcome(lower, None, len(rows) > 0, nodes)
        settings = replace(self.settings, iterations=self.settings.second_iterations)
        if settings.max_nodes is not None:
            settings = replace(settings, max_nodes=int(left))
        form, descent = _rows(form, rows), descent.of_rows(rows)
        second = Tree(form, descent, lower[rows], target, deadline, seed, settings).run()
        lower = lower.index_copy(0, rows, torch.maximum(lower[rows], second.lower))
        return replace(second, lower=lower, nodes=nodes + second.nodes)

    def _in_blocks(
        self, form: SplitForm, known: Tensor, target: float, left: float, deadline: float
    ) -> tuple[Tensor, int]:
        """The rows' bounds by trees of blocks, one row after the other, and the leaves bounded."""
        nodes, lower = 0, known.tolist()
        now = time.monotonic()
        until = now + _BLOCK_SHARE * (deadline - now)
        for row in range(len(lower)) if self.settings.block_splits else ():
            now, rows = time.monotonic(), len(lower) - row
            bound, more = bound_in_blocks(
                form,
                row,
                self.settings,
                target=target,
                max_nodes=(left - nodes) // rows if math.isfinite(left) else math.inf,
                deadline=now + (until - now) / rows,
            )
            nodes, lower[row] = nodes + more, max(lower[row], bound)
        return torch.tensor(lower, dtype=torch.float64, device=known.device), nodes

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


def needed_of(samples: OpenSamples, i: int, rows: Tensor) -> float:
    """What every one of some rows of a sample must exceed; 0 where that is more than any search could show."""
    if samples.needed is None or not len(rows):
        return 0.0
    needed = float(samples.needed[i][rows].max())
    return needed if math.isfinite(needed) else 0.0


def _rows(form: SplitForm, rows: Tensor) -> SplitForm:
    """The same form for some of its rows."""
    return replace(form, weight=form.weight[rows], offset=form.offset[rows])

"""The solver's complete searches as stages of the cascade."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gls_lirpa.base.boxes import margin_spec
from gls_lirpa.certification.stage import STAGES, Findings, OpenSamples, Stage, StageOptions, Subject
from gls_lirpa.solver import Query, SearchOutcome, Solver, SolverSettings

Search = Callable[[Solver, Query], SearchOutcome]

SEARCHES: dict[str, Search] = {
    "bab": Solver.branch_and_bound,
    "input-split": Solver.split_inputs,
    "milp": Solver.exact,
}


class CompleteStage:
    """One sample after the other, its open rows together, by the search of this ``name``.

    ``search`` replaces the one of that name.

    >>> from torch import nn
    >>> from gls_lirpa.engine.bounds import BoundEngine
    >>> from gls_lirpa.base.boxes import linf_box
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    >>> x = torch.rand(1, 1, 2, 2)
    >>> label, box = model(x).argmax(1), linf_box(x, 0.01)
    >>> samples = OpenSamples(torch.arange(1), x, label, box, torch.full((1, 2), -1.0), torch.zeros(1, 2).bool())
    >>> subject = Subject(model, BoundEngine(model, x))
    >>> [bool((CompleteStage(name)(subject, samples, timeout=10.0).lower > 0).all()) for name in SEARCHES]
    [True, True, True]
    """

    batch = 1
    complete = True

    def __init__(self, name: str, settings: SolverSettings | None = None, *, search: Search | None = None) -> None:
        self.name = name
        self.settings = SolverSettings() if settings is None else settings
        self.exact = name != "input-split"
        self.by_parts = name == "input-split"
        self.max_inputs = self.settings.max_inputs if name == "input-split" else None
        self._search = SEARCHES[name] if search is None else search
        self._solver: tuple[Subject, Solver] | None = None

    def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
        lower = torch.full_like(samples.lower, -torch.inf)
        counterexamples: list[Tensor | None] = []
        exhausted: list[bool] = []
        for i in range(len(samples)):
            deadline = time.monotonic() + timeout
            rows = (~samples.proven[i]).nonzero().flatten()
            spec = margin_spec(samples.labels[i : i + 1], subject.engine.classes, samples.x.dtype)[0][rows]
            known, needed = samples.lower[i][rows], needed_of(samples, i, rows)
            query = Query(samples.box[i : i + 1], spec, known, needed, deadline)
            outcome = self._search(self.solver(subject), query)
            lower[i, rows] = outcome.lower.to(lower)
            counterexamples.append(outcome.counterexample)
            exhausted.append(outcome.exhausted)
        return Findings(lower, counterexamples, exhausted)

    def solver(self, subject: Subject) -> Solver:
        """The solver of a network, kept for its next samples."""
        if self._solver is None or self._solver[0] is not subject:
            self._solver = subject, Solver(subject.model, subject.engine, self.settings, seed=subject.seed)
        return self._solver[1]


def needed_of(samples: OpenSamples, i: int, rows: Tensor) -> float:
    """What every one of some rows of a sample must exceed; 0 where that is more than any search could show."""
    if samples.needed is None or not len(rows):
        return 0.0
    needed = float(samples.needed[i][rows].max())
    return needed if math.isfinite(needed) else 0.0


def _stage(options: StageOptions, *, name: str) -> Stage:
    settings = options.bab
    if options.max_nodes is not None:
        settings = replace(settings, max_nodes=options.max_nodes)
    return CompleteStage(name, settings)


STAGES.register("bab", partial(_stage, name="bab"), aliases=("branch-and-bound",))
STAGES.register("input-split", partial(_stage, name="input-split"), aliases=("input-bab",))
STAGES.register("milp", partial(_stage, name="milp"), aliases=("exact",))

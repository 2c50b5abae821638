"""The door of the solver: complete decisions of specification rows of one network over boxes."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import nn

from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import ConfigError
from gls_lirpa.solver.builder import FormBuilder, FormTooLargeError
from gls_lirpa.solver.descent import Descent
from gls_lirpa.solver.exact import minimise
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.input_split import split_inputs
from gls_lirpa.solver.operators import OperatorForm
from gls_lirpa.solver.query import Query, SearchOutcome
from gls_lirpa.solver.settings import SolverSettings
from gls_lirpa.solver.tighten import tightened
from gls_lirpa.solver.tree import Goal, Tree

AIM = 2e-4
"""A row counts as proven above AIM · max(1, |logits|). What the cascade asks of a proof in float64 is far less; a tree
that ends a little later never hands it a bound it has to refuse, and half of this margin covers what rounding in
float32 does to the bounds of open domains."""

ABOVE = 1.05
"""Of what the cascade asks for, where that is more: a bound at the aim then suffices after its last rounding."""


class Solver:
    """Complete verification of one network, the ``model``, of the rows of a ``query``.

    ``engine``: the network's bounds; ``settings``: None for the defaults; ``seed``: of attacks and LP solver.

    >>> from gls_lirpa.base.boxes import linf_box
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval().requires_grad_(False)
    >>> x = torch.rand(1, 1, 2, 2)
    >>> solver = Solver(model, BoundEngine(model, x))
    >>> sign = 1 - 2 * model(x).argmax(1)
    >>> query = Query(linf_box(x, 0.01), sign[:, None] * torch.tensor([[1.0, -1.0]]), torch.tensor([-torch.inf]))
    >>> [bool(solve(query).lower > 0) for solve in (solver.branch_and_bound, solver.split_inputs, solver.exact)]
    [True, True, True]
    """

    def __init__(
        self, model: nn.Module, engine: BoundEngine, settings: SolverSettings | None = None, *, seed: int = 0
    ) -> None:
        self.settings = SolverSettings() if settings is None else settings
        self._model = model
        self._engine = engine
        self._seed = seed
        self._builder: FormBuilder | None = None

    def branch_and_bound(self, query: Query) -> SearchOutcome:
        """Split unstable neurons, in steps of growing cost.

        A small first tree decides easy samples. What it leaves open goes to a second tree with a multi-neuron
        relaxation, until that ends or a limit does.
        """
        with torch.no_grad():
            stable = self._form_builder(query).stability(query.box, query.spec)
            goal = self._goal(query)
            try:
                form = self._form_builder(query).split(stable)
            except FormTooLargeError:
                return self._search(self._form_builder(query).operators(stable), query, goal)
            steps = self.settings.tightening_iterations
            return self._search(tightened(form, iterations=steps, deadline=goal.deadline), query, goal)

    def _search(self, form: SplitForm | OperatorForm, query: Query, goal: Goal) -> SearchOutcome:
        settings, descent = self.settings, Descent(self._model, query.box, query.spec)
        first = Tree(form, descent, goal, settings.first).run()
        rows = (first.lower <= goal.target).nonzero().flatten()
        left = math.inf if settings.max_nodes is None else settings.max_nodes - first.nodes
        enough = settings.group_iterations and len(rows) and left >= 2 * len(rows)
        if not first.exhausted or not enough or time.monotonic() > goal.deadline:
            return first
        descent, form = descent.of_rows(rows), form.of_rows(rows)
        second = replace(settings, max_nodes=None if math.isinf(left) else int(left))
        if isinstance(form, SplitForm):
            second = replace(second, iterations=settings.second_iterations)
            steps, more = settings.tightening_iterations, settings.group_iterations
            form = tightened(form, iterations=steps, group_iterations=more, deadline=goal.deadline)
        rest = Tree(form, descent, replace(goal, known=first.lower[rows]), second).run()
        lower = first.lower.index_copy(0, rows, torch.maximum(first.lower[rows], rest.lower))
        return replace(rest, lower=lower, nodes=first.nodes + rest.nodes)

    def split_inputs(self, query: Query) -> SearchOutcome:
        """Halve the box instead: complete, and fast where few inputs vary."""
        return split_inputs(self._model, self._engine, query, self.settings)

    def exact(self, query: Query, *, decide: bool = True) -> SearchOutcome:
        """Every row by a MILP: the reference, for small networks.

        ``decide`` stops each MILP once the sign of its row is known, otherwise its minimum is computed.
        """
        builder = self._form_builder(query)
        if builder.relus > self.settings.max_relus:
            raise ConfigError(
                f"milp is for networks of up to {self.settings.max_relus} ReLUs, this one has {builder.relus}: "
                "use the stage 'bab'"
            )
        with torch.no_grad():
            form, goal = builder.form(query.box, query.spec), self._goal(query)
        descent = Descent(self._model, query.box, query.spec)
        lower = torch.full((len(query.spec),), -torch.inf, dtype=torch.float64)
        exhausted = False
        # The lowest first: it is the likeliest counterexample, and one is enough.
        for row in query.known.argsort(stable=True).tolist():
            answer = minimise(
                form,
                row,
                cutoff=goal.target if decide else math.inf,
                target=-goal.target if decide else -math.inf,
                time_limit=goal.deadline - time.monotonic(),
                seed=self._seed,
            )
            lower[row] = answer.bound
            exhausted |= answer.status == "limit"
            if answer.t is not None and answer.value <= 0:
                x = descent.inside(form.point(answer.t.unsqueeze(0)))
                found = descent.search(x, torch.tensor([row]), starts=1, steps=self.settings.attack_steps)
                if found is not None or answer.status == "optimal":
                    return SearchOutcome(lower, x[0] if found is None else found, False, 0)
        return SearchOutcome(lower, None, exhausted, 0)

    def _goal(self, query: Query) -> Goal:
        logits = self._model(query.box.center)
        target = max(AIM * max(1.0, float(logits.abs().max())), ABOVE * query.needed)
        return Goal(query.known.double(), target, query.deadline, self._seed)

    def _form_builder(self, query: Query) -> FormBuilder:
        if self._builder is None:
            self._builder = FormBuilder(self._model, query.box.lower, max_mib=self.settings.form_mib)
        return self._builder

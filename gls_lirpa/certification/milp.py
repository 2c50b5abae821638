"""The exact oracle as a stage: every open margin of a sample decided by a MILP on HiGHS.

Meant for small networks and as the reference of the tests; branch and bound is the fast one.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from gls_lirpa.base.boxes import margin_spec
from gls_lirpa.certification.branch import ABOVE, AIM, needed_of
from gls_lirpa.certification.branch_attack import Descent
from gls_lirpa.certification.exact_lp import minimise
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from gls_lirpa.engine.split import FormBuilder
from gls_lirpa.errors import ConfigError


class ExactOracle:
    """The stage ``milp``.

    ``decide`` stops each MILP once the sign of the margin is known, otherwise its minimum is computed.
    Networks with more than ``max_relus`` ReLUs are refused.

    >>> from torch import nn
    >>> from gls_lirpa.engine.bounds import BoundEngine
    >>> from gls_lirpa.base.boxes import linf_box
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    >>> x = torch.rand(1, 1, 2, 2)
    >>> label, box = model(x).argmax(1), linf_box(x, 0.01)
    >>> samples = OpenSamples(torch.arange(1), x, label, box, torch.full((1, 2), -1.0), torch.zeros(1, 2).bool())
    >>> found = ExactOracle()(Subject(model, BoundEngine(model, x)), samples, timeout=10.0)
    >>> bool((found.lower > 0).all()), found.exhausted
    (True, [False])
    """

    name = "milp"
    batch = 1
    exact = True

    def __init__(self, *, decide: bool = True, max_relus: int = 5000) -> None:
        if max_relus < 1:
            raise ConfigError(f"expected max_relus >= 1, got {max_relus}")
        self._decide = decide
        self._max_relus = max_relus
        self._subject: Subject | None = None
        self._builder: FormBuilder | None = None

    def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
        lower = torch.full_like(samples.lower, -torch.inf)
        counterexamples: list[Tensor | None] = [None] * len(samples)
        exhausted = [False] * len(samples)
        for i in range(len(samples)):
            rows = (~samples.proven[i]).nonzero().flatten()
            # The lowest margin first: it is the likeliest counterexample, and one is enough.
            rows = rows[samples.lower[i][rows].argsort(stable=True)]
            bounds, counterexamples[i], exhausted[i] = self._sample(
                subject, samples, i, rows, time.monotonic() + timeout
            )
            lower[i, rows] = bounds.to(lower)
        return Findings(lower, counterexamples, exhausted)

    def _sample(
        self, subject: Subject, samples: OpenSamples, i: int, rows: Tensor, deadline: float
    ) -> tuple[Tensor, Tensor | None, bool]:
        box = samples.box[i : i + 1]
        spec = margin_spec(samples.labels[i : i + 1], subject.engine.classes, samples.x.dtype)[0][rows]
        with torch.no_grad():
            form = self._form_builder(subject, samples.x[i]).form(box, spec)
            logits = subject.model(samples.x[i : i + 1])
        aim = max(AIM * max(1.0, float(logits.abs().max())), ABOVE * needed_of(samples, i, rows))
        descent = Descent(subject.model, box, spec)
        bounds = torch.full((len(rows),), -torch.inf, dtype=torch.float64)
        exhausted = False
        for row in range(len(rows)):
            answer = minimise(
                form,
                row,
                cutoff=aim if self._decide else math.inf,
                target=-aim if self._decide else -math.inf,
                time_limit=deadline - time.monotonic(),
                seed=subject.seed,
            )
            bounds[row] = answer.bound
            exhausted |= answer.status == "limit"
            if answer.t is not None and answer.value <= 0:
                x = descent.inside(form.point(answer.t.unsqueeze(0)))
                found = descent.search(x, torch.tensor([row]), starts=1, steps=5)
                if found is not None or answer.status == "optimal":
                    return bounds, x[0] if found is None else found, False
        return bounds, None, exhausted

    def _form_builder(self, subject: Subject, x: Tensor) -> FormBuilder:
        if self._builder is None or self._subject is not subject:
            builder = FormBuilder(subject.model, x.unsqueeze(0))
            if builder.relus > self._max_relus:
                raise ConfigError(
                    f"milp is for networks of up to {self._max_relus} ReLUs, this one has {builder.relus}: "
                    "use the stage 'bab'"
                )
            self._subject, self._builder = subject, builder
        return self._builder

"""What the solver is asked, and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gls_lirpa.base.boxes import Box


@dataclass(frozen=True)
class Query:
    """Specification rows ``spec`` (rows, classes) · f over the ``box`` of one sample.

    ``known``: lower bounds proven before; ``needed``: what a bound must exceed to be a proof; ``deadline``: of
    ``time.monotonic``.
    """

    box: Box
    spec: Tensor
    known: Tensor
    needed: float = 0.0
    deadline: float = math.inf


@dataclass(frozen=True)
class SearchOutcome:
    """``lower`` bounds of the rows, an input that is a ``counterexample`` or None; ``exhausted``: whether a limit ended
    the search; ``nodes`` that were bounded."""

    lower: Tensor
    counterexample: Tensor | None
    exhausted: bool
    nodes: int

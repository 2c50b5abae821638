"""Convex relaxations as stages, from the cheapest to the tightest."""

from __future__ import annotations

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Bounds, Box, crossed, margin_spec
from gls_lirpa.certification.stage import STAGES, Findings, OpenSamples, Stage, StageOptions, Subject
from gls_lirpa.errors import EngineError
from gls_lirpa.relaxations import RELAXATIONS, Relaxation, get_relaxation


class BoundStage:
    """Lower bounds of the margins not proven yet, by one relaxation.

    ``fallback`` is used where the relaxation does not work in float64.
    """

    def __init__(self, relaxation: Relaxation, *, batch: int, fallback: Relaxation | None = None) -> None:
        self.name = relaxation.name
        self.batch = batch
        self._relaxation = relaxation
        self._fallback = fallback

    def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
        del timeout  # one call per sample, whose cost depends on the network alone
        classes = open_classes(samples.proven)
        spec = margin_spec(samples.labels, subject.engine.classes, samples.box.lower.dtype)
        rows = spec.gather(1, classes.unsqueeze(2).expand(-1, -1, spec.shape[2]))
        with torch.no_grad():
            found = self._bounds(subject, samples.box, rows)
        lower = torch.full_like(samples.lower, -torch.inf)
        lower.scatter_(1, classes, torch.where(crossed(found).unsqueeze(1), -torch.inf, found.lower))
        return Findings(lower, [None] * len(samples), [False] * len(samples))

    def _bounds(self, subject: Subject, box: Box, rows: Tensor) -> Bounds:
        if self._fallback is None or box.lower.dtype != torch.float64:
            return subject.engine.bounds(box, rows, self._relaxation)
        try:
            return subject.engine.bounds(box, rows, self._relaxation)
        except EngineError:
            return subject.engine.bounds(box, rows, self._fallback)


def open_classes(proven: Tensor) -> Tensor:
    """Columns that hold every unproven class of each sample: as many as the neediest sample has.

    Samples with fewer get some of their proven classes as well.

    >>> open_classes(torch.tensor([[True, False, True], [False, True, True]])).tolist()
    [[1], [0]]
    """
    width = max(1, int((~proven).sum(1).max()))
    return proven.to(torch.uint8).argsort(dim=1, stable=True)[:, :width]


def _register(name: str, relaxation: Relaxation, aliases: tuple[str, ...]) -> None:
    """Every relaxation is a stage of its name."""

    def make(options: StageOptions) -> Stage:
        iterations = options.iterations if "iterations" in relaxation.options else None
        fallback = None if relaxation.fallback is None else get_relaxation(relaxation.fallback)
        return BoundStage(get_relaxation(relaxation, iterations=iterations), batch=relaxation.batch, fallback=fallback)

    STAGES.register(name, make, aliases=aliases)


RELAXATIONS.follow(_register)

"""A batch on its way through the cascade."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gls_lirpa.certification.records import Record
from gls_lirpa.certification.stage import OpenSamples
from gls_lirpa.engine.boxes import Box


@dataclass
class Batch:
    """What is known of each sample. Margins, bounds and tolerances are float64.

    ``margins``: at the sample itself; ``tolerance`` (b, 1): what a bound must exceed to be a proof;
    ``lower``: best bound so far; ``proven``: classes it suffices for.
    """

    indices: Tensor
    x: Tensor
    labels: Tensor
    box: Box
    predictions: list[int]
    margins: Tensor
    tolerance: Tensor
    spent: list[dict[str, float]]
    lower: Tensor = field(init=False)
    proven: Tensor = field(init=False)
    open: list[bool] = field(init=False)
    exhausted: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.lower = torch.full_like(self.margins, -torch.inf)
        self.proven = torch.zeros_like(self.margins, dtype=torch.bool)
        self.open = [True] * len(self)
        self.exhausted = [False] * len(self)

    def __len__(self) -> int:
        return len(self.labels)

    def samples(self, part: Tensor, dtype: torch.dtype) -> OpenSamples:
        """Some samples as a stage sees them; float32 boxes are exact in float64."""
        box = Box(self.box.lower[part].to(dtype), self.box.upper[part].to(dtype))
        x, lower = self.x[part].to(dtype), self.lower[part].to(dtype)
        return OpenSamples(self.indices[part], x, self.labels[part], box, lower, self.proven[part])

    def positions(self) -> list[int]:
        """Of the samples that are open."""
        return [i for i, is_open in enumerate(self.open) if is_open]

    def due(self, timeout: float) -> Tensor:
        """Positions of open samples that have time left; the others are marked as exhausted."""
        within = []
        for i in self.positions():
            if sum(self.spent[i].values()) < timeout:
                within.append(i)
            else:
                self.exhausted[i] = True
        return torch.tensor(within, dtype=torch.int64)

    def time_used(self, part: Tensor) -> float:
        """The longest that any of some samples has taken so far."""
        return max(sum(self.spent[int(i)].values()) for i in part)

    def last_stage(self, i: int) -> str:
        """The last one that worked on a sample."""
        return list(self.spent[i])[-1]

    def verified(self, i: int) -> bool:
        return bool(self.proven[i].all())

    def near_zero(self, i: int) -> bool:
        """Not verified, but no margin's bound is below zero by more than the tolerance."""
        return not self.verified(i) and bool((self.proven[i] | (self.lower[i] > -self.tolerance[i])).all())

    def record(self, i: int, verdict: str, stage: str, point: Tensor | None = None) -> Record:
        """Close a sample."""
        self.open[i] = False
        bound = float(self.lower[i].min())
        return Record(
            index=int(self.indices[i]),
            label=int(self.labels[i]),
            prediction=self.predictions[i],
            verdict=verdict,
            stage=stage,
            bound=bound if math.isfinite(bound) else None,
            spent=self.spent[i],
            exhausted=self.exhausted[i] and verdict == "unknown",
            adversarial=point,
        )

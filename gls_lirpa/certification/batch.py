"""A batch on its way through the cascade."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Box
from gls_lirpa.certification.network import Requirements
from gls_lirpa.certification.records import Record
from gls_lirpa.certification.rounding import covered
from gls_lirpa.certification.stage import OpenSamples

ENDED = 0.9
"""A search that a limit ended after this share of the time was ended by the time, not by the nodes."""


@dataclass
class Batch:
    """What is known of each sample. Margins, bounds and requirements are float64.

    ``margins``: at the sample itself; ``required``: what a bound must exceed to be a proof, over the sample's own box
    if it is ``refined``, with ranges by CROWN if it is ``narrowed``; ``plausible`` (b, 1): usual rounding; ``lower``:
    best bound so far; ``proven``: classes it suffices for; ``errors``: stages that failed on a sample, and how.
    """

    indices: Tensor
    x: Tensor
    labels: Tensor
    box: Box
    predictions: list[int]
    margins: Tensor
    required: Requirements
    plausible: Tensor
    refined: Tensor
    spent: list[dict[str, float]]
    lower: Tensor = field(init=False)
    proven: Tensor = field(init=False)
    open: list[bool] = field(init=False)
    exhausted: list[bool] = field(init=False)
    errors: list[dict[str, str]] = field(init=False)
    narrowed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.lower = torch.full_like(self.margins, -torch.inf)
        self.proven = torch.zeros_like(self.margins, dtype=torch.bool)
        self.open = [True] * len(self)
        self.exhausted = [False] * len(self)
        self.errors = [{} for _ in range(len(self))]
        self.narrowed = torch.zeros(len(self), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.labels)

    def samples(self, part: Tensor, dtype: torch.dtype, *, exact: bool = False) -> OpenSamples:
        """Some samples as a stage sees them; float32 boxes are exact in float64.

        A stage that proves in float64 may build on earlier bounds less what those may be off by.
        """
        box = self.box[part].map(lambda end: end.to(dtype))
        x, lower = self.x[part].to(dtype), self.lower[part]
        if exact:
            lower = torch.nan_to_num(lower - self.required.slack[part], nan=-torch.inf)
        needed = self.required.solver[part]
        proven = self.proven[part]
        return OpenSamples(self.indices[part], x, self.labels[part], box, lower.to(dtype), proven, needed)

    def doubt(self, part: Tensor) -> Tensor:
        """How far a bound may be above a computed margin, or disagree with one, by rounding alone."""
        forward = self.required.forward[part]
        return self.plausible[part] + torch.where(torch.isfinite(forward), forward, 0.0)

    def coarse(self, part: Tensor, lower: Tensor | None = None) -> Tensor:
        """Those of some samples whose own box's rounding matters: all, or those that such bounds may prove with it."""
        due = ~self.refined[part]
        if lower is not None:
            enough = self.proven[part] | (lower > self.required.single[part])
            due = due & (enough | (lower > -self.plausible[part])).all(1) & ~enough.all(1)
            # The same bounds in float64 prove these, at about the price of their own boxes' rounding.
            due = due & ~(self.proven[part] | (lower > self.required.double[part])).all(1)
        return part[due]

    def stopped(self, part: Tensor) -> Tensor:
        """Those of some samples whose bounds are positive, but below what rounding requires even of float64."""
        lower, enough = self.lower[part], self.proven[part] | (self.lower[part] > self.required.double[part])
        return part[(~self.narrowed[part] & (self.proven[part] | (lower > 0)).all(1) & ~enough.all(1)).cpu()]

    def demanding(self, part: Tensor) -> Tensor:
        """Those of some samples of which rounding requires half of their own margins or more."""
        much = (self.required.solver[part] > self.margins[part] / 2) & ~self.proven[part]
        return part[(~self.narrowed[part] & much.any(1)).cpu()]

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

    def worth_repeating(self, i: int) -> bool:
        """Not verified, but every margin's bound is one that a bound in float64 may turn into a proof."""
        least = self.required.double[i] - self.plausible[i]
        return not self.verified(i) and bool((self.proven[i] | (self.lower[i] > least)).all())

    def reason(self, i: int, timeout: float, max_nodes: int | None) -> tuple[str, str]:
        """Why a sample is unknown, and in more words where there are any."""
        if self.errors[i]:
            stage, message = next(iter(self.errors[i].items()))
            return "error", f"{stage}: {message}"
        if self.predictions[i] == -1:
            return "numerical", "the network's logits are not finite"
        if bool((self.proven[i] | (self.lower[i] > 0)).all()):
            return "numerical", self.required.reason or "the bound is positive, but rounding may exceed it"
        if self.exhausted[i]:
            if sum(self.spent[i].values()) >= ENDED * timeout:
                return "time", ""
            return ("nodes", "") if max_nodes is not None else ("memory", "")
        return "bound", ""

    def record(
        self, i: int, verdict: str, stage: str, point: Tensor | None = None, *, reason: tuple[str, str] = ("", "")
    ) -> Record:
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
            reason=reason[0],
            detail=reason[1],
            covers=covered(self.x.dtype) if verdict == "verified" else "",
            errors=self.errors[i],
            adversarial=point,
        )

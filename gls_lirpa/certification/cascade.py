"""The cascade: cheap stages decide what they can, dearer ones see what is left.

Stages find bounds and points; only here do findings become verdicts. A sample is verified if every
margin's bound is finite and above the numerical margin, falsified if a point of its box is
misclassified by the plain network. Whatever is numerically odd counts as no bound at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gls_lirpa.certification.batch import Batch
from gls_lirpa.certification.contradiction import Suspect, cross_check_attack, raise_contradiction
from gls_lirpa.certification.network import RECHECK_MARGIN, Network
from gls_lirpa.certification.records import Record
from gls_lirpa.certification.settings import DEFAULT_STAGES, Settings
from gls_lirpa.certification.stage import STAGES, Findings, OpenSamples, Stage, StageOptions, Subject
from gls_lirpa.engine.boxes import Box, linf_box
from gls_lirpa.errors import ConfigError, DataError, EngineError, UnsupportedLayerError

BATCH_SIZE = 512
"""Samples that go through the cascade together."""


class Cascade:
    """Certification of one network; ``example`` fixes the input shape.

    The evidence of a contradiction is saved in ``folder`` before it is raised. ``unusable``: stages
    left out because the network has a layer they cannot bound, and why.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> x = torch.rand(2, 1, 2, 2)
    >>> cascade = Cascade(model, x, Settings(eps=0.0, stages=("ibp",)))
    >>> [record.stage for record in cascade.run(x, model(x).argmax(1))]
    ['ibp', 'ibp']
    """

    def __init__(self, model: nn.Module, example: Tensor, settings: Settings, *, folder: str | Path = ".") -> None:
        self.settings = settings
        self.network = Network(model, example, seed=settings.seed)
        self._stages: list[Stage] = [STAGES.get(name)(settings.options) for name in settings.stages]
        self._folder = Path(folder)
        self.unusable: dict[str, str] = {}

    def run(
        self, x: Tensor, labels: Tensor, indices: Tensor | None = None, *, box: Box | None = None
    ) -> Iterator[Record]:
        """The samples' records, each as soon as it is decided; the undecided come last.

        ``box`` replaces the ℓ∞ balls of the settings' radius: any finite boxes that hold their samples.
        """
        batch = self._admit(x, labels, indices, box)
        yield from self._judged(batch)
        for stage in self._stages if self.network.finite else ():
            for part in torch.split(batch.due(self.settings.timeout), stage.batch):
                if len(part) and stage.name not in self.unusable:
                    yield from self._apply(stage, batch, part)
        for i in batch.positions():
            yield batch.record(i, "unknown", batch.last_stage(i))

    def _judged(self, batch: Batch) -> Iterator[Record]:
        """Samples decided without any stage: misclassified, or tied with another class as they are."""
        for i, label in enumerate(batch.labels.tolist()):
            if batch.predictions[i] not in (label, -1):
                yield batch.record(i, "misclassified", "natural")
            elif bool((batch.margins[i] <= 0).any()) and self.network.refutes(batch.x[i], label, batch.box[i : i + 1]):
                yield batch.record(i, "falsified", "natural", batch.x[i])

    def _admit(self, x: Tensor, labels: Tensor, indices: Tensor | None, box: Box | None) -> Batch:
        """Check a batch and judge the samples themselves."""
        started = time.perf_counter()
        if labels.shape != x.shape[:1]:
            raise DataError(f"expected one label per image, got {tuple(labels.shape)} for {len(x)} images")
        x = self.network.inputs(x) if box is None else self.network.tensor(x)
        labels = labels.to(self.network.device, torch.int64)
        logits = self.network.logits(x)
        margins = self.network.margins(logits, labels)
        tolerance = self.network.tolerance(x, logits).unsqueeze(1)
        predictions = torch.where(torch.isfinite(logits).all(1), logits.argmax(1), -1).tolist()
        share = (time.perf_counter() - started) / len(x)
        return Batch(
            indices=torch.arange(len(x)) if indices is None else indices,
            x=x,
            labels=labels,
            box=linf_box(x, self.settings.eps) if box is None else self.network.box(x, box),
            predictions=predictions,
            margins=margins,
            tolerance=tolerance,
            spent=[{"natural": share} for _ in range(len(x))],
        )

    def _apply(self, stage: Stage, batch: Batch, part: Tensor) -> list[Record]:
        """Let a stage work on some open samples and draw the conclusions."""
        subject, limit = self.network.subject, self.settings.timeout - batch.time_used(part)
        started = time.perf_counter()
        findings = self._findings(stage, subject, batch.samples(part, self.network.dtype), limit)
        if findings is None:
            return []
        self._absorb(stage.name, batch, part, findings.lower)
        broken = self._broken(stage, batch, part, findings)
        self._recheck(stage, batch, part, findings, broken, limit - (time.perf_counter() - started))
        share = (time.perf_counter() - started) / len(part)
        records = []
        for i, exhausted in zip(part.tolist(), findings.exhausted, strict=True):
            batch.spent[i][stage.name] = share
            batch.exhausted[i] = exhausted
            if i in broken:
                records.append(batch.record(i, "falsified", stage.name, broken[i]))
            elif batch.verified(i):
                records.append(batch.record(i, "verified", stage.name))
        if self.settings.cross_check:
            self._cross_check(batch, part, broken)
        return records

    def _findings(self, stage: Stage, subject: Subject, samples: OpenSamples, timeout: float) -> Findings | None:
        """A stage that does not know some layer of the network is left out, as long as another bounds it."""
        try:
            return stage(subject, samples, timeout=timeout)
        except UnsupportedLayerError as error:
            self.unusable[stage.name] = str(error)
            if all(other.name in self.unusable or other.name == "pgd" for other in self._stages):
                raise
            return None

    def _absorb(self, stage: str, batch: Batch, part: Tensor, lower: Tensor) -> None:
        """Each bound is sound by itself, so the best of all stages is."""
        best = torch.maximum(batch.lower[part], self._sound(stage, batch, part, lower))
        # A class proven in float64 stays proven, though its bound may be below the float32 margin.
        batch.proven[part] |= best > batch.tolerance[part]
        batch.lower[part] = best

    def _sound(self, stage: str, batch: Batch, part: Tensor, lower: Tensor) -> Tensor:
        """Bounds in float64, −inf where they are not finite or above the margin at the sample itself."""
        lower = lower.to(batch.lower)
        lower = torch.where(torch.isfinite(lower), lower, -torch.inf)
        above = lower > batch.margins[part] + batch.tolerance[part]
        if self.settings.cross_check and bool(above.any()):
            row = int(above.any(1).nonzero()[0])
            i = int(part[row])
            self._contradiction(batch, i, stage, lower[row], batch.x[i])
        return torch.where(above, -torch.inf, lower)

    def _broken(self, stage: Stage, batch: Batch, part: Tensor, findings: Findings) -> dict[int, Tensor]:
        """Counterexamples that hold on the plain network, by position in the batch."""
        accepted: dict[int, Tensor] = {}
        for i, point in zip(part.tolist(), findings.counterexamples, strict=True):
            if point is not None and self.network.refutes(point, int(batch.labels[i]), batch.box[i : i + 1]):
                self._compare(batch, i, stage.name, point)
                accepted[i] = point
        return accepted

    def _compare(self, batch: Batch, i: int, stage: str, point: Tensor) -> None:
        """At a point of its box no margin may be below its bound, and none of a verified sample ≤ 0."""
        margins = self.network.margins_at(point, int(batch.labels[i]))
        below = margins < batch.lower[i] - batch.tolerance[i]
        if bool(below.any()) or (batch.verified(i) and bool((margins <= 0).any())):
            self._contradiction(batch, i, stage, batch.lower[i], point)

    def _recheck(
        self, stage: Stage, batch: Batch, part: Tensor, findings: Findings, broken: dict[int, Tensor], limit: float
    ) -> None:
        """Compute bounds that are too close to zero again in float64, by the same stage in the time left."""
        if limit <= 0:
            return
        bounded = torch.isfinite(findings.lower).any(1).tolist()
        candidates = [i for i, new in zip(part.tolist(), bounded, strict=True) if new and i not in broken]
        near = [i for i in candidates if batch.near_zero(i)]
        exact = self.network.exact_subject if near else None
        if exact is None:
            return
        again = torch.tensor(near)
        bounds = self._exact_bounds(stage, exact, batch, again, limit)
        renewed = ~batch.proven[again] & torch.isfinite(bounds)
        # The float64 bound replaces the float32 one, which may be the larger of the two by rounding.
        batch.lower[again] = torch.where(renewed, bounds, batch.lower[again])
        batch.proven[again] |= renewed & (bounds > RECHECK_MARGIN * batch.tolerance[again])

    def _exact_bounds(self, stage: Stage, exact: Subject, batch: Batch, part: Tensor, limit: float) -> Tensor:
        try:
            findings = stage(exact, batch.samples(part, torch.float64), timeout=limit)
        except EngineError:  # the stage does not work in float64, so it proves nothing more
            return torch.full_like(batch.lower[part], -torch.inf)
        return self._sound(stage.name, batch, part, findings.lower)

    def _cross_check(self, batch: Batch, part: Tensor, broken: dict[int, Tensor]) -> None:
        """Attack what was verified and bound what was attacked."""
        started = time.perf_counter()
        decided = [i for i in part.tolist() if not batch.open[i]]
        verified = torch.tensor([i for i in decided if i not in broken], dtype=torch.int64)
        samples = batch.samples(verified, self.network.dtype)
        points = cross_check_attack(self.network.subject, samples, self.settings.options)
        for i, point in zip(verified.tolist(), points, strict=True):
            self._compare(batch, i, "cross-check", point)
        attacked = torch.tensor(list(broken), dtype=torch.int64)
        for stage in self._stages if broken else ():
            for some in torch.split(attacked, stage.batch):
                self._bound_attacked(stage, batch, some, broken)
        share = (time.perf_counter() - started) / max(len(decided), 1)
        for i in decided:
            batch.spent[i]["cross-check"] = share

    def _bound_attacked(self, stage: Stage, batch: Batch, part: Tensor, broken: dict[int, Tensor]) -> None:
        samples = batch.samples(part, self.network.dtype)
        usable = stage.name not in self.unusable
        findings = self._findings(stage, self.network.subject, samples, self.settings.timeout) if usable else None
        if findings is not None:
            self._absorb(stage.name, batch, part, findings.lower)
            for i in part.tolist():
                self._compare(batch, i, stage.name, broken[i])

    def _contradiction(self, batch: Batch, i: int, stage: str, bounds: Tensor, point: Tensor) -> None:
        suspect = Suspect(int(batch.indices[i]), int(batch.labels[i]), batch.x[i], self.settings.eps, bounds, point)
        raise_contradiction(suspect, stage, self._folder)


def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    stages: Sequence[str] | None = None,
    timeout: float = 60.0,
    seed: int = 0,
    cross_check: bool = False,
    batch_size: int = BATCH_SIZE,
    options: StageOptions | None = None,
) -> list[Record]:
    """Certify samples in the ℓ∞ ball of radius ``eps`` in pixel space: one record each, in order.

    ``model`` takes pixels in [0, 1], normalising inside; it is copied and never modified. ``timeout``
    is the limit in seconds per sample.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x = torch.rand(2, 1, 2, 2)
    >>> [record.verdict for record in certify(model, x, model(x).argmax(1), eps=0.01)]
    ['verified', 'verified']
    """
    if batch_size < 1:
        raise ConfigError(f"expected batch_size >= 1, got {batch_size}")
    chosen = DEFAULT_STAGES if stages is None else tuple(stages)
    settings = Settings(eps, chosen, timeout, seed, cross_check, options or StageOptions())
    if len(x) == 0:
        return []
    cascade = Cascade(model, x, settings)
    records: list[Record] = []
    for start in range(0, len(x), batch_size):
        part = slice(start, start + batch_size)
        records += cascade.run(x[part], y[part], torch.arange(len(x))[part])
    return sorted(records, key=lambda record: record.index)

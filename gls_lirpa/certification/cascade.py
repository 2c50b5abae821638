"""The cascade: cheap stages decide what they can, dearer ones see what is left.

Stages find bounds and points; only here do findings become verdicts. A sample is verified if every
margin's bound is finite and above all that rounding can do, to the bound and to the network as it
runs; falsified if a point of its box is misclassified by the plain network. Whatever is numerically
odd counts as no bound at all. A stage that fails is noted for the samples it failed on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from gls_lirpa.base.balls import l2_ball
from gls_lirpa.base.boxes import Box, check_labels, linf_box
from gls_lirpa.certification.batch import Batch
from gls_lirpa.certification.contradiction import Suspect, cross_check_attack, raise_contradiction
from gls_lirpa.certification.network import Network
from gls_lirpa.certification.records import Record
from gls_lirpa.certification.requirements import narrow, prove_parts, refine
from gls_lirpa.certification.settings import Settings
from gls_lirpa.certification.stage import STAGES, Findings, OpenSamples, Stage, Subject, admits, has_flag
from gls_lirpa.errors import DataError, EngineError, UnsupportedLayerError

FAILURES = (
    *(EngineError, RuntimeError, MemoryError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError),
    *(AssertionError, OSError),
)
"""What a stage may raise where it fails; a wrong option or wrong data ends the certification instead."""

BATCH_SIZE = 512
"""Samples that go through the cascade together."""


class Cascade:
    """Certification of one network, ``model``, under ``settings``; ``example`` fixes the input shape.

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

        ``indices``: the samples' numbers in their records, by default those in ``x``; ``labels``: their classes.
        ``box`` replaces the balls of the settings' radius: any finite boxes that hold their samples.
        """
        batch = self._admit(x, labels, indices, box)
        yield from self._judged(batch)
        for stage in self._stages if self.network.finite else ():
            for part in torch.split(batch.due(self.settings.timeout), stage.batch):
                if len(part) and stage.name not in self.unusable and admits(stage, batch.box[part]):
                    yield from self._apply(stage, batch, part)
        for i in batch.positions():
            reason = batch.reason(i, self.settings.timeout, self.settings.options.max_nodes)
            if not self.network.finite:
                reason = "numerical", "a weight of the network is not finite"
            yield batch.record(i, "unknown", batch.last_stage(i), reason=reason)

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
        check_labels(labels, self.network.classes)
        if box is None and self.settings.norm == "l2":
            box = l2_ball(x, self.settings.eps, low=0.0, high=1.0)
        labels = labels.to(self.network.device, torch.int64)
        logits = self.network.logits(x)
        margins = self.network.margins(logits, labels)
        region = linf_box(x, self.settings.eps) if box is None else self.network.box(x, box)
        if box is None:  # what any image requires is enough for most bounds
            required = self.network.image_requirements(labels, logits)
        else:
            required = self.network.requirements(region, labels, logits)
        plausible = self.network.plausible(x, logits).unsqueeze(1)
        predictions = torch.where(torch.isfinite(logits).all(1), logits.argmax(1), -1).tolist()
        share = (time.perf_counter() - started) / len(x)
        return Batch(
            indices=torch.arange(len(x)) if indices is None else indices,
            x=x,
            labels=labels,
            box=region,
            predictions=predictions,
            margins=margins,
            required=required,
            plausible=plausible,
            refined=torch.full((len(x),), box is not None),
            spent=[{"natural": share} for _ in range(len(x))],
        )

    def _apply(self, stage: Stage, batch: Batch, part: Tensor) -> list[Record]:
        """Let a stage work on some open samples and draw the conclusions."""
        subject, limit = self.network.subject, self.settings.timeout - batch.time_used(part)
        started = time.perf_counter()
        if has_flag(stage, "exact"):
            refine(self.network, batch, batch.coarse(part))
            narrow(self.network, batch, batch.demanding(part))
        samples = batch.samples(part, self.network.dtype, exact=has_flag(stage, "exact"))
        try:
            findings = self._findings(stage, subject, samples, limit)
        except UnsupportedLayerError:  # no stage is left
            raise
        except FAILURES as error:
            if len(part) > 1:  # so that only those fail that must
                return [record for one in part.split(1) for record in self._apply(stage, batch, one)]
            self._failed(stage, batch, part, error, time.perf_counter() - started)
            return []
        if findings is None:
            return []
        self._absorb(stage, batch, part, findings.lower)
        broken = self._broken(stage, batch, part, findings)
        narrow(self.network, batch, batch.stopped(part))
        self._recheck(stage, batch, part, findings, broken, limit - (time.perf_counter() - started))
        if has_flag(stage, "by_parts"):
            left = torch.tensor([i for i in part.tolist() if i not in broken], dtype=torch.int64)
            prove_parts(self.network, batch, left, limit - (time.perf_counter() - started))
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
            if all(other.name in self.unusable or has_flag(other, "attacks") for other in self._stages):
                raise
            return None

    def _failed(self, stage: Stage, batch: Batch, part: Tensor, error: BaseException, seconds: float) -> None:
        """A failure proves nothing, and is told."""
        message = " ".join(str(error).split())[:300] or type(error).__name__
        for i in part.tolist():
            batch.spent[i][stage.name] = batch.spent[i].get(stage.name, 0.0) + seconds / len(part)
            batch.errors[i][stage.name] = message

    def _absorb(self, stage: Stage, batch: Batch, part: Tensor, lower: Tensor) -> None:
        """Each bound is sound by itself, so the best of all stages is."""
        lower = self._sound(stage.name, batch, part, lower)
        best = torch.maximum(batch.lower[part], lower)
        refine(self.network, batch, batch.coarse(part, best))
        # A class proven in float64 stays proven, though its bound may be below what float32 asks for.
        exact = has_flag(stage, "exact")
        batch.proven[part] |= (lower > batch.required.solver[part]) if exact else (best > batch.required.single[part])
        batch.lower[part] = best

    def _sound(self, stage: str, batch: Batch, part: Tensor, lower: Tensor) -> Tensor:
        """Bounds in float64, −inf where they are not finite or above the margin at the sample itself."""
        lower = lower.to(batch.lower)
        lower = torch.where(torch.isfinite(lower), lower, -torch.inf)
        above = lower > batch.margins[part] + batch.doubt(part)
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
        below = margins < batch.lower[i] - batch.doubt(torch.tensor([i]))[0]
        if bool(below.any()) or (batch.verified(i) and bool((margins <= 0).any())):
            self._contradiction(batch, i, stage, batch.lower[i], point)

    def _recheck(
        self, stage: Stage, batch: Batch, part: Tensor, findings: Findings, broken: dict[int, Tensor], limit: float
    ) -> None:
        """Compute bounds that rounding in float32 keeps from being proofs in float64, in the time left."""
        if limit <= 0 or has_flag(stage, "exact"):
            return
        bounded = torch.isfinite(findings.lower).any(1).tolist()
        candidates = [i for i, new in zip(part.tolist(), bounded, strict=True) if new and i not in broken]
        near = [i for i in candidates if batch.worth_repeating(i)]
        exact = self.network.exact_subject if near else None
        if exact is None:
            return
        again = torch.tensor(near)
        bounds = self._exact_bounds(stage, exact, batch, again, limit)
        renewed = ~batch.proven[again] & torch.isfinite(bounds)
        # The float64 bound replaces the float32 one, which may be the larger of the two by rounding.
        batch.lower[again] = torch.where(renewed, bounds, batch.lower[again])
        batch.proven[again] |= renewed & (bounds > batch.required.double[again])

    def _exact_bounds(self, stage: Stage, exact: Subject, batch: Batch, part: Tensor, limit: float) -> Tensor:
        started = time.perf_counter()
        try:
            findings = stage(exact, batch.samples(part, torch.float64), timeout=limit)
        except UnsupportedLayerError:  # in float64 alone: nothing more is proven
            return torch.full_like(batch.lower[part], -torch.inf)
        except FAILURES as error:
            if len(part) > 1:
                return torch.cat([self._exact_bounds(stage, exact, batch, one, limit) for one in part.split(1)])
            self._failed(stage, batch, part, error, time.perf_counter() - started)
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
        samples = batch.samples(part, self.network.dtype, exact=has_flag(stage, "exact"))
        usable = stage.name not in self.unusable and admits(stage, samples.box)
        try:
            findings = self._findings(stage, self.network.subject, samples, self.settings.timeout) if usable else None
        except UnsupportedLayerError:
            raise
        except FAILURES as error:
            self._failed(stage, batch, part, error, 0.0)
            return
        if findings is not None:
            self._absorb(stage, batch, part, findings.lower)
            for i in part.tolist():
                self._compare(batch, i, stage.name, broken[i])

    def _contradiction(self, batch: Batch, i: int, stage: str, bounds: Tensor, point: Tensor) -> None:
        suspect = Suspect(int(batch.indices[i]), int(batch.labels[i]), batch.x[i], self.settings.eps, bounds, point)
        raise_contradiction(suspect, stage, self._folder)

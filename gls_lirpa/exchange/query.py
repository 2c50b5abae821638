"""Deciding a property of an ONNX network: unsat, sat with a counterexample, unknown or timeout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from gls_lirpa.certification import SolverSettings
from gls_lirpa.certification.cascade import BATCH_SIZE, Cascade
from gls_lirpa.certification.settings import DEFAULT_STAGES, Settings
from gls_lirpa.certification.stage import StageOptions, has_flag
from gls_lirpa.errors import DataError
from gls_lirpa.exchange.cases import Case, Property
from gls_lirpa.exchange.counterexample import Counterexample, replayed
from gls_lirpa.exchange.onnx_model import OnnxNetwork
from gls_lirpa.exchange.property import enclosing_box, property_network

CHUNK = 256
"""Disjuncts that one network decides together: each is an output of it, and bounds need their square in memory."""

_NO_REPLAY = "the counterexample found does not replay with onnxruntime"
ENDED = 0.9
"""A search that a limit ended after this share of the time was ended by the time, not by the nodes."""


@dataclass(frozen=True)
class Limits:
    """How a property is decided; ``timeout``: seconds for the whole property; ``bab``: of the complete searches."""

    stages: tuple[str, ...] = DEFAULT_STAGES
    timeout: float = 60.0
    seed: int = 0
    max_nodes: int | None = None
    bab: SolverSettings = field(default_factory=SolverSettings)

    def settings(self, timeout: float) -> Settings:
        options = StageOptions(max_nodes=self.max_nodes, bab=self.bab)
        return Settings(0.0, self.stages, timeout, self.seed, options=options)


@dataclass(frozen=True)
class Answer:
    """``verdict``: unsat, sat, unknown or timeout; ``reason``: why it is not one of the first two."""

    verdict: str
    seconds: float
    counterexample: Counterexample | None = None
    reason: str = ""


def decide(
    network: OnnxNetwork, query: Property, limits: Limits | None = None, *, started: float | None = None
) -> Answer:
    """Whether some input of a box has an unsafe output. ``started``: when the time began to run (default: now).

    >>> import tempfile
    >>> from torch import nn
    >>> from gls_lirpa.exchange.export import write_onnx
    >>> from gls_lirpa.exchange.onnx_model import read_onnx
    >>> from gls_lirpa.exchange.vnnlib import parse_vnnlib
    >>> file = tempfile.mkdtemp() + "/net.onnx"
    >>> write_onnx(nn.ReLU(), (1,), file)
    >>> box = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= X_0 -1))(assert (<= X_0 1))"
    >>> network = read_onnx(file)
    >>> [decide(network, parse_vnnlib(box + f"(assert (<= Y_0 {bound}))")).verdict for bound in (-0.1, 0.1)]
    ['unsat', 'sat']
    """
    return _Decision(network, query, limits or Limits(), time.monotonic() if started is None else started).run()


class _Decision:
    def __init__(self, network: OnnxNetwork, query: Property, limits: Limits, started: float) -> None:
        inputs = torch.Size(network.in_shape).numel()
        for what, declared, own in (("inputs", query.inputs, inputs), ("outputs", query.outputs, network.outputs)):
            if declared != own:
                raise DataError(f"the property declares {declared} {what}, network {str(network.path)!r} has {own}")
        self._network = network
        self._query = query
        self._limits = limits
        self._settings = limits.settings(limits.timeout)
        self._started = started
        self._reasons: list[str] = []
        self._late = False

    def run(self) -> Answer:
        for group in _groups(self._query.cases):
            for start in range(0, len(group[0].unsafe), CHUNK):
                part = [replace(case, unsafe=case.unsafe[start : start + CHUNK]) for case in group]
                found = self._decided(part)
                if found is not None:
                    return self._answer("sat", found)
                if self._late:
                    return self._answer("timeout")
        return self._answer("unknown" if self._reasons else "unsat")

    def _decided(self, group: list[Case]) -> Counterexample | None:
        """A counterexample in some case of a group with the same unsafe outputs; what stays open is noted."""
        if self._remaining() <= 0:
            self._late = True
            return None
        model = property_network(self._network.model, group[0].unsafe, self._network.dtype)
        cheap = tuple(name for name in self._settings.stages if not has_flag(name, "complete"))
        parts = [group]
        if len(group) > 1 and cheap != self._settings.stages:
            # Cheap stages see many boxes at once, a complete one sees each with all the time left.
            rest = group
            if cheap:
                found, rest = self._searched(model, group, replace(self._settings, stages=cheap))
                if found is not None:
                    return found
            parts = [[case] for case in rest]
        for part in parts:
            found, left = self._searched(model, part, self._settings)
            if found is not None or (left and self._late):
                return found
        return None

    def _remaining(self) -> float:
        return self._limits.timeout - (time.monotonic() - self._started)

    def _answer(self, verdict: str, counterexample: Counterexample | None = None) -> Answer:
        reason = self._reasons[0] if self._reasons and verdict == "unknown" else ""
        return Answer(verdict, time.monotonic() - self._started, counterexample, reason)

    def _searched(
        self, model: torch.nn.Module, cases: list[Case], settings: Settings
    ) -> tuple[Counterexample | None, list[Case]]:
        """A counterexample in some case, and the cases left undecided."""
        left: list[Case] = []
        cascade: Cascade | None = None
        final = settings.stages == self._settings.stages
        for start in range(0, len(cases), BATCH_SIZE):
            part = cases[start : start + BATCH_SIZE]
            remaining = self._remaining()
            if remaining <= 0:
                self._late = True
                return None, [*left, *cases[start:]]
            box = enclosing_box(part, self._network.in_shape, self._network.dtype)
            x = torch.minimum(torch.maximum(box.center, box.lower), box.upper)
            cascade = cascade or Cascade(model, x, settings)
            cascade.settings = replace(settings, timeout=remaining)
            for record in cascade.run(x, torch.zeros(len(part), dtype=torch.int64), box=box):
                case = part[record.index]
                if record.verdict in ("falsified", "misclassified"):
                    point = x[record.index] if record.adversarial is None else record.adversarial
                    found = replayed(self._network, self._query, case, point.numpy()) or self._beyond(case, settings)
                    if found is not None:
                        return found, left
                    self._reasons.append(_NO_REPLAY)
                elif record.verdict == "unknown":
                    left.append(case)
                    if final:
                        self._note(record.exhausted, cascade)
        return None, left

    def _beyond(self, case: Case, settings: Settings) -> Counterexample | None:
        """Where equality is not enough, a counterexample of the property with strict bounds tightened a little.

        Finding none proves nothing about the property itself, so what the search notes is dropped.
        """
        if not case.strict or self._remaining() <= 0:
            return None
        inside = case.tightened()
        reasons, late = list(self._reasons), self._late
        model = property_network(self._network.model, inside.unsafe, self._network.dtype)
        found, _ = self._searched(model, [inside], settings)
        self._reasons, self._late = reasons, late
        return found

    def _note(self, exhausted: bool, cascade: Cascade) -> None:
        elapsed = time.monotonic() - self._started
        self._late |= exhausted and elapsed >= ENDED * self._limits.timeout
        if cascade.unusable:
            name, why = next(iter(cascade.unusable.items()))
            self._reasons.append(f"stage {name} cannot be used: {why}")
        else:
            limit = f"{self._limits.max_nodes} nodes" if exhausted else f"stages {', '.join(self._settings.stages)}"
            self._reasons.append(f"not decided within {limit}")


def _groups(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases with the same unsafe outputs, which one network can decide together."""
    groups: dict[tuple[bytes, ...], list[Case]] = {}
    for case in cases:
        key = tuple(array.tobytes() for unsafe in case.unsafe for array in (unsafe.rows, unsafe.bounds))
        groups.setdefault(key, []).append(case)
    return list(groups.values())

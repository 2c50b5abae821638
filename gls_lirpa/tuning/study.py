"""One method's study: a search with successive halving on held-out images, resumable at any moment.

Rung 0 trains ``trials`` configurations for a fraction of the schedule; the best third go on to three times as many
epochs, and so on to the whole schedule, each time from the beginning, with all times of the schedule scaled. Best
means: first those that none dominates in (natural, certified), by the area each adds to the front. At the end the
front of the last rung is trained with further seeds. Optuna proposes configurations from rung 0, in rounds of a
fixed size, so that the number of workers changes nothing. All numbers are of images held out from training.

What is done lies in run folders and in ``study.json``; a study that is started again reads it and goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gls_lirpa.base.checks import require
from gls_lirpa.base.files import replace_file
from gls_lirpa.base.interruption import Interrupted
from gls_lirpa.bench.outcomes import Outcome
from gls_lirpa.bench.progress import SuiteProgress
from gls_lirpa.bench.schedule import perform_all
from gls_lirpa.bench.suite import Cell, PlannedRun
from gls_lirpa.errors import CheckpointError, ConfigError
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.tuning.pareto import Point, front, ranked
from gls_lirpa.tuning.proposals import Proposer
from gls_lirpa.tuning.space import applied

FILE = "study.json"
ETA = 3
"""A rung keeps one configuration of this many, and trains it this many times as long."""
ROUND = 4
"""Configurations proposed at a time, before any of them is known."""


@dataclass(frozen=True)
class Plan:
    """A study's budget, the same for every method that is compared with it."""

    trials: int = 27
    rungs: int = 3
    finalists: int = 3
    seeds: int = 3
    samples: int = 1000
    timeout: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("trials", "rungs", "finalists", "seeds", "samples"):
            require(getattr(self, name) >= 1, f"{name} >= 1", getattr(self, name))
        if self.trials < ETA ** (self.rungs - 1):
            raise ConfigError(
                f"expected at least {ETA ** (self.rungs - 1)} trials for {self.rungs} rungs, got {self.trials}"
            )

    def sizes(self) -> list[int]:
        """Configurations in each rung.

        >>> Plan(trials=27, rungs=3).sizes()
        [27, 9, 3]
        """
        return [max(1, self.trials // ETA**rung) for rung in range(self.rungs)]

    def share(self, rung: int) -> float:
        """Of the schedule, what a rung trains."""
        return float(ETA ** (rung - self.rungs + 1))

    def epochs(self, full: int) -> float:
        """Epochs of training at most: as many finalists as are allowed, each trained for all epochs of the budget."""
        last = min(self.finalists, self.sizes()[-1]) * (self.seeds - 1)
        return full * (sum(n * self.share(rung) for rung, n in enumerate(self.sizes())) + last)


@dataclass(frozen=True)
class Evaluation:
    """A configuration trained at one rung with one seed, and what came of it."""

    trial: int
    rung: int
    seed: int
    values: dict[str, float]
    natural: float | None
    certified: float | None
    seconds: float

    @property
    def point(self) -> Point:
        # A run that failed is worse than any that did not.
        return (self.natural or 0.0, self.certified or 0.0)


@dataclass(frozen=True)
class Final:
    """A configuration of the last front, its accuracies the mean over seeds."""

    trial: int
    values: dict[str, float]
    points: tuple[Point, ...]

    @property
    def mean(self) -> Point:
        count = len(self.points)
        return sum(p[0] for p in self.points) / count, sum(p[1] for p in self.points) / count


class Study:
    """The state of a search, as far as it has come."""

    def __init__(self, config: TrainConfig, plan: Plan, out: Path) -> None:
        if config.val_fraction <= 0:
            raise ConfigError("tuning needs held-out images: use a recipe or option with --val-fraction > 0")
        self.config, self.plan, self.out = config, plan, out
        self.evaluations: list[Evaluation] = []
        self._proposed: list[dict[str, float]] = []
        self._read()

    # -- what is known ---------------------------------------------------------------------------

    @property
    def header(self) -> dict[str, Any]:
        config = {key: value for key, value in self.config.to_dict().items() if key not in ("data_root", "device")}
        content: dict[str, Any] = json.loads(json.dumps({"config": config, "plan": asdict(self.plan)}))
        return content

    def _read(self) -> None:
        file = self.out / FILE
        if not file.exists():
            if self.out.is_dir() and any(self.out.iterdir()):
                raise ConfigError(f"{str(self.out)!r} is not empty and holds no study: choose another --out")
            return
        content = load_study(self.out)
        if content["header"] != self.header:
            raise ConfigError(f"{str(file)!r} is a study with other settings: repeat those, or choose another --out")
        self._proposed = content["proposed"]
        self.evaluations = [Evaluation(**entry) for entry in content["evaluations"]]

    def _write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        content = {
            "method": self.config.method,
            "header": self.header,
            "epochs": self.plan.epochs(self.config.epochs),
            "proposed": self._proposed,
            "evaluations": [asdict(entry) for entry in self.evaluations],
            "finals": [asdict(final) for final in self.finals()],
        }
        replace_file(self.out / FILE, (json.dumps(content, indent=1) + "\n").encode())

    def of_rung(self, rung: int) -> list[Evaluation]:
        """The evaluations of a rung with the study's own seed."""
        return [e for e in self.evaluations if e.rung == rung and e.seed == self.config.seed]

    def finals(self) -> list[Final]:
        """The configurations of the last rung that were trained with every seed."""
        found = []
        for first in self.of_rung(self.plan.rungs - 1):
            own = [e for e in self.evaluations if (e.trial, e.rung) == (first.trial, first.rung)]
            if len(own) == self.plan.seeds:
                found.append(Final(first.trial, first.values, tuple(e.point for e in own)))
        return found

    # -- what is to be done ----------------------------------------------------------------------

    def run(self, *, workers: int, console: Console) -> list[Final]:
        """Do all that is missing."""
        proposer = Proposer(self.config, seed=self.plan.seed)
        for start in range(0, self.plan.trials, ROUND):
            trials = range(start, min(start + ROUND, self.plan.trials))
            if trials[-1] >= len(self._proposed):
                known = [(e.values, e.point) for e in self.of_rung(0)]
                self._proposed = self._proposed[:start] + proposer.propose(known, len(trials), done=start)
                self._write()
            self._perform([(t, 0, self.config.seed) for t in trials], workers, console)
        for rung in range(1, self.plan.rungs):
            before = sorted(self.of_rung(rung - 1), key=lambda e: e.trial)
            best = ranked([e.point for e in before])[: self.plan.sizes()[rung]]
            self._perform([(before[i].trial, rung, self.config.seed) for i in sorted(best)], workers, console)
        last = sorted(self.of_rung(self.plan.rungs - 1), key=lambda e: e.trial)
        points = [e.point for e in last]
        chosen = [i for i in ranked(points) if i in front(points)][: self.plan.finalists]
        seeds = range(self.config.seed + 1, self.config.seed + self.plan.seeds)
        self._perform(
            [(last[i].trial, self.plan.rungs - 1, seed) for i in sorted(chosen) for seed in seeds], workers, console
        )
        return self.finals()

    def _perform(self, wanted: Sequence[tuple[int, int, int]], workers: int, console: Console) -> None:
        known = {(e.trial, e.rung, e.seed) for e in self.evaluations}
        due = {key: self._planned(*key) for key in wanted if key not in known}
        if not due:
            return
        runs = list(due.values())
        try:
            with SuiteProgress(console, runs, self.out) as progress:
                outcomes = perform_all(runs, self.out, workers=workers, progress=progress)
        except Interrupted:
            raise Interrupted(f"interrupted: finished runs are kept in {str(self.out)!r}; repeat the command") from None
        if not any(outcome.done for outcome in outcomes):
            # A mistake that all have in common: nothing is kept, so that the same command tries again.
            raise ConfigError(f"none of {len(outcomes)} runs could be finished: {outcomes[0].reason}")
        for key, outcome in zip(due, outcomes, strict=True):
            self.evaluations.append(self._evaluation(key, outcome))
        self._write()

    def _planned(self, trial: int, rung: int, seed: int) -> PlannedRun:
        config = applied(self.config, self._proposed[trial], share=self.plan.share(rung)).replaced({"seed": seed})
        cell = Cell("", f"t{trial:03d}", f"r{rung}", {})
        return PlannedRun(cell, seed, config, None, self.plan.samples, self.plan.timeout, split="val")

    def _evaluation(self, key: tuple[int, int, int], outcome: Outcome) -> Evaluation:
        seconds = (outcome.train_seconds or 0.0) + (outcome.certify_seconds or 0.0)
        return Evaluation(*key, self._proposed[key[0]], outcome.natural, outcome.certified, round(seconds, 1))


def load_study(folder: Path) -> dict[str, Any]:
    """The content of a study's file."""
    file = folder / FILE if folder.is_dir() else folder
    try:
        content = json.loads(file.read_text())
        missing = {"method", "header", "proposed", "evaluations", "finals"} - set(content)
    except OSError as error:
        raise CheckpointError(
            f"{str(file)!r} is not a study: {error.strerror}; expected the folder of a `glscert tune`"
        ) from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{str(file)!r} is not a study: {error}") from error
    if missing:
        raise CheckpointError(f"{str(file)!r} is not a study: it has no {sorted(missing)[0]!r}")
    result: dict[str, Any] = content
    return result

"""What a training would be, without doing it: configuration, network, time and memory from a few steps."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.data import Dataset
from gls_lirpa.models import count_parameters
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.runs import dataset_of
from gls_lirpa.training.schedules import EpsSchedule
from gls_lirpa.training.trainer import Trainer

PROBED_MEMBERS = 4
PROBED_STEPS = 3
SCHEDULE_POINTS = 8
"""Radii of the schedule, evenly over the epochs, whose steps are interpolated."""
STABLE_SHARE = 1e-3
"""At this share of the radius almost no neuron is unstable, as after successful training at the full radius."""
SIMILAR = 1.25
"""Times that differ by less are one time."""


@dataclass(frozen=True)
class Probe:
    """``step_seconds``: of one step at full radius and the first weights, where most neurons are unstable, and
    ``stable_seconds`` where almost none are; ``mebibytes``: the most memory the process has had so far.
    """

    layers: str
    parameters: int
    samples: int
    steps_per_epoch: int
    step_seconds: float
    stable_seconds: float
    mebibytes: float

    def seconds(self, config: TrainConfig) -> tuple[float, float]:
        """The least and the most that a whole run's steps take.

        Bounds cost what unstable neurons cost. The most: a network that stays as unstable as it is at first, with
        a cost proportional to the radius that its schedule has reached. The least: one without unstable neurons.
        """
        schedule, steps = config.eps_schedule(), self.steps_per_epoch * config.epochs
        times = [config.epochs * (i + 0.5) / SCHEDULE_POINTS for i in range(SCHEDULE_POINTS)]
        reached = sum(schedule.at(time) for time in times) / SCHEDULE_POINTS
        share = reached / config.trained_eps if config.trained_eps > 0 else 1.0
        least = min(self.stable_seconds, self.step_seconds)
        return least * steps, (least + share * (self.step_seconds - least)) * steps


def probe(config: TrainConfig, dataset: Dataset | None = None, *, warm: bool = False) -> Probe:
    """Take a few steps at the run's full radius and at a tiny one, with fewer members of a population, the time
    multiplied.

    ``dataset``: instead of the run's own; ``warm``: at the weights of ``init_from``, which must be there then.

    >>> found = probe(TrainConfig(net="cnn3-tiny", relaxation="ibp", limit=100, batch_size=50))
    >>> found.steps_per_epoch, found.step_seconds > 0
    (2, True)
    """
    options, factor = dict(config.estimator_options), 1.0
    method = config.estimator_method
    if method.members is not None:
        factor = float(options.get(method.members, method.options[method.members].default or 1)) / PROBED_MEMBERS
        options[method.members] = PROBED_MEMBERS
    start = config.init_from if warm else None
    short = dataclasses.replace(config, estimator_options=options, actors=0, init_from=start)
    trainer = Trainer(short, dataset_of(config) if dataset is None else dataset)
    trainer.position.epoch = config.epochs - 1
    data = trainer.dataset.train
    x, y = data.batch(range(min(config.batch_size, len(data))), config.device)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    spent = []
    try:
        for share in (1.0, STABLE_SHARE):
            trainer.model.load_state_dict(weights)
            trainer.eps_schedule = EpsSchedule(share * config.trained_eps, most=math.inf)
            spent.append(factor * min(_seconds(trainer, x, y) for _ in range(PROBED_STEPS)) / max(config.actors, 1))
    finally:
        trainer.estimator.close()
    return Probe(
        layers=str(trainer.model),
        parameters=count_parameters(trainer.model),
        samples=len(data),
        steps_per_epoch=trainer.steps_per_epoch,
        step_seconds=spent[0],
        stable_seconds=spent[1],
        mebibytes=_peak_mebibytes(config.device),
    )


def _seconds(trainer: Trainer, x: Tensor, y: Tensor) -> float:
    start = time.monotonic()
    trainer.step(x, y)
    return time.monotonic() - start


def _peak_mebibytes(device: str) -> float:
    if torch.device(device).type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    try:
        import resource
    except ImportError:  # not on Windows
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes there, kibibytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def describe(config: TrainConfig, found: Probe) -> str:
    """The answer of ``glscert train --dry-run``; the configuration is a file for ``--config``."""
    return "\n".join(
        [
            json.dumps(config.to_dict(), indent=2),
            "",
            f"method      {config.method}",
            f"network     {config.net}, {found.parameters:,} parameters",
            *(f"            {line.strip()}" for line in found.layers.splitlines()[1:-1]),
            f"data        {config.dataset}, {found.samples:,} samples, {found.steps_per_epoch} steps per epoch",
            *_time(config, found),
            f"memory      {found.mebibytes:,.0f} MiB at the most",
        ]
    )


def _time(config: TrainConfig, found: Probe) -> list[str]:
    least, most = found.seconds(config)
    epochs = f"{config.epochs} epoch{'s' * (config.epochs != 1)}"
    note = "from a few steps on this machine as busy as it is now, without evaluation"
    if most < SIMILAR * least:
        return [f"time        {duration(most / config.epochs)} per epoch, {duration(most)} for {epochs} ({note})"]
    return [
        f"time        {duration(least)} to {duration(most)} for {epochs}, "
        f"{duration(least / config.epochs)} to {duration(most / config.epochs)} per epoch",
        f"            ({note};",
        "            the most if the network stays as unstable as it is now, the least if training makes it stable)",
    ]


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(0.5), duration(75), duration(7500)
    ('0.5 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

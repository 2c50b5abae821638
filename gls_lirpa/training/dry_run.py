"""What a training would be, without doing it: configuration, network, time and memory from a few steps."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass

import torch

from gls_lirpa.data import Dataset
from gls_lirpa.models import count_parameters
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.runs import dataset_of
from gls_lirpa.training.trainer import Trainer

PROBED_POPULATION = 4
PROBED_STEPS = 3


@dataclass(frozen=True)
class Probe:
    """``step_seconds``: of one step at full radius; ``mebibytes``: the most memory the process has had so far."""

    layers: str
    parameters: int
    samples: int
    steps_per_epoch: int
    step_seconds: float
    mebibytes: float

    @property
    def epoch_seconds(self) -> float:
        return self.step_seconds * self.steps_per_epoch


def probe(config: TrainConfig, dataset: Dataset | None = None) -> Probe:
    """Take a few steps at the run's full radius, with PGPE's population shortened and its time multiplied.

    ``dataset``: instead of the run's own.

    >>> found = probe(TrainConfig(net="cnn3-tiny", relaxation="ibp", limit=100, batch_size=50))
    >>> found.steps_per_epoch, found.step_seconds > 0
    (2, True)
    """
    options, factor = dict(config.estimator_options), 1.0
    if config.estimator == "pgpe":
        factor = options.get("population", 256) / PROBED_POPULATION
        options["population"] = PROBED_POPULATION
    short = dataclasses.replace(config, estimator_options=options, actors=0, init_from=None)
    trainer = Trainer(short, dataset_of(config) if dataset is None else dataset)
    trainer.position.epoch = config.epochs - 1
    data = trainer.dataset.train
    x, y = data.batch(range(min(config.batch_size, len(data))), config.device)
    spent = []
    try:
        for _ in range(PROBED_STEPS):
            start = time.monotonic()
            trainer.step(x, y)
            spent.append(time.monotonic() - start)
    finally:
        trainer.estimator.close()
    return Probe(
        layers=str(trainer.model),
        parameters=count_parameters(trainer.model),
        samples=len(data),
        steps_per_epoch=trainer.steps_per_epoch,
        step_seconds=factor * min(spent) / max(config.actors, 1),
        mebibytes=_peak_mebibytes(config.device),
    )


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
    total = found.epoch_seconds * config.epochs
    return "\n".join(
        [
            json.dumps(config.to_dict(), indent=2),
            "",
            f"method      {config.method}",
            f"network     {config.net}, {found.parameters:,} parameters",
            *(f"            {line.strip()}" for line in found.layers.splitlines()[1:-1]),
            f"data        {config.dataset}, {found.samples:,} samples, {found.steps_per_epoch} steps per epoch",
            f"time        {duration(found.epoch_seconds)} per epoch, {duration(total)} for {config.epochs} epochs "
            "(from a short probe at full radius, without evaluation)",
            f"memory      {found.mebibytes:,.0f} MiB at the most",
        ]
    )


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(0.5), duration(75), duration(7500)
    ('0.5 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

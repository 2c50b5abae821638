"""How long a suite may take, from a step of each kind of run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch

from gls_lirpa.bench.suite import PlannedRun
from gls_lirpa.data import Dataset
from gls_lirpa.errors import GLSError
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.loop import Trainer
from gls_lirpa.training.runs import dataset_of

PROBED_POPULATION = 4


def training_seconds(runs: Sequence[PlannedRun]) -> dict[str, float | None]:
    """Seconds of training of each run, by name; None where it could not be probed.

    One step at full radius is timed for every different step, with PGPE's population shortened to four and
    its time multiplied. Certification is not included: it depends on the networks that come out.
    """
    known: dict[str, float | None] = {}
    found: dict[str, float | None] = {}
    for run in runs:
        key = _kind(run.config)
        if key not in known:
            known[key] = _step_seconds(run.config)
        step = known[key]
        found[run.name] = None if step is None else step * _steps(run.config)
    return found


def _kind(config: TrainConfig) -> str:
    fields = ("dataset", "net", "loss", "relaxation", "estimator", "batch_size", "limit")
    options = (sorted(config.loss_options.items()), sorted(config.estimator_options.items()))
    return repr([getattr(config, name) for name in fields] + [*options])


def _steps(config: TrainConfig) -> int:
    size = len(dataset_of(config).train)
    return config.epochs * -(-size // config.batch_size)


def _step_seconds(config: TrainConfig) -> float | None:
    try:
        return step_seconds(config, dataset_of(config))
    except GLSError:
        return None


def step_seconds(config: TrainConfig, dataset: Dataset) -> float:
    """Seconds of one step at full radius on one thread, the second of two."""
    factor = 1.0
    options = dict(config.estimator_options)
    if config.estimator == "pgpe":
        factor = options.get("population", 256) / PROBED_POPULATION
        options["population"] = PROBED_POPULATION
    short = dataclasses.replace(config, init_from=None, estimator_options=options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = Trainer(short, dataset)
        x, y = trainer.dataset.train.batch(range(min(config.batch_size, len(trainer.dataset.train))))
        trainer.position.epoch = max(config.epochs - 1, 0)
        for _ in range(2):
            start = time.monotonic()
            trainer.step(x.to(config.device), y.to(config.device))
            spent = time.monotonic() - start
    finally:
        torch.set_num_threads(threads)
    return factor * spent

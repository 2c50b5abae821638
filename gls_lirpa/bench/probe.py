"""How long a suite may take, from a step of each kind of run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gls_lirpa.bench.suite import PlannedRun
from gls_lirpa.data import Dataset
from gls_lirpa.errors import GLSError
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.dry_run import probe
from gls_lirpa.training.runs import dataset_of


def training_seconds(runs: Sequence[PlannedRun]) -> dict[str, float | None]:
    """Seconds of training of each run, by name; None where it could not be probed.

    A few steps at full radius are timed for every different kind of step. Certification is not included: it
    depends on the networks that come out.
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
    """Seconds of one step at full radius on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return probe(config, dataset).step_seconds
    finally:
        torch.set_num_threads(threads)

"""The one training loop: a trainer, its run folder and who is told of it, with exact resume."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from gls_lirpa.base.interruption import Interrupted, stop_requests
from gls_lirpa.data import Dataset, batches
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.errors import CheckpointError, ConfigError
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.custom import FILE as DATA_FILE
from gls_lirpa.training.custom import DataRecord, require_same
from gls_lirpa.training.runs import RunFolder, dataset_of, load_file
from gls_lirpa.training.trainer import Trainer

CHECKPOINT_SECONDS = 300.0
"""Within a long epoch a checkpoint is written this often; one is written after every epoch anyway."""


class Reporter(Protocol):
    """Who is told how training goes."""

    def started(self, config: TrainConfig, folder: Path, steps: int, done: int) -> None:
        """A run of ``config`` into ``folder`` begins, or goes on with ``done`` of its ``steps``."""

    def stepped(self, numbers: dict[str, float]) -> None:
        """After each step: its ``numbers`` (loss, radius, learning rate …) by name."""

    def epoch_ended(self, row: dict[str, Any]) -> None:
        """After each epoch: its ``row`` of metrics."""

    def stopping(self) -> None: ...

    def finished(self) -> None: ...


def train(
    config: TrainConfig,
    out: Path,
    *,
    reporter: Reporter,
    resume: bool = False,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
) -> Trainer:
    """Train as in ``config`` into the run folder ``out``, or, with ``resume``, continue the run in it.

    ``reporter`` is told how it goes.
    ``dataset`` and ``model``: the user's own, where the configuration has ``custom`` for them.
    """
    folder = RunFolder(out)
    if resume and config.to_dict() != folder.config().to_dict():
        raise ConfigError(f"run {str(out)!r} has another configuration: resume it without changing options")
    if resume and dataset is not None:
        require_same(out, dataset)
    load_lirpa()  # where it is missing, say so before anything is written
    trainer = Trainer(config, dataset_of(config) if dataset is None else dataset, model)
    if resume:
        if folder.checkpoint_file.exists():
            trainer.restore(load_file(folder.checkpoint_file), f"checkpoint {str(folder.checkpoint_file)!r}")
        elif folder.metrics():
            raise CheckpointError(f"run {str(out)!r} has finished epochs but no checkpoint.pt: restore it from a copy")
        folder.cut_metrics(trainer.position.epoch)
    else:
        folder.create(config)
        if dataset is not None:
            folder.write_json(DATA_FILE, asdict(DataRecord.of(dataset)))
    if not folder.checkpoint_file.exists():
        folder.save(folder.checkpoint_file, trainer.state())
    try:
        _run(trainer, folder, reporter)
    except KeyboardInterrupt:
        raise _interrupted(folder) from None
    finally:
        trainer.estimator.close()
        reporter.finished()
    return trainer


def _interrupted(folder: RunFolder) -> Interrupted:
    return Interrupted(f"interrupted: continue with `glscert train --out {folder.path} --resume`")


def _run(trainer: Trainer, folder: RunFolder, reporter: Reporter) -> None:
    config, steps = trainer.config, trainer.steps_per_epoch
    done = trainer.position.epoch * steps + trainer.position.batch
    reporter.started(config, folder.path, config.epochs * steps, done)
    saved = time.monotonic()
    with stop_requests(reporter.stopping) as stop, warnings.catch_warnings():
        # Estimators ask for reset_batchnorm, which end_epoch does.
        warnings.filterwarnings("ignore", message="BatchNorm in train mode")
        while trainer.position.epoch < config.epochs:
            position = trainer.position
            clock = time.monotonic()
            for x, y, _ in batches(
                trainer.dataset.train,
                batch_size=config.batch_size,
                seed=config.seed,
                epoch=position.epoch,
                augmentation=trainer.augmentation,
                device=config.device,
                start=position.batch,
                drop_last=trainer.drop_last,
            ):
                reporter.stepped(trainer.step(x, y))
                now = time.monotonic()
                position.seconds, clock = position.seconds + now - clock, now
                if stop.is_set() or now - saved > CHECKPOINT_SECONDS:
                    folder.save(folder.checkpoint_file, trainer.state())
                    saved = now
                if stop.is_set():
                    raise _interrupted(folder)
            row = trainer.end_epoch()
            folder.append_metrics(row)
            folder.save(folder.checkpoint_file, trainer.state())
            saved = time.monotonic()
            reporter.epoch_ended(row)
    folder.save(folder.weights_file, {"model": trainer.final_weights()})

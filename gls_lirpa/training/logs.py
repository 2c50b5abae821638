"""Where users look: TensorBoard, Weights & Biases and MLflow as listeners of the training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gls_lirpa.base.extras import optional
from gls_lirpa.base.registry import Registry
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.loop import Reporter
from gls_lirpa.training.reporters import Silent

SECONDS = 1.0
"""Steps are logged at most this often."""

EPOCH_NUMBERS = (
    "loss",
    "eps",
    "lr",
    "sigma",
    "spread",
    "natural",
    "certified",
    "unstable",
    "active",
    "evaluations_per_second",
)


class Sink(Protocol):
    """One service: numbers go in by name and step."""

    def write(self, numbers: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``<run>/tensorboard``: ``tensorboard --logdir runs``."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        optional("tensorboard", extra="tensorboard", feature="--log tensorboard")
        writer = optional("torch.utils.tensorboard", extra="tensorboard", feature="--log tensorboard")
        self._writer = writer.SummaryWriter(str(folder / "tensorboard"))
        table = "\n".join(f"| {key} | {value} |" for key, value in config.to_dict().items())
        self._writer.add_text("configuration", f"| field | value |\n|---|---|\n{table}")

    def write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases; its own environment variables choose project and mode."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        wandb = optional("wandb", extra="wandb", feature="--log wandb")
        project = os.environ.get("WANDB_PROJECT", "gls-lirpa")
        self._run = wandb.init(project=project, name=folder.name, config=config.to_dict(), dir=str(folder))

    def write(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, at the tracking address that its environment variables name."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self._mlflow = optional("mlflow", extra="mlflow", feature="--log mlflow")
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params(config.to_dict())

    def write(self, numbers: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics({name.replace("/", "."): value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


LOGS: Registry[Callable[[TrainConfig, Path], Sink]] = Registry("log")
LOGS.register("tensorboard", TensorBoard, aliases=("tb",))
LOGS.register("wandb", WandB)
LOGS.register("mlflow", MLflow)


class Logger(Silent):
    """Tells a service what the progress bar shows: ``step/…`` about once a second, ``epoch/…`` after each epoch."""

    def __init__(self, name: str) -> None:
        self._make = LOGS.get(name)
        self._sink: Sink | None = None
        self._step = self._logged = 0
        self._clock = 0.0

    def started(self, config: TrainConfig, folder: Path, steps: int, done: int) -> None:
        self._sink = self._make(config, folder)
        self._step = self._logged = done
        self._clock = time.monotonic()

    def stepped(self, numbers: dict[str, float]) -> None:
        self._step += 1
        passed = time.monotonic() - self._clock
        if self._sink is None or passed < SECONDS:
            return
        speed = (self._step - self._logged) / passed
        named = {f"step/{key}": value for key, value in numbers.items()}
        self._sink.write({**named, "step/per_second": speed}, self._step)
        self._clock, self._logged = time.monotonic(), self._step

    def epoch_ended(self, row: dict[str, Any]) -> None:
        if self._sink is not None:
            numbers = {f"epoch/{name}": float(row[name]) for name in EPOCH_NUMBERS if name in row}
            self._sink.write({**numbers, "epoch/seconds": float(row["seconds"])}, int(row["epoch"]))

    def finished(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None


def loggers(names: Sequence[str]) -> list[Reporter]:
    """A listener for each service; unknown names and missing packages are refused before anything is trained.

    >>> loggers(["tensorbord"])
    Traceback (most recent call last):
    ...
    gls_lirpa.errors.UnknownNameError: unknown log 'tensorbord': expected one of tensorboard, wandb, mlflow; ...
    """
    canonical = [LOGS.canonical(name) for name in names]
    for name in canonical:
        optional(name, extra=name, feature=f"--log {name}")
    return [Logger(name) for name in canonical]

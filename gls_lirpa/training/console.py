"""Training progress on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gls_lirpa.training.config import TrainConfig


class ConsoleReporter:
    """A progress bar with loss, ε, held-out accuracies, the share of unstable ReLUs, and a population's spread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._epochs = 0
        self._held_out = ""

    def started(self, config: TrainConfig, folder: Path, steps: int, done: int) -> None:
        self._epochs = config.epochs
        self._console.print(
            f"{config.method} · {config.net} · {config.dataset} · eps={config.eps:.4g} · "
            f"preset {config.preset or 'none'} · seed {config.seed} → {folder}",
            highlight=False,
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=steps, completed=done, epoch="", numbers="")
        self._steps_per_epoch = max(steps // max(config.epochs, 1), 1)

    def stepped(self, numbers: dict[str, float]) -> None:
        text = f"loss {numbers['loss']:.3f}"
        smoothed = numbers["sigma"] > 0
        if smoothed:
            text += f" ± {numbers['spread']:.2g}"
        text += f" eps {numbers['eps']:.3f}"
        if smoothed:
            text += f" σ {numbers['sigma']:.1e}"
        done = self._progress.tasks[0].completed
        epoch = f"{min(int(done) // self._steps_per_epoch + 1, self._epochs)}/{self._epochs}"
        self._progress.update(self._task, advance=1, epoch=epoch, numbers=text + self._held_out)

    def epoch_ended(self, row: dict[str, Any]) -> None:
        self._held_out = f" │ {row['held_out']}: nat {row['natural']:.1f} cert {row['certified']:.1f}"
        self._held_out += f" unst {row['unstable']:.1f} %"
        if row["sigma"] > 0:
            self._held_out += f" │ {row['evaluations_per_second']:.0f} eval/s"
        if not self._console.is_terminal:
            self._console.print(
                f"epoch {row['epoch']}/{self._epochs} loss {row['loss']:.4f} eps {row['eps']:.4f}{self._held_out}",
                highlight=False,
            )

    def stopping(self) -> None:
        self._console.print("stopping after this step; Ctrl-C again stops at once")

    def finished(self) -> None:
        self._progress.stop()

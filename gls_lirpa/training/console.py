"""Training progress on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gls_lirpa.base.lines import fitted
from gls_lirpa.training.config import TrainConfig

WIDE = 120
"""A terminal of so many columns has room for a bar as well."""

LINE = 80
"""Where there is no terminal, an epoch's line has at most so many columns."""


def _norm(config: TrainConfig) -> str:
    return "" if config.norm == "linf" else f" ({config.norm})"


class ConsoleReporter:
    """A progress bar with loss, held-out accuracies, ε, a population's σ and spread, and the share of unstable ReLUs.

    Numbers for which the terminal is too narrow are left out, never cut.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            *([BarColumn(bar_width=20)] if console.width >= WIDE else []),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._epochs = 0
        self._numbers: dict[str, float] = {}
        self._held_out: list[str] = []
        self._speed: list[str] = []

    def started(self, config: TrainConfig, folder: Path, steps: int, done: int) -> None:
        self._epochs = config.epochs
        self._console.print(
            f"{config.method} · {config.net} · {config.dataset} · eps={config.eps:.4g}{_norm(config)} · "
            f"preset {config.preset or 'none'} · seed {config.seed}\n→ {folder}",
            highlight=False,
            soft_wrap=True,
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=steps, completed=done, epoch="", numbers="")
        self._steps_per_epoch = max(steps // max(config.epochs, 1), 1)

    def stepped(self, numbers: dict[str, float]) -> None:
        done = self._progress.tasks[0].completed
        self._numbers = numbers
        self._show(f"{min(int(done) // self._steps_per_epoch + 1, self._epochs)}/{self._epochs}", advance=1)

    def _show(self, epoch: str, *, advance: int) -> None:
        text = fitted(self._parts(self._numbers), self._room(epoch))
        self._progress.update(self._task, advance=advance, epoch=epoch, numbers=text)

    def _parts(self, numbers: dict[str, float]) -> list[str]:
        """The most wanted first."""
        parts = [f"loss {numbers['loss']:.3f}", *self._held_out[:1], f"eps {numbers['eps']:.3f}"]
        if numbers["sigma"] > 0:
            parts += [f"σ {numbers['sigma']:.1e}", f"± {numbers['spread']:.2g}"]
        return [*parts, *self._held_out[1:], *self._speed]

    def _room(self, epoch: str) -> int:
        """Columns that are left for the numbers, between the other columns and the spaces around them."""
        total = len(str(self._progress.tasks[0].total))
        bar = 21 if self._console.width >= WIDE else 0
        return self._console.width - len(f"epoch {epoch} ") - bar - (2 * total + 2) - len(" 0:00:00")

    def epoch_ended(self, row: dict[str, Any]) -> None:
        self._held_out = [f"nat {row['natural']:.1f} cert {row['certified']:.1f}", f"unst {row['unstable']:.1f} %"]
        self._speed = [f"{row['evaluations_per_second']:.0f} eval/s"] if row["sigma"] > 0 else []
        if self._numbers:
            self._show(f"{row['epoch']}/{self._epochs}", advance=0)
        if not self._console.is_terminal:
            parts = [f"epoch {row['epoch']}/{self._epochs}", f"loss {row['loss']:.4f}", f"eps {row['eps']:.4f}"]
            parts += [f"│ {row['held_out']} {self._held_out[0]}", *self._held_out[1:], *self._speed]
            self._console.print(fitted(parts, LINE), highlight=False, soft_wrap=True)

    def stopping(self) -> None:
        self._console.print("stopping after this step; Ctrl-C again stops at once")

    def finished(self) -> None:
        self._progress.stop()

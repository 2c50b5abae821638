"""A suite's progress on a terminal: epochs over all runs, and a line for each finished run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gls_lirpa.bench.outcomes import Outcome
from gls_lirpa.bench.suite import PlannedRun
from gls_lirpa.training.runs import RunFolder


class SuiteProgress:
    """How far all runs are, read off their metrics files, whichever process writes them."""

    def __init__(self, console: Console, runs: Sequence[PlannedRun], out: Path) -> None:
        self._console, self._runs, self._out = console, runs, out
        self._progress = Progress(
            TextColumn("runs {task.fields[done]}/{task.fields[runs]}, epochs"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
        )
        total = sum(run.config.epochs for run in runs)
        self._task = self._progress.add_task("", total=total, runs=len(runs), done=0)
        self._done = 0

    def __enter__(self) -> SuiteProgress:
        self._progress.start()
        self.refresh()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def refresh(self) -> None:
        """Count the epochs that are on disk."""
        epochs = 0
        for run in self._runs:
            file = RunFolder(run.folder(self._out)).metrics_file
            if file.exists():
                epochs += min(file.read_bytes().count(b"\n"), run.config.epochs)
        self._progress.update(self._task, completed=epochs, done=self._done)

    def known(self, count: int) -> None:
        """So many runs were finished before."""
        self._done += count
        self.refresh()

    def finished(self, outcome: Outcome) -> None:
        self._done += 1
        self._console.print(_line(outcome), highlight=False, markup=False)
        self.refresh()


def _line(outcome: Outcome) -> str:
    if not outcome.done:
        return f"{outcome.name}: FAILED, {outcome.reason}"
    seconds = (outcome.train_seconds or 0.0) + (outcome.certify_seconds or 0.0)
    return (
        f"{outcome.name}: natural {outcome.natural:.1f} adversarial {outcome.adversarial:.1f} "
        f"certified {outcome.certified:.1f} ({seconds:.0f} s)"
    )

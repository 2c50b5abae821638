"""Who is told how training goes, besides a terminal: nobody, or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.loop import Reporter


class Silent:
    """A reporter that says nothing; a base for those that say little."""

    def started(self, config: TrainConfig, folder: Path, steps: int, done: int) -> None:
        """Nothing."""

    def stepped(self, numbers: dict[str, float]) -> None:
        """Nothing."""

    def epoch_ended(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def stopping(self) -> None:
        """Nothing."""

    def finished(self) -> None:
        """Nothing."""


class Several:
    """Tells each of several reporters."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = tuple(reporters)

    def started(self, config: TrainConfig, folder: Path, steps: int, done: int) -> None:
        for reporter in self._reporters:
            reporter.started(config, folder, steps, done)

    def stepped(self, numbers: dict[str, float]) -> None:
        for reporter in self._reporters:
            reporter.stepped(numbers)

    def epoch_ended(self, row: dict[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.epoch_ended(row)

    def stopping(self) -> None:
        for reporter in self._reporters:
            reporter.stopping()

    def finished(self) -> None:
        for reporter in self._reporters:
            reporter.finished()

"""A reporter that is silent, and metrics without times."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from gls_lirpa.training import TrainConfig

TIMING = {"seconds", "evaluations_per_second"}


class Quiet:
    """A reporter that stops the run after a number of steps, as Ctrl-C would."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.steps = 0
        self.rows: list[dict[str, Any]] = []

    def started(self, config: TrainConfig, folder: Path, steps: int, done: int) -> None:
        pass

    def stepped(self, numbers: dict[str, float]) -> None:
        self.steps += 1
        if self.steps == self.stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    def epoch_ended(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def stopping(self) -> None:
        pass

    def finished(self) -> None:
        pass


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMING} for row in rows]

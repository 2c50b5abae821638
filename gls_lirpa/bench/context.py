"""What a renderer knows: the suite, what became of its runs, and the network under study."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from gls_lirpa.base.files import replace_file
from gls_lirpa.bench.outcomes import Outcome
from gls_lirpa.bench.suite import Budget, PlannedRun, Suite
from gls_lirpa.jobs.certify import weights_hash
from gls_lirpa.training.runs import Run, load_run


@dataclass(frozen=True)
class Context:
    """``network``: the run folder under study, given by the user or trained by the suite; else None."""

    suite: Suite
    budget: Budget
    runs: tuple[PlannedRun, ...]
    outcomes: tuple[Outcome, ...]
    out: Path
    network: Path | None
    data_root: str | None
    net: str | None = None
    console: Console = field(default_factory=lambda: Console(stderr=True, quiet=True))

    def studied(self) -> Run | None:
        """The network under study with its data, where there is one with weights."""
        if self.network is None or not any((self.network / name).exists() for name in ("weights.pt", "checkpoint.pt")):
            return None
        return load_run(self.network, data_root=self.data_root, net=self.net)

    @property
    def samples(self) -> int | None:
        return self.suite.samples if self.budget.samples is None else self.budget.samples

    def stored(
        self, name: str, run: Run, settings: dict[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """A study's numbers from ``<name>.json``, computed unless they are those of these weights and settings."""
        file = self.out / f"{name}.json"
        key = json.loads(json.dumps({**settings, "weights": weights_hash(run.model)}, default=str))
        try:
            content = json.loads(file.read_text())
            if content["key"] == key:
                found: dict[str, Any] = content["result"]
                return found
        except (OSError, ValueError, KeyError, TypeError):
            pass
        result = compute()
        replace_file(file, (json.dumps({"key": key, "result": result}) + "\n").encode())
        return json.loads(json.dumps(result))  # type: ignore[no-any-return]

    def watched(self, title: str, compute: Callable[[Callable[[int, int], None]], Any]) -> Any:
        """``compute`` with a progress bar fed by its callback; one thread, as in the runs."""
        bar = Progress(TextColumn(title), BarColumn(), TimeRemainingColumn(), console=self.console)
        task = bar.add_task("", total=None)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with bar:
                return compute(lambda done, total: bar.update(task, completed=done, total=total))
        finally:
            torch.set_num_threads(threads)


def test_images(run: Run, count: int | None) -> tuple[Tensor, Tensor]:
    """The first ``count`` test images with their labels."""
    split = run.dataset.split("test")
    return split.batch(range(min(count or len(split), len(split))))

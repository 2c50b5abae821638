"""Certification on a terminal: a progress bar and the closing table; records as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gls_lirpa.base.files import replace_file
from gls_lirpa.base.lines import fitted
from gls_lirpa.certification.records import REASONS, Record, Summary
from gls_lirpa.certification.stage import has_flag

REASON_TEXTS = {
    "time": "out of time",
    "nodes": "out of nodes",
    "memory": "out of memory",
    "numerical": "within rounding",
    "error": "a stage failed",
    "bound": "no bound suffices",
}
"""Why samples are unknown, as the table says it."""

WIDE = 110
"""A terminal of so many columns has room for a bar as well."""

SHOWN = ("verified", "falsified", "unknown")
"""Verdicts that are counted while it runs."""


class ProgressReporter:
    """Counts of verdicts, certified accuracy so far and time left."""

    def __init__(self, console: Console, done: Iterable[Record], *, total: int) -> None:
        self._counts = Counter(record.verdict for record in done)
        self._total = total
        self._width = console.width
        wide = [TextColumn("certifying"), BarColumn(bar_width=20)] if self._width >= WIDE else []
        self._progress = Progress(
            *wide,
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        completed = sum(self._counts.values())
        self._task = self._progress.add_task("", total=total, completed=completed, numbers=self._numbers())

    def __enter__(self) -> ProgressReporter:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def decided(self, record: Record) -> None:
        self._counts[record.verdict] += 1
        self._progress.update(self._task, advance=1, numbers=self._numbers())

    def _numbers(self) -> str:
        counts = self._counts
        certified = 100 * counts["verified"] / max(sum(counts.values()), 1)
        parts = [f"certified {certified:.1f} %", *(f"{verdict} {counts[verdict]}" for verdict in SHOWN)]
        bar = len("certifying ") + 21 if self._width >= WIDE else 0
        others = bar + 2 * len(str(self._total)) + 2 + len(" -:--:--")
        return fitted(parts, self._width - others)


def result_table(summary: Summary, *, title: str) -> Table:
    """Accuracies, then what each stage decided and how long it took."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    failed = any(stage.errors for stage in summary.stages.values())
    for name in ("verified", "falsified", "misclassified", "seconds", *(["errors"] if failed else [])):
        table.add_column(name, justify="right")
    for name, stage in summary.stages.items():
        counts = (stage.verified, stage.falsified, stage.misclassified)
        cells = [str(count) if count else "" for count in counts] + [f"{stage.seconds:.2f}"]
        table.add_row(name, *cells, *([str(stage.errors) if stage.errors else ""] if failed else []))
    table.add_section()
    table.add_row("natural accuracy", f"{100 * summary.natural:.2f} %")
    attacked = any(has_flag(name, flag) for name in summary.stages for flag in ("attacks", "complete"))
    shown = f"{100 * summary.adversarial:.2f} %" if attacked or summary.unknown == 0 else "no attack"
    table.add_row("adversarial accuracy", shown)
    table.add_row("certified accuracy", f"[bold]{100 * summary.certified:.2f} %[/bold]")
    table.add_row("unknown", f"{summary.unknown} of {summary.samples}")
    for reason in REASONS:
        if summary.reasons.get(reason):
            gap = summary.gaps.get(reason)
            far = [] if gap is None else [f"median bound {gap:+.3g}"]
            table.add_row(f"  {REASON_TEXTS[reason]}", str(summary.reasons[reason]), *far)
    if summary.covers:
        table.caption, table.caption_justify = f"verified for {summary.covers}", "left"
    return table


def write_table(records: Iterable[Record], file: Path) -> None:
    """One row per sample."""
    columns = (
        *("index", "label", "prediction", "verdict", "stage", "bound", "seconds", "exhausted", "counterexample"),
        *("reason", "detail", "covers"),
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if (cell := getattr(r, c)) is None else cell for c in columns] for r in records])
    replace_file(file, text.getvalue().encode())

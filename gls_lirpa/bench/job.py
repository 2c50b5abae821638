"""A suite as the command line asks for it: plan, runs, report."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table as Screen

from gls_lirpa.base.checks import require
from gls_lirpa.base.files import take_lock
from gls_lirpa.base.interruption import Interrupted
from gls_lirpa.bench.context import Context
from gls_lirpa.bench.execute import check_folder
from gls_lirpa.bench.outcomes import Outcome, read_outcome, without_result
from gls_lirpa.bench.probe import training_seconds
from gls_lirpa.bench.progress import SuiteProgress
from gls_lirpa.bench.renderers import RENDERERS
from gls_lirpa.bench.report import write_report
from gls_lirpa.bench.schedule import perform_all
from gls_lirpa.bench.suite import Budget, PlannedRun, Suite, planned_runs, selected
from gls_lirpa.bench.suites import SUITES
from gls_lirpa.errors import ConfigError
from gls_lirpa.training.runs import RunFolder, state_of

STUDIES = ("tightness", "landscape")


def list_suites() -> None:
    """All suites with what they do."""
    screen = Screen(title="glscert bench SUITE", title_justify="left", box=None)
    for name in ("suite", "runs", "seeds", "what it does"):
        screen.add_column(name, justify="right" if name in ("runs", "seeds") else "left")
    for name in SUITES:
        suite = SUITES.get(name)
        runs = sum(1 if cell.once else len(suite.seeds) for cell in suite.cells)
        screen.add_row(name, str(runs), str(len(suite.seeds)) if suite.cells else "", suite.summary)
    Console().print(screen)


def bench_job(
    suite: Suite | str,
    *,
    out: Path | None = None,
    run: Path | None = None,
    net: str | None = None,
    budget: Budget,
    preset: str | None = None,
    workers: int | None = None,
    data_root: str | None = None,
    device: str | None = None,
    dry_run: bool = False,
    report_only: bool = False,
    command: str = "",
    strict: bool = False,
) -> Path | None:
    """Do what is missing of a suite and write its report; returns the page.

    ``strict``: once the report is there, a run that failed is an error.
    """
    suite = (SUITES.get(suite) if isinstance(suite, str) else suite).with_preset(preset)
    if run is not None and suite.renderer not in STUDIES:
        raise ConfigError(f"--run is for {' and '.join(STUDIES)}: suite {suite.name!r} trains its own networks")
    if run is not None:
        RunFolder(run).config()
        state_of(run)
    workers = workers if workers is not None else 1 if device and device != "cpu" else os.cpu_count() or 1
    require(workers >= 1, "workers >= 1", workers)
    folder = out or Path("bench") / (f"{suite.name}-{suite.preset}" if suite.preset else suite.name)
    changes = {key: value for key, value in (("data_root", data_root), ("device", device)) if value is not None}
    runs = [] if run is not None else planned_runs(suite, budget, out=folder, changes=changes)
    chosen = selected(runs, budget.only)
    console = Console(stderr=True)
    for planned in runs:
        check_folder(planned, folder)
    if dry_run:
        show_plan(suite, budget, chosen, folder, workers)
        return None
    _writable(folder)
    with (folder / "suite.lock").open("a") as lock:
        take_lock(lock, busy=f"another process is running a suite in {str(folder)!r}")
        due = [] if report_only else chosen
        performed = {outcome.name: outcome for outcome in _perform(due, folder, workers, console, command)}
    outcomes = [performed.get(run.name) or read_outcome(run, folder) or _missing(run) for run in runs]
    network = _network(runs, run, folder)
    context = Context(suite, budget, tuple(runs), tuple(outcomes), folder, network, data_root, net, console)
    page = write_report(folder, suite, budget, runs, outcomes, RENDERERS[suite.renderer](context))
    failed = [outcome for outcome in outcomes if not outcome.done]
    state = f"{len(outcomes) - len(failed)} of {len(outcomes)} runs done; " if outcomes else ""
    console.print(f"{state}report: {page}", highlight=False)
    broken = sum(outcome.status == "failed" for outcome in performed.values()) if not report_only else 0
    if strict and broken:
        raise ConfigError(f"{broken} of {len(chosen)} runs failed for the reasons above; the same command repeats them")
    return page


def _missing(run: PlannedRun) -> Outcome:
    return without_result(run, "not run yet", status="missing")


def _perform(runs: list[PlannedRun], folder: Path, workers: int, console: Console, command: str) -> list[Outcome]:
    if not runs:
        return []
    with SuiteProgress(console, runs, folder) as progress:
        try:
            return perform_all(runs, folder, workers=workers, progress=progress)
        except Interrupted:
            again = f"; continue with `{command}`" if command else ""
            raise Interrupted(f"interrupted: finished runs are kept in {str(folder)!r}{again}") from None


def _network(runs: list[PlannedRun], run: Path | None, folder: Path) -> Path | None:
    """What the user named, else the network that the suite's cells start from."""
    if run is not None:
        return run
    return next((planned.folder(folder) for planned in runs if planned.cell.once), None)


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output folder {str(folder)!r} cannot be written: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"output folder {str(folder)!r} cannot be written: choose another --out")


def show_plan(suite: Suite, budget: Budget, runs: list[PlannedRun], folder: Path, workers: int) -> None:
    """All runs, with the training time that a probe of one step gives."""
    console = Console()
    estimates = training_seconds(runs)
    screen = Screen(title=f"{suite.name} → {folder}", title_justify="left", box=None)
    for column in ("setting", "method", "estimator", "seeds", "done", "epochs", "training of one"):
        screen.add_column(column, justify="left" if column in ("setting", "method", "estimator") else "right")
    left, unknown = 0.0, 0
    for cell in suite.cells:
        own = [run for run in runs if run.cell == cell]
        stored = [read_outcome(run, folder) for run in own]
        done = sum(outcome is not None and outcome.done for outcome in stored)
        seconds = estimates[own[0].name] if own else None
        left += (len(own) - done) * (seconds or 0.0)
        unknown += len(own) - done if seconds is None else 0
        shown = "unknown" if seconds is None else _duration(seconds)
        numbers = (len(own), done, own[0].config.epochs if own else 0)
        screen.add_row(cell.group, cell.row, cell.column, *map(str, numbers), shown)
    console.print(screen)
    for change in budget.changes(suite):
        console.print(f"shortened: {change}", highlight=False)
    if unknown:
        console.print(f"{unknown} runs could not be tried: is their data there? See --data-root", highlight=False)
    console.print(
        f"about {_duration(left)} of training on one core, {_duration(left / workers)} with {workers} workers; "
        "certification comes on top of it",
        highlight=False,
    )


def _duration(seconds: float) -> str:
    """A rounded time.

    >>> _duration(30), _duration(600), _duration(36000)
    ('30 s', '10 min', '10.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

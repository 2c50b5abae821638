"""Many runs, one after another or on Ray, each after the run that it starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gls_lirpa.base.interruption import Interrupted, stop_requests
from gls_lirpa.base.parcels import unpacked
from gls_lirpa.base.ray_pool import WorkerPool, last_line
from gls_lirpa.bench.execute import SilentReporter, perform
from gls_lirpa.bench.outcomes import Outcome, read_outcome, without_result
from gls_lirpa.bench.progress import SuiteProgress
from gls_lirpa.bench.suite import PlannedRun

POLL_SECONDS = 1.0


class _Watching(SilentReporter):
    def __init__(self, progress: SuiteProgress) -> None:
        self._progress = progress

    def epoch_ended(self, row: dict[str, Any]) -> None:
        self._progress.refresh()


def perform_all(runs: Sequence[PlannedRun], out: Path, *, workers: int, progress: SuiteProgress) -> list[Outcome]:
    """The outcomes of all runs, in their order; a failed run does not stop the others."""
    outcomes = {}
    for run in runs:
        stored = read_outcome(run, out)
        if stored is not None and stored.done:
            outcomes[run.name] = stored
    due = [run for run in runs if run.name not in outcomes]
    progress.known(len(outcomes))
    try:
        for outcome in (
            _parallel(due, out, workers, progress) if workers > 1 and len(due) > 1 else _serial(due, out, progress)
        ):
            outcomes[outcome.name] = outcome
            progress.finished(outcome)
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    return [outcomes[run.name] for run in runs]


def _unstarted(run: PlannedRun) -> Outcome:
    return without_result(run, f"the run {run.needs!r} that it starts from failed")


def _serial(due: Sequence[PlannedRun], out: Path, progress: SuiteProgress) -> Iterator[Outcome]:
    lost: set[str] = set()
    for run in due:
        outcome = _unstarted(run) if run.needs in lost else perform(run, out, _Watching(progress))
        if not outcome.done:
            lost.add(run.name)
        yield outcome


def _parallel(due: Sequence[PlannedRun], out: Path, workers: int, progress: SuiteProgress) -> Iterator[Outcome]:
    # The paradox suites list their cells from cheap to dear: the dear ones first leave no worker idle at the end.
    waiting, open_runs = list(reversed(due)), {run.name for run in due}
    lost: set[str] = set()
    unstarted: list[Outcome] = []

    def take() -> PlannedRun | None:
        for run in list(waiting):
            if run.needs in open_runs:
                continue
            waiting.remove(run)
            if run.needs not in lost:
                return run
            open_runs.discard(run.name)
            lost.add(run.name)
            unstarted.append(_unstarted(run))
        return None

    def ended(run: PlannedRun, error: BaseException) -> Outcome:
        outcome = without_result(run, f"its process ended: {last_line(error)}")
        with contextlib.suppress(OSError):
            outcome.write(run.folder(out))
        return outcome

    pool = WorkerPool(RunWorker, out, workers=min(workers, len(due)), what="the suite")
    # An exception raised by the signal itself can be lost inside Ray.
    with stop_requests(lambda: None) as asked:
        for event in pool.stream(take, poll=POLL_SECONDS, lost=ended):
            if asked.is_set():
                raise KeyboardInterrupt
            progress.refresh()
            yield from _emptied(unstarted)
            if event is not None:
                run, outcome = event
                open_runs.discard(run.name)
                if not outcome.done:
                    lost.add(run.name)
                yield outcome
        yield from _emptied(unstarted)


def _emptied(outcomes: list[Outcome]) -> list[Outcome]:
    found = outcomes[:]
    outcomes.clear()
    return found


class RunWorker:
    """Performs runs in an actor."""

    def __init__(self, parcel: bytes) -> None:
        self._out: Path = unpacked(parcel)

    def work(self, run: PlannedRun) -> Iterator[Outcome]:
        """The outcome of one run."""
        yield perform(run, self._out, SilentReporter())

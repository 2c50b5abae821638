"""Many runs, one after another or on Ray, each after the run that it starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gls_lirpa.base import ray_session
from gls_lirpa.base.interruption import Interrupted, stop_requests
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
    ray = ray_session.acquire(None, actors=min(workers, len(due)), gpus=0.0, store_bytes=0)
    try:
        # An exception raised by the signal itself can be lost inside Ray.
        with stop_requests(lambda: None) as asked:
            for outcome in _as_they_end(ray, due, out, workers, progress):
                if asked.is_set():
                    raise KeyboardInterrupt
                if outcome is not None:
                    yield outcome
    finally:
        ray_session.release()


def _as_they_end(
    ray: Any, due: Sequence[PlannedRun], out: Path, workers: int, progress: SuiteProgress
) -> Iterator[Outcome | None]:
    """The outcomes of runs on Ray; None after every wait, and at the end."""
    task = ray.remote(num_cpus=1, max_retries=0)(_remote)
    # The paradox suites list their cells from cheap to dear: the dear ones first leave no worker idle at the end.
    waiting, open_runs = list(reversed(due)), {run.name for run in due}
    lost: set[str] = set()
    busy: dict[Any, PlannedRun] = {}
    while waiting or busy:
        for run in [run for run in waiting if run.needs not in open_runs]:
            if run.needs in lost:
                waiting.remove(run)
                open_runs.discard(run.name)
                lost.add(run.name)
                yield _unstarted(run)
            elif len(busy) < workers:
                waiting.remove(run)
                busy[task.remote(run, out)] = run
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=POLL_SECONDS)
        progress.refresh()
        yield None
        for reference in ready:
            run = busy.pop(reference)
            outcome = _received(ray, reference, run, out)
            open_runs.discard(run.name)
            if not outcome.done:
                lost.add(run.name)
            yield outcome
    yield None


def _remote(run: PlannedRun, out: Path) -> Outcome:
    return perform(run, out, SilentReporter())


def _received(ray: Any, reference: Any, run: PlannedRun, out: Path) -> Outcome:
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        outcome = without_result(run, f"its process ended: {lines[-1] if lines else type(error).__name__}")
        with contextlib.suppress(OSError):
            outcome.write(run.folder(out))
    return outcome

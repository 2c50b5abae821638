"""One run of a suite: an ordinary train + certify, skipped when complete and resumed when interrupted."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch

from gls_lirpa.base.interruption import Interrupted
from gls_lirpa.bench.letters import packed, read_letters
from gls_lirpa.bench.outcomes import FILE, Outcome, read_outcome, without_result
from gls_lirpa.bench.suite import PlannedRun
from gls_lirpa.errors import ConfigError
from gls_lirpa.jobs.certify import certify_job
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.loop import Reporter, train
from gls_lirpa.training.runs import RunFolder
from gls_lirpa.training.summary import write_summary

_MOVABLE = ("data_root", "init_from", "teacher", "device")


class SilentReporter:
    """Training progress for nobody; a run's metrics file tells how far it is."""

    def started(self, config: TrainConfig, folder: Path, steps: int, done: int) -> None: ...

    def stepped(self, numbers: dict[str, float]) -> None: ...

    def epoch_ended(self, row: dict[str, Any]) -> None: ...

    def stopping(self) -> None: ...

    def finished(self) -> None: ...


def check_folder(run: PlannedRun, out: Path) -> None:
    """Refuse to go on with a run of another configuration."""
    folder = RunFolder(run.folder(out))
    if not folder.config_file.exists():
        return
    stored, planned = folder.config().to_dict(), run.config.to_dict()
    for key, value in planned.items():
        if key not in _MOVABLE and stored[key] != value:
            raise ConfigError(
                f"{str(folder.path)!r} holds a run with {key} {stored[key]}, not {value}: "
                "repeat the options it was made with, or choose another --out"
            )


def perform(run: PlannedRun, out: Path, reporter: Reporter) -> Outcome:
    """Do what is missing of a run. One thread, so that results do not depend on the number of workers."""
    done = read_outcome(run, out)
    if done is not None and done.done:
        return done
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = _performed(run, out, reporter)
    except Interrupted:
        raise
    except Exception as error:  # whatever fails in one run must not stop the others
        outcome = without_result(run, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    finally:
        torch.set_num_threads(threads)
    outcome.write(run.folder(out))
    return outcome


def _performed(run: PlannedRun, out: Path, reporter: Reporter) -> Outcome:
    path = run.folder(out)
    folder = RunFolder(path)
    if not folder.weights_file.exists():
        resume = folder.config_file.exists()
        (path / FILE).unlink(missing_ok=True)
        config = folder.config() if resume else run.config
        write_summary(train(config, path, reporter=reporter, resume=resume), path)
    begin = time.monotonic()
    records = path / f"certify-{run.samples or 'all'}"
    summary = certify_job(
        path,
        samples=run.samples,
        split=run.split,
        timeout=run.timeout,
        out=records,
        data_root=run.config.data_root,
        device=run.config.device,
        quiet=True,
    )
    rows = folder.metrics()
    return Outcome(
        name=run.name,
        group=run.cell.group,
        row=run.cell.row,
        column=run.cell.column,
        seed=run.seed,
        status="done",
        natural=100 * summary.natural,
        adversarial=100 * summary.adversarial,
        certified=100 * summary.certified,
        unknown=summary.unknown,
        samples=summary.samples,
        requested=run.samples,
        epochs=len(rows),
        train_seconds=sum(row["seconds"] for row in rows),
        certify_seconds=time.monotonic() - begin,
        verdicts=packed(read_letters(records)),
    )

"""The runs behind the tables: their options are valid, and are those of the outcomes that are committed."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from gls_lirpa.bench.results import read_results
from gls_lirpa.training.job import make_config

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def evidence() -> Any:
    spec = importlib.util.spec_from_file_location("evidence_of_results", FOLDER / "evidence.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def trained_with(options: str) -> dict[str, Any]:
    """The configuration that `glscert train` makes of these options."""
    from glscert.train import train

    with train.make_context("train", shlex.split(options)) as context:
        given = {k: v for k, v in context.params.items() if k not in ("config", "out", "resume", "dry_run", "log")}
        return dict(json.loads(json.dumps(make_config(given).to_dict())))


def test_committed_outcomes_are_of_the_listed_runs(evidence: Any) -> None:
    jobs = {job.name: job for name in evidence.EXPERIMENTS for job in evidence.jobs(name)}
    results = {result.name: result for result in read_results(FOLDER / "results")}
    assert set(results) <= set(jobs), "every outcome can be made again"
    configs = {name: trained_with(job.options) for name, job in jobs.items()}
    for name, result in results.items():
        config = {key: value for key, value in configs[name].items() if key in result.config}
        assert (config, result.experiment) == (result.config, jobs[name].experiment), name
    assert len(set(map(json.dumps, configs.values()))) == len(jobs), "no two runs are the same"


def test_a_listed_run_is_due_until_its_outcome_is_there(
    evidence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, certified and collected by the commands themselves; asked for again, it is left alone."""
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    small = "--dataset digits --net cnn3-tiny --epochs 1 --limit 64 --eval-samples 8 --eps 0.02"
    cells = {"ibp-grad": "--relaxation ibp --estimator grad"}
    monkeypatch.setattr(evidence, "EXPERIMENTS", {"digits": evidence.Experiment("digits", small, cells, seeds=1)})
    monkeypatch.setattr(evidence, "CERTIFY", "--samples 8 --stages ibp")
    (job,) = evidence.jobs("digits")
    assert not job.done
    folder = tmp_path / "runs"
    folder.mkdir()
    assert job.run(folder, str(tmp_path)), (folder / f"{job.name}.log").read_text()
    (result,) = read_results(tmp_path / "results")
    assert job.done and (result.name, result.samples, result.experiment) == ("digits-ibp-grad-0", 8, "digits")
    (tmp_path / "results" / f"{job.name}.json").unlink()
    written = (folder / job.name / "weights.pt").read_bytes()
    assert job.run(folder, str(tmp_path)) and job.done, "collected again from what is there"
    assert (folder / job.name / "weights.pt").read_bytes() == written

"""A suite that fails in part, is interrupted, or is asked for on the command line."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gls_lirpa.bench.job import bench_job
from gls_lirpa.bench.suite import Budget, Cell, Suite

from .conftest import Glscert
from .test_readers import _make_mnist


def test_a_failing_run_is_shown_and_stops_nothing(tmp_path: Path) -> None:
    good = {"dataset": "digits", "net": "cnn3-tiny", "relaxation": "ibp", "estimator": "grad", "limit": 200}
    good = {**good, "epochs": 1}
    cells = (
        Cell("", "broken", "grad", {**good, "lr": 1e30, "epochs": 3}),
        Cell("", "after it", "grad", good, start="broken-grad"),
        Cell("", "ibp", "grad", good),
    )
    suite = Suite("failing", "", cells, samples=3, timeout=1.0)
    page = bench_job(suite, out=tmp_path, budget=Budget(), workers=1)
    assert page is not None
    rows = {row["row"]: row for row in csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())}
    assert rows["broken"]["status"] == "failed"
    assert "NumericalError" in rows["broken"]["reason"]
    assert "that it starts from failed" in rows["after it"]["reason"]
    assert rows["ibp"]["status"] == "done"
    assert "Runs without a result" in page.read_text()


def test_cells_that_were_not_asked_for_are_missing_from_the_report(tmp_path: Path) -> None:
    given = {"dataset": "digits", "net": "cnn3-tiny", "relaxation": "ibp", "limit": 100, "epochs": 1}
    cells = (
        Cell("", "ibp", "grad", {**given, "estimator": "grad"}),
        Cell("", "ibp", "rgs", {**given, "estimator": "rgs"}),
    )
    suite = Suite("partly", "", cells, samples=2, timeout=1.0)
    for only, expected in ((("grad",), ["done", "missing"]), (("ibp-rgs",), ["done", "done"])):
        page = bench_job(suite, out=tmp_path, budget=Budget(only=only), workers=1)
        rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
        assert [row["status"] for row in rows] == expected
        assert page is not None and f"only the cells of {only[0]}" in page.read_text()


def check_interruption(tmp_path: Path, *, workers: int) -> None:
    """Ctrl-C in the middle of a run; the same command then gives what an uninterrupted suite gives."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = (
        "import sys, dataclasses; from pathlib import Path; from gls_lirpa.bench.job import bench_job\n"
        "from gls_lirpa.bench.suite import Budget, Cell, Suite\n"
        "o = dict(dataset='digits', net='cnn3-tiny', relaxation='crown-ibp', estimator='rgs', epochs=6, limit=400, "
        "milestones=(4,), eps_anneal_epochs=2.0)\n"
        "s = Suite('s', '', (Cell('', 'crown-ibp', 'rgs', o),), seeds=(0, 1), samples=10, timeout=2.0)\n"
        "bench_job(s, out=Path(sys.argv[1]), budget=Budget(), workers=int(sys.argv[2]), command='again')\n"
    )
    file = tmp_path / "suite.py"
    file.write_text(script)
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def command(out: Path) -> list[str]:
        return [sys.executable, str(file), str(out), str(workers)]

    subprocess.run(command(whole), check=True, capture_output=True, env=environment)
    process = subprocess.Popen(
        command(cut), env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    metrics = cut / "runs" / "crown-ibp-rgs-s0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    _, error = process.communicate(timeout=120)
    assert process.returncode != 0
    assert b"continue with `again`" in error
    assert not (cut / "report.html").exists()
    subprocess.run(command(cut), check=True, capture_output=True, env=environment)

    def results(out: Path) -> list[dict[str, str]]:
        timing = ("train_seconds", "certify_seconds")
        rows = csv.DictReader((out / "runs.csv").read_text().splitlines())
        return [{key: value for key, value in row.items() if key not in timing} for row in rows]

    assert results(cut) == results(whole)


def test_an_interrupted_suite_goes_on_where_it_stopped(tmp_path: Path) -> None:
    check_interruption(tmp_path, workers=1)


def test_command_line_on_a_trained_run_and_report_only(glscert: Glscert, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = glscert("train", "--net", "cnn3-tiny", "--epochs", 1, "--limit", 100, "--relaxation", "ibp", "--out", run)
    assert trained.code == 0, trained.err
    out = tmp_path / "tightness"
    first = glscert("bench", "tightness", "--run", run, "--samples", 20, "--out", out)
    assert first.code == 0, first.err
    areas = json.loads((out / "tightness.json").read_text())["result"]["areas"]
    assert areas["ibp"] <= areas["hbox"] + 1e-9
    images = tmp_path / "data"
    _make_mnist(images)
    missing = glscert("bench", "pgpe-vs-rgs", "--report-only", "--out", tmp_path / "none", "--data-root", images)
    assert missing.code == 0, missing.err
    assert "not run yet" in (tmp_path / "none" / "report.md").read_text()
    listed = glscert("bench", "--list")
    assert all(name in listed.out for name in ("paradox-digits", "nondiff", "speed"))
    planned = glscert("bench", "paradox-digits", "--dry-run", "--epochs-scale", "0.01", "--out", tmp_path / "plan")
    assert planned.code == 0, planned.err
    assert "of training on one core" in planned.out
    assert not (tmp_path / "plan").exists()

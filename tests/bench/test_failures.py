"""A suite that fails in part, is interrupted, or is asked for on the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from gls_lirpa.bench.job import bench_job
from gls_lirpa.bench.suite import Budget, Cell, Suite
from tests.helpers.command import Glscert
from tests.helpers.datasets import make_mnist
from tests.helpers.interruption import check_interruption


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
    make_mnist(images)
    missing = glscert("bench", "pgpe-vs-rgs", "--report-only", "--out", tmp_path / "none", "--data-root", images)
    assert missing.code == 0, missing.err
    assert "not run yet" in (tmp_path / "none" / "report.md").read_text()
    listed = glscert("bench", "--list")
    assert all(name in listed.out for name in ("paradox-digits", "nondiff", "speed"))
    planned = glscert("bench", "paradox-digits", "--dry-run", "--epochs-scale", "0.01", "--out", tmp_path / "plan")
    assert planned.code == 0, planned.err
    assert "of training on one core" in planned.out
    assert not (tmp_path / "plan").exists()

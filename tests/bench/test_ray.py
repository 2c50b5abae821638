"""Suites on Ray: the same results with one and two workers, a failing run, and the speed suite's actors."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from gls_lirpa.bench.job import bench_job
from gls_lirpa.bench.suite import Budget, Cell, Suite
from gls_lirpa.bench.suites import SUITES
from tests.helpers.interruption import check_interruption

OPTIONS = {"dataset": "digits", "net": "cnn3-tiny", "limit": 300, "epochs": 2, "batch_size": 64}


def _suite(*cells: Cell) -> Suite:
    return Suite("on-ray", "", cells, seeds=(0, 1), samples=8, timeout=2.0)


def _rows(out: Path) -> list[dict[str, str]]:
    timing = ("train_seconds", "certify_seconds")
    rows = csv.DictReader((out / "runs.csv").read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in timing} for row in rows]


def test_two_workers_give_what_one_gives(tmp_path: Path) -> None:
    start = Cell("", "pgd", "start", {**OPTIONS, "loss": "pgd", "estimator": "grad"}, once=True)
    cells = [
        Cell("", relaxation, "rgs", {**OPTIONS, "relaxation": relaxation, "estimator": "rgs"}, start="pgd-start")
        for relaxation in ("ibp", "crown-ibp")
    ]
    for workers in (1, 2):
        bench_job(_suite(start, *cells), out=tmp_path / str(workers), budget=Budget(), workers=workers)
    assert _rows(tmp_path / "1") == _rows(tmp_path / "2")
    assert [row["status"] for row in _rows(tmp_path / "2")] == ["done"] * 5


def test_a_failure_on_a_worker_stops_nothing(tmp_path: Path) -> None:
    good = {**OPTIONS, "relaxation": "ibp", "estimator": "grad"}
    cells = (
        Cell("", "broken", "grad", {**good, "lr": 1e30}),
        Cell("", "after it", "grad", good, start="broken-grad"),
        Cell("", "ibp", "grad", good),
    )
    bench_job(dataclasses.replace(_suite(*cells), seeds=(0,)), out=tmp_path, budget=Budget(), workers=2)
    assert {row["row"]: row["status"] for row in _rows(tmp_path)} == {
        "broken": "failed",
        "after it": "failed",
        "ibp": "done",
    }


def test_ctrl_c_ends_the_workers_and_keeps_what_they_did(tmp_path: Path) -> None:
    check_interruption(tmp_path, workers=2)


def test_speed_suite(tmp_path: Path) -> None:
    settings = {"batch": 2, "population": 4, "repeats": 1, "net": "cnn3-tiny", "shape": (1, 8, 8), "cost_rows": 1}
    settings["cost_sizes"] = (1, 2)
    suite = dataclasses.replace(SUITES.get("speed"), settings=settings)
    page = bench_job(suite, out=tmp_path, budget=Budget(), workers=1)
    assert page is not None
    rows = list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))
    assert [row["relaxation"] for row in rows] == ["ibp", "hbox", "crown-ibp", "crown", "crown-plain"]
    measured = json.loads((tmp_path / "speed.json").read_text())
    ratio = measured["plain"]["crown"] / measured["steps"]["crown"]["grad"]
    assert float(rows[3]["plain / grad"]) == pytest.approx(ratio, abs=0.0051)
    assert set(measured["actors"]) == {"1", "2"}

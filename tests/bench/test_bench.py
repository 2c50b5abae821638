"""Suites as data, statistics, tables and the report on recorded results."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from gls_lirpa.base.files import take_lock
from gls_lirpa.bench.execute import SilentReporter, check_folder, perform
from gls_lirpa.bench.letters import packed
from gls_lirpa.bench.outcomes import Outcome, read_outcome, without_result
from gls_lirpa.bench.paper import paper_rows
from gls_lirpa.bench.progress import SuiteProgress
from gls_lirpa.bench.report import write_report
from gls_lirpa.bench.sections import Section, marks
from gls_lirpa.bench.statistics import estimate, paradox_verdicts
from gls_lirpa.bench.suite import Budget, Cell, PlannedRun, Suite, planned_runs, scaled, selected
from gls_lirpa.bench.suites import SUITES
from gls_lirpa.bench.tables import cell_table, cells_of, matrix_table, verdict_table
from gls_lirpa.errors import ConfigError
from gls_lirpa.training.config import TrainConfig
from tests.helpers.command import Glscert

OUT = Path("unused")
CELLS = ("ibp", "hbox", "crown-ibp", "crown")


def _outcome(row: str, column: str, seed: int, certified: float | None, natural: float = 95.0) -> Outcome:
    name = f"{row}-{column}-s{seed}"
    numbers = {"natural": natural, "adversarial": certified, "certified": certified}
    proven = round(10 * certified) if certified is not None and math.isfinite(certified) else 0
    verdicts = packed("v" * proven + "f" * (1000 - proven))
    common = {"unknown": 0, "samples": 1000, "train_seconds": 60.0, "verdicts": verdicts}
    return Outcome(name, "", row, column, seed, "done", **numbers, **common)  # type: ignore[arg-type]


def _recorded(values: dict[tuple[str, str], list[float]]) -> list[Outcome]:
    return [_outcome(*key, seed, value) for key, row in values.items() for seed, value in enumerate(row)]


PARADOX = {
    ("ibp", "grad"): [91.0, 91.2, 90.8],
    ("crown", "grad"): [89.0, 89.3, 88.9],
    ("ibp", "rgs"): [91.5, 91.6, 91.2],
    ("crown", "rgs"): [92.5, 92.9, 92.4],
}


# ---------------------------------------------------------------- suites


@pytest.mark.parametrize("name", list(SUITES))
def test_every_run_has_a_valid_configuration_and_its_start_before_it(name: str) -> None:
    runs = planned_runs(SUITES.get(name), Budget(epochs_scale=0.1, seeds=2), out=OUT, changes={})
    seen: set[str] = set()
    for run in runs:
        assert run.name not in seen
        assert run.needs is None or run.needs in seen
        assert (run.config.init_from is None) == (run.needs is None)
        seen.add(run.name)


@pytest.mark.parametrize("name", [name for name in SUITES if name.startswith("paradox")])
def test_cells_of_a_paradox_differ_in_nothing_but_the_relaxation(name: str) -> None:
    runs = planned_runs(SUITES.get(name), Budget(seeds=1), out=OUT, changes={})
    assert {run.cell.row for run in runs if run.needs} == set(CELLS)
    by_estimator: dict[str, set[str]] = {}
    for run in runs[1:]:
        fields = {**run.config.to_dict(), "relaxation": None}
        by_estimator.setdefault(run.config.estimator, set()).add(json.dumps(fields))
        started = SUITES.get(name).preset is None or run.config.estimator == "pgpe"
        assert run.needs == (runs[0].name if started else None)
    assert {key: len(value) for key, value in by_estimator.items()} == {"grad": 1, "pgpe": 1, "rgs": 1}


def test_only_some_cells_with_what_they_start_from() -> None:
    runs = planned_runs(SUITES.get("paradox-digits"), Budget(seeds=2), out=OUT, changes={})
    assert selected(runs, ()) == runs
    chosen = selected(runs, ("crown-rgs", "grad"))
    assert {(run.cell.row, run.cell.column) for run in chosen} == {
        ("pgd", "start"), ("crown", "rgs"), *((row, "grad") for row in CELLS)
    }  # fmt: skip
    assert len(chosen) == 1 + 2 * 5 and chosen[0].cell.row == "pgd"
    assert {run.cell.column for run in selected(runs, ("hbox",))} == {"start", "grad", "pgpe", "rgs"}
    with pytest.raises(ConfigError, match="no cell 'crwon' in this suite: expected --only among"):
        selected(runs, ("grad", "crwon"))


def test_the_papers_numbers_stand_beside_the_cells_of_their_setting() -> None:
    cells = {cell.key: cell for cell in SUITES.get("paradox-mnist").cells}
    row = cells["mnist-0.1-cnn3-crown-rgs"].paper
    assert row is not None
    assert (row.natural, row.certified) == (97.37, 91.88)
    assert all(cell.paper is None for cell in SUITES.get("paradox-mnist-small").cells)


def test_options_of_paper_rows() -> None:
    large = [row for row in paper_rows("cnn5-large") if row.from_ibp]
    assert [row.options["relaxation"] for row in large] == ["crown", "crown"]
    fused = next(row for row in paper_rows("cnn5") if row.method == "crown-ibp-lf")
    assert (fused.options["loss"], fused.options["relaxation"]) == ("robust-fused", "crown-ibp")
    nondiff = next(row for row in paper_rows("nondiff") if row.method == "alpha-crown")
    assert nondiff.options["relaxation"] == "alpha-crown-step"
    starts = {cell.key: cell.start for cell in SUITES.get("large-eps").cells}
    assert starts["mnist-0.3-cnn5-crown-from-ibp-rgs"] == "mnist-0.3-cnn5-ibp-grad"


def test_scaling_keeps_the_shape_of_a_schedule() -> None:
    config = TrainConfig(epochs=70, milestones=(50, 60), eps_anneal_epochs=20)
    short = scaled(config, 0.5)
    assert (short.epochs, short.milestones, short.eps_anneal_epochs) == (35, (25.0, 30.0), 10.0)
    shortest = scaled(config, 1e-4)
    assert (shortest.epochs, shortest.milestones) == (1, pytest.approx((50 / 70, 60 / 70)))


def test_progress_counts_what_was_done_before(tmp_path: Path) -> None:
    runs = planned_runs(SUITES.get("sam"), Budget(), out=tmp_path, changes={})
    screen = io.StringIO()
    with SuiteProgress(Console(file=screen, force_terminal=True, width=100), runs, tmp_path) as progress:
        progress.known(2)
    assert f"runs 2/{len(runs)}" in screen.getvalue()


@pytest.mark.parametrize("budget", [{"epochs_scale": 0.0}, {"epochs_scale": math.nan}, {"samples": 0}, {"seeds": -1}])
def test_impossible_budgets(budget: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected --"):
        Budget(**budget)  # type: ignore[arg-type]


# ---------------------------------------------------------------- statistics


def test_nothing_one_value_and_nan() -> None:
    assert estimate([]) is None
    assert estimate([None, math.nan]) is None
    single = estimate([3.0, math.nan])
    assert single is not None
    assert (single.mean, single.std) == (3.0, None)
    several = estimate([1.0, 2.0, 3.0])
    assert several is not None
    assert (several.mean, several.std) == (2.0, pytest.approx(1.0, abs=1e-12))


def _verdicts(values: dict[tuple[str, str], list[float]], *estimators: str) -> list[str]:
    cells = cells_of(_recorded(values))
    return [v.verdict for v in paradox_verdicts(cells, tight="crown", loose="ibp", estimators=estimators)]


def test_verdicts_mean_what_they_say() -> None:
    """Images are certified in a fixed order, so that accuracies alone decide."""
    for seeds, mark in ((3, " (exploratory: 3 seeds)"), (5, "")):
        values = {key: (row + row)[:seeds] for key, row in PARADOX.items()}
        assert _verdicts(values, "grad", "rgs") == ["paradox" + mark, "effect" + mark]
        behind = {**values, ("crown", "rgs"): [value - 0.6 for value in values["ibp", "rgs"]]}
        assert _verdicts(behind, "rgs") == ["shift without lead" + mark]
        worse = {**values, ("crown", "rgs"): [value - 6.0 for value in values["ibp", "rgs"]]}
        assert _verdicts(worse, "rgs") == ["negative shift" + mark]


def test_overlap_one_seed_and_missing_cells_are_undecided() -> None:
    assert _verdicts({**PARADOX, ("crown", "rgs"): [80.0, 99.0, 90.0]}, "rgs") == ["undecided"]
    assert _verdicts({key: row[:1] for key, row in PARADOX.items()}, "grad", "rgs") == ["undecided"] * 2
    assert _verdicts(PARADOX, "pgpe") == ["undecided"]


# ---------------------------------------------------------------- tables and report


def test_marks_share_equals_and_skip_missing() -> None:
    assert marks([90.0, None, 91.0, 91.0]) == ["second", "", "best", "best"]
    assert marks([90.0]) == [""]


def test_matrix_marks_within_a_column() -> None:
    table = matrix_table(_recorded(PARADOX), rows=["ibp", "crown"], columns=["grad", "rgs"], quantity="certified")
    assert [[entry.mark for entry in row[1:]] for row in table.rows] == [["best", "second"], ["second", "best"]]
    assert table.rows[0][1].text == "91.00 ± 0.20"


def test_paper_difference_failed_and_missing_cells() -> None:
    rows = {(row.method, row.estimator): row for row in paper_rows("1") if row.setting == "mnist 0.1 cnn3"}
    cells = [Cell("", name, "grad", {}, paper=rows[name, "grad"]) for name in ("ibp", "hbox", "crown")]
    run = PlannedRun(cells[1], 0, TrainConfig(), None, None, 1.0)
    outcomes = [_outcome("ibp", "grad", 0, 92.23, natural=96.52), without_result(run, "ConfigError: broken")]
    table = cell_table(Suite("s", "", tuple(cells)), outcomes)
    ibp, hbox, crown = ([entry.text for entry in row] for row in table.rows)
    at = table.header.index
    assert (ibp[at("Δ nat.")], ibp[at("Δ cert.")]) == ("+0.50", "+1.00")
    assert hbox[at("certified")] == "failed"
    assert crown[at("certified")] == "not run"


def test_recorded_results_with_holes_make_a_whole_report(tmp_path: Path) -> None:
    suite = SUITES.get("paradox-mnist")
    runs = planned_runs(suite, Budget(seeds=1), out=tmp_path, changes={})
    outcomes = [
        *_recorded(PARADOX),
        _outcome("hbox", "grad", 0, math.nan),
        without_result(runs[3], "NumericalError: loss is <nan> & more"),
        without_result(runs[4], "not run yet", status="missing"),
    ]
    table = verdict_table(outcomes, tight="crown", loose="ibp", estimators=["grad", "pgpe", "rgs"])
    section = Section("Verdict & more", ("a < b",), (table, cell_table(suite, outcomes)))
    page = write_report(tmp_path, suite, Budget(epochs_scale=0.5), runs, outcomes, [section])
    text = page.read_text()
    assert "http" not in text.replace("http-equiv", "")
    assert "a &lt; b" in text
    assert "loss is &lt;nan&gt; &amp; more" in text
    assert "epochs and schedules × 0.5" in text
    assert text.count("<tr>") == 1 + 3 + 1 + len(suite.cells)
    for name in ("report.md", "report.json", "runs.csv", "verdict.csv", "cells.csv"):
        assert (tmp_path / name).stat().st_size > 0
    assert json.loads((tmp_path / "report.json").read_text())["changes"] == ["epochs and schedules × 0.5"]
    assert "**Shortened: epochs and schedules × 0.5.**" in (tmp_path / "report.md").read_text()


# ---------------------------------------------------------------- one run


def _run(tmp_path: Path, **options: object) -> PlannedRun:
    base = {"dataset": "digits", "net": "cnn3-tiny", "relaxation": "ibp", "estimator": "grad", "epochs": 1}
    options = {**base, **options}
    suite = Suite("s", "", (Cell("", "ibp", "grad", options),), samples=5, timeout=2.0)
    return planned_runs(suite, Budget(), out=tmp_path, changes={"limit": 200})[0]


def test_a_run_is_done_once(tmp_path: Path) -> None:
    run = _run(tmp_path)
    first = perform(run, tmp_path, SilentReporter())
    assert first.done, first.reason
    assert first.samples == 5
    stamp = (run.folder(tmp_path) / "weights.pt").stat().st_mtime_ns
    assert perform(run, tmp_path, SilentReporter()) == first
    assert (run.folder(tmp_path) / "weights.pt").stat().st_mtime_ns == stamp
    assert read_outcome(run, tmp_path) == first


def test_a_failure_has_its_reason_and_is_tried_again(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.folder(tmp_path).mkdir(parents=True)
    (run.folder(tmp_path) / "in the way").touch()
    outcome = perform(run, tmp_path, SilentReporter())
    assert outcome.status == "failed"
    assert "is not empty" in outcome.reason
    for file in run.folder(tmp_path).iterdir():
        file.unlink()
    assert perform(run, tmp_path, SilentReporter()).done


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    perform(_run(tmp_path), tmp_path, SilentReporter())
    with pytest.raises(ConfigError, match="holds a run with epochs 1, not 2"):
        check_folder(_run(tmp_path, epochs=2), tmp_path)


def test_two_processes_do_not_share_a_suite_folder(glscert: Glscert, tmp_path: Path) -> None:
    with (tmp_path / "suite.lock").open("a") as other:
        take_lock(other, busy="unexpected")
        result = glscert("bench", "paradox-digits", "--out", tmp_path, "--report-only")
    assert result.code != 0
    assert "another process is running a suite" in result.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["paradox-digit"], "paradox-digits"),
        ([], "expected a suite"),
        (["paradox-digits", "--run", "x"], "--run is for tightness and landscape"),
        (["paradox-digits", "--workers", "0"], "expected workers >= 1"),
        (["tightness", "--run", "nowhere"], "is not a run folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], expected: str, glscert: Glscert, tmp_path: Path) -> None:
    result = glscert("bench", *arguments, "--out", tmp_path / "out")
    assert result.code != 0
    assert expected in result.err
    assert result.err.strip().count("\n") == 0

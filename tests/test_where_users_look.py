"""What is shown and told: progress in 80 columns, tables, logs, dry runs, configurations as files."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gls_lirpa
from gls_lirpa import GLSError
from gls_lirpa.certification.records import Record, Summary
from gls_lirpa.certification.report import ProgressReporter, result_table
from gls_lirpa.training import TrainConfig
from gls_lirpa.training.console import ConsoleReporter
from gls_lirpa.training.dry_run import Probe, describe
from gls_lirpa.training.logs import LOGS, Logger
from tests.helpers.command import Glscert

QUICK = ("--net", "cnn3-tiny", "--relaxation", "ibp", "--epochs", "2", "--limit", "100", "--eval-samples", "20")
ROW = {"epoch": 1, "loss": 0.7, "eps": 0.1, "held_out": "val", "natural": 95.23, "certified": 88.12, "unstable": 12.3}
ROW |= {"sigma": 1e-3, "evaluations_per_second": 54.0}


def terminal(width: int) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width, force_terminal=True, color_system=None, legacy_windows=False), text


def shown_lines(text: io.StringIO) -> list[str]:
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text.getvalue())
    return [line for line in plain.replace("\r", "\n").split("\n") if "/" in line]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_training_progress_is_never_cut(width: int) -> None:
    console, text = terminal(width)
    reporter = ConsoleReporter(console)
    reporter.started(TrainConfig(epochs=70), Path("run"), 14770, 7000)
    numbers = {"loss": 0.7412, "eps": 0.1, "sigma": 1e-3, "spread": 0.0012}
    reporter.stepped(numbers)
    reporter.epoch_ended(ROW)  # type: ignore[arg-type]
    reporter.stepped(numbers)
    reporter.finished()
    last = shown_lines(text)[-1]
    assert "…" not in last and len(last.rstrip()) <= width
    assert "7002/14770" in last
    wanted = {40: [], 60: ["loss 0.741"], 80: ["loss 0.741", "nat 95.2 cert 88.1", "eps 0.100"]}
    for part in wanted.get(width, ["loss 0.741", "nat 95.2 cert 88.1", "eps 0.100", "σ 1.0e-03", "± 0.0012"]):
        assert part in last
    if width == 160:
        assert "unst 12.3 %" in last and "54 eval/s" in last


@pytest.mark.parametrize("speed", [54.0, 12345.6])
def test_epochs_are_told_in_80_columns_where_there_is_no_terminal(speed: float) -> None:
    text = io.StringIO()
    reporter = ConsoleReporter(Console(file=text, width=80))
    reporter.started(TrainConfig(epochs=160, preset="cifar10-8/255"), Path("run"), 14770, 0)
    for epoch, loss in ((1, 2.3026), (160, 1234.5678)):
        row = {**ROW, "epoch": epoch, "loss": loss, "natural": 100.0, "unstable": 100.0}
        reporter.epoch_ended({**row, "evaluations_per_second": speed})  # type: ignore[arg-type]
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    first, last = (line for line in lines if line.startswith("epoch "))
    assert first.startswith("epoch 1/160 loss 2.3026 eps 0.1000 │ val nat 100.0 cert 88.1 unst 100.0 %")
    assert last.startswith("epoch 160/160 loss 1234.5678 eps 0.1000 │ val nat 100.0 cert 88.1")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_certification_progress_is_never_cut(width: int) -> None:
    console, text = terminal(width)
    with ProgressReporter(console, [], total=10000) as reporter:
        reporter.decided(Record(0, 1, 1, "verified", "ibp", 0.5, {}))
        reporter.decided(Record(1, 1, 1, "unknown", "ibp", -0.5, {}))
    last = shown_lines(text)[-1]
    assert "…" not in last and len(last.rstrip()) <= width
    assert "2/10000" in last and "certified 50.0 %" in last
    if width >= 80:
        assert "verified 1 falsified 0 unknown 1" in last


def test_table_says_why_samples_are_unknown_and_how_far_the_bounds_were() -> None:
    records = [
        Record(0, 1, 1, "unknown", "bab", -0.5, {}, reason="time"),
        Record(1, 1, 1, "unknown", "bab", -0.1, {}, reason="time"),
        Record(2, 1, 1, "unknown", "bab", -0.3, {}, reason="time"),
        Record(3, 1, 1, "unknown", "bab", None, {}, reason="error"),
        Record(4, 1, 1, "unknown", "bab", 2e-7, {}, reason="numerical"),
    ]
    summary = Summary.of(records)
    assert summary.gaps == {"time": -0.3, "numerical": 2e-7}
    console, text = terminal(100)
    console.print(result_table(summary, title="run"))
    lines = {line.split("│")[1].strip(): line for line in text.getvalue().splitlines() if line.startswith("│")}
    assert "3" in lines["out of time"] and "median bound -0.3" in lines["out of time"]
    assert "median bound +2e-07" in lines["within rounding"]
    assert "median" not in lines["a stage failed"]


@pytest.mark.parametrize(("stage", "shown"), [("ibp", "no attack"), ("pgd", "100.00 %")])
def test_no_adversarial_accuracy_without_an_attack(stage: str, shown: str) -> None:
    console, text = terminal(100)
    console.print(result_table(Summary.of([Record(0, 1, 1, "unknown", stage, -0.5, {stage: 0.1})]), title="run"))
    (line,) = [line for line in text.getvalue().splitlines() if "adversarial" in line]
    assert shown in line


def test_tensorboard_gets_what_the_bar_shows(tmp_path: Path, glscert: Glscert) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    answer = glscert("train", "--out", tmp_path / "run", *QUICK, "--log", "tensorboard")
    assert answer.code == 0, answer.err
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert {f"epoch/{name}" for name in ("loss", "eps", "sigma", "natural", "certified", "unstable")} <= scalars
    rows = gls_lirpa.load_run(tmp_path / "run").metrics
    for name in ("loss", "natural", "certified"):
        logged = [(event.step, event.value) for event in events.Scalars(f"epoch/{name}")]
        assert logged == [(row["epoch"], pytest.approx(row[name], rel=1e-6)) for row in rows]


def test_steps_are_logged_with_their_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[dict[str, float], int]] = []
    sink = types.SimpleNamespace(write=lambda numbers, step: seen.append((numbers, step)), close=lambda: None)
    monkeypatch.setitem(LOGS._items, "tensorboard", lambda config, folder: sink)
    monkeypatch.setattr("gls_lirpa.training.logs.SECONDS", 0.0)
    logger = Logger("tensorboard")
    logger.started(TrainConfig(), tmp_path, steps=10, done=4)
    logger.stepped({"loss": 0.5})
    logger.finished()
    (numbers, step) = seen[0]
    assert step == 5 and numbers["step/loss"] == 0.5 and numbers["step/per_second"] > 0


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_log_package_names_its_extra(
    name: str, tmp_path: Path, glscert: Glscert, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuse:
        def find_spec(self, full: str, path: Any = None, target: Any = None) -> None:
            if full.partition(".")[0] == name:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Refuse(), *sys.meta_path])
    answer = glscert("train", "--out", tmp_path / "run", *QUICK, "--log", name)
    assert answer.code == 2
    expected = f"--log {name} needs {name}, which is not installed: pip install {name}"
    assert answer.err == f"glscert: {expected}\n"
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_configuration_network_time_and_memory(tmp_path: Path, glscert: Glscert) -> None:
    answer = glscert("train", "--out", tmp_path / "run", *QUICK, "--dry-run", "--estimator", "pgpe")
    assert answer.code == 0, answer.err
    assert not (tmp_path / "run").exists()
    end = answer.out.index("\n}\n") + 2
    config = json.loads(answer.out[:end])
    assert config["relaxation"] == "ibp" and config["epochs"] == 2 and config["limit"] == 100
    text = answer.out[end:]
    assert "cnn3-tiny, 208 parameters" in text and "Conv2d(1, 2" in text
    assert "90 samples, 1 steps per epoch" in text and "per epoch" in text and "MiB" in text


def test_dry_run_says_what_its_time_depends_on() -> None:
    config = TrainConfig(epochs=10, eps=0.1, eps_anneal_epochs=10, eps_shape="linear")
    found = Probe("", 1, 100, 5, step_seconds=3.0, stable_seconds=1.0, mebibytes=1.0)
    least, most = found.seconds(config)
    assert least == 50 and most == pytest.approx(100)  # half of the radius on average
    text = describe(config, found)
    assert "50.0 s to 1 min 40 s for 10 epochs" in text and "stays as unstable" in text
    same = dataclasses.replace(found, stable_seconds=3.0)
    assert "15.0 s per epoch, 2 min 30 s for 10 epochs" in describe(config, same)


def test_dry_run_probes_the_warm_start(tmp_path: Path, glscert: Glscert) -> None:
    answer = glscert("train", *QUICK, "--dry-run", "--init-from", tmp_path / "nothing")
    assert answer.code == 2 and "nothing" in answer.err and answer.err.count("\n") == 1


def test_the_last_line_of_progress_has_the_last_accuracies() -> None:
    console, text = terminal(100)
    reporter = ConsoleReporter(console)
    reporter.started(TrainConfig(epochs=1), Path("run"), 1, 0)
    reporter.stepped({"loss": 0.7412, "eps": 0.1, "sigma": 1e-3, "spread": 0.0012})
    reporter.epoch_ended(ROW)  # type: ignore[arg-type]
    reporter.finished()
    assert "nat 95.2 cert 88.1" in shown_lines(text)[-1]


@pytest.mark.parametrize("toml", [False, True])
def test_a_shown_configuration_is_a_file_for_train(tmp_path: Path, glscert: Glscert, toml: bool) -> None:
    extra = ["--toml"] if toml else []
    answer = glscert("config", "show", "paper-mnist-0.1", "--estimator", "pgpe", *extra)
    assert answer.code == 0, answer.err
    file = tmp_path / ("config.toml" if toml else "config.json")
    file.write_text(answer.out)
    from gls_lirpa.training.job import make_config

    expected = make_config({"preset": "paper-mnist-0.1", "estimator": "pgpe"})
    assert make_config({}, file) == expected and expected.estimator_options["population"] == 256


def test_config_show_lists_presets_shows_runs_and_refuses_in_one_line(tmp_path: Path, glscert: Glscert) -> None:
    assert "paper-cifar10-2/255" in glscert("config", "show").out.splitlines()
    assert glscert("train", "--out", tmp_path / "run", *QUICK).code == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert json.loads(glscert("config", "show", tmp_path / "run").out) == stored
    for arguments, message in [
        (("mnist-0.11",), "did you mean 'mnist-0.1'"),
        (("paper",), "depends on the dataset"),
        ((tmp_path / "run", "--net", "cnn5"), "remove --estimator and --net"),
    ]:
        answer = glscert("config", "show", *arguments)
        assert answer.code == 2 and message in answer.err and answer.err.count("\n") == 1


def test_bad_toml_is_one_line(tmp_path: Path, glscert: Glscert) -> None:
    file = tmp_path / "config.toml"
    file.write_text("epochs = = 3")
    answer = glscert("train", "--config", file)
    assert answer.code == 2 and "is not valid TOML" in answer.err and answer.err.count("\n") == 1
    file.write_text("epoch = 3")
    with pytest.raises(GLSError, match="did you mean 'epochs'"):
        gls_lirpa.train(config_file=file, out=tmp_path / "run")

"""Records survive a kill at any byte, resume exactly and are never mixed with other settings.

Mutations that made a test of this file fail: not cutting a truncated line, no check of settings, no flush, the
counterexample written after its line, skipping the samples that are due, unknown counted as falsified.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.base.interruption import Interrupted
from gls_lirpa.certification import STAGES, Cascade, Record, RecordFolder, Settings, StageOptions, Summary
from gls_lirpa.certification.incomplete import BoundStage
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from gls_lirpa.data import Split, load_dataset
from gls_lirpa.errors import CheckpointError, ConfigError, GLSError
from gls_lirpa.jobs.certify import certify_job, certify_split, weights_hash
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.runs import RunFolder, make_network

SETTINGS = {"eps": 0.1, "stages": ("ibp", "pgd"), "samples": 5}
RECORDS = [
    Record(3, 1, 1, "verified", "ibp", 0.25, {"natural": 0.125, "ibp": 0.5}),
    Record(0, 2, 0, "misclassified", "natural", None, {"natural": 0.125}),
    Record(1, 2, 2, "falsified", "pgd", -1.5, {"natural": 0.125, "ibp": 0.5, "pgd": 2.0}),
    Record(2, 0, 0, "unknown", "pgd", -0.5, {"natural": 0.125, "ibp": 0.5, "pgd": 3.0}, exhausted=True),
    Record(4, 0, -1, "unknown", "natural", None, {"natural": 0.125}),
]


def write(path: Path, records: list[Record]) -> None:
    with RecordFolder(path, SETTINGS) as folder:
        for record in records:
            folder.add(record)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]


# -- the file ---------------------------------------------------------------------------------------------


def test_records_come_back_as_they_went(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    with RecordFolder(tmp_path, SETTINGS) as folder:
        assert list(folder.done.values()) == RECORDS
    assert [set(line) for line in lines(tmp_path)] == [
        {
            *("index", "label", "prediction", "verdict", "stage", "bound", "seconds", "spent", "exhausted"),
            *("counterexample", "reason", "detail", "covers", "errors"),
        }
    ] * 5
    assert lines(tmp_path)[2]["seconds"] == 2.625


def test_every_line_is_on_file_at_once(tmp_path: Path) -> None:
    with RecordFolder(tmp_path, SETTINGS) as folder:
        for number, record in enumerate(RECORDS, start=1):
            folder.add(record)
            assert len(lines(tmp_path)) == number


def test_kill_at_any_byte_loses_and_doubles_nothing(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    write(whole, RECORDS)
    content = (whole / "records.jsonl").read_bytes()
    cut = tmp_path / "cut"
    write(cut, [])
    for position in range(len(content) + 1):
        (cut / "records.jsonl").write_bytes(content[:position])
        with RecordFolder(cut, SETTINGS) as folder:
            assert len(folder.done) == content[:position].count(b"\n")
            for record in RECORDS:
                if record.index not in folder.done:
                    folder.add(record)
        assert (cut / "records.jsonl").read_bytes() == content


def test_a_counterexample_is_on_file_before_its_line(tmp_path: Path) -> None:
    point = torch.rand(1, 2, 2)
    with RecordFolder(tmp_path, SETTINGS) as folder:
        record = folder.add(dataclasses.replace(RECORDS[2], adversarial=point))
        assert record.counterexample == "counterexamples/1.npy"
        assert np.array_equal(np.load(tmp_path / record.counterexample), point.numpy())
        # Where the point cannot be written there must be no line that promises it.
        (tmp_path / "counterexamples" / "0.npy.tmp").mkdir()
        with pytest.raises(OSError):
            folder.add(dataclasses.replace(RECORDS[1], adversarial=point))
        assert [line["index"] for line in lines(tmp_path)] == [1]


def test_a_sample_is_never_recorded_twice(tmp_path: Path) -> None:
    with RecordFolder(tmp_path, SETTINGS) as folder:
        folder.add(RECORDS[0])
        with pytest.raises(ConfigError, match="sample 3 already"):
            folder.add(RECORDS[0])


@pytest.mark.parametrize("change", [{"eps": 0.2}, {"stages": ("ibp",)}, {"samples": 6}, {"weights": "abc"}])
def test_other_settings_are_refused(tmp_path: Path, change: dict) -> None:
    write(tmp_path, RECORDS)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    told = f"(made with|of other) {next(iter(change))} .* choose another --out"
    with pytest.raises(ConfigError, match=told) as raised:
        RecordFolder(tmp_path, {**SETTINGS, **change})
    assert "\n" not in str(raised.value)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


def test_two_processes_cannot_write_the_same_records(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with RecordFolder(tmp_path, SETTINGS), pytest.raises(ConfigError, match="another process"):
        RecordFolder(tmp_path, SETTINGS)
    RecordFolder(tmp_path, SETTINGS).__exit__()


@pytest.mark.parametrize(
    "line", ["", "nonsense", "[]", "{}", '{"index": 1}', RECORDS[0].to_json().replace("verified", "certain")]
)
def test_damage_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path, RECORDS[:2])
    file = tmp_path / "records.jsonl"
    file.write_text(line + "\n" + file.read_text())
    with pytest.raises(CheckpointError, match="line 1 of"):
        RecordFolder(tmp_path, SETTINGS)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    content = (tmp_path / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(content * 2)
    with pytest.raises(CheckpointError, match="occurs twice"):
        RecordFolder(tmp_path, SETTINGS)
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"settings\.json.* is damaged"):
        RecordFolder(tmp_path, SETTINGS)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(CheckpointError, match="without settings"):
        RecordFolder(tmp_path, SETTINGS)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordFolder(tmp_path / "file" / "folder", SETTINGS)


def test_infinite_bounds_do_not_reach_the_file(tmp_path: Path) -> None:
    with RecordFolder(tmp_path, SETTINGS) as folder, pytest.raises(ValueError):
        folder.add(dataclasses.replace(RECORDS[0], bound=-math.inf))
    assert lines(tmp_path) == []


# -- the summary ----------------------------------------------------------------------------------------------


def test_summary_counts(tmp_path: Path) -> None:
    summary = Summary.of(RECORDS)
    assert (summary.samples, summary.natural, summary.adversarial, summary.certified) == (5, 0.6, 0.4, 0.2)
    assert summary.unknown == 2 and summary.seconds == 7.125
    assert {name: stage.decided for name, stage in summary.stages.items()} == {"natural": 1, "ibp": 1, "pgd": 1}
    assert summary.stages["pgd"].seconds == 5.0 and summary.stages["pgd"].falsified == 1
    summary.write(tmp_path)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["certified"] == 0.2 and content["stages"]["ibp"]["verified"] == 1
    with (tmp_path / "summary.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["adversarial"]) == 0.4 and row["pgd decided"] == "1" and float(row["pgd seconds"]) == 5.0


def test_summary_of_nothing() -> None:
    summary = Summary.of([])
    assert (summary.samples, summary.natural, summary.certified, summary.stages) == (0, 0.0, 0.0, {})


# -- certification of a split, and of a run ---------------------------------------------------------------------


class Stops:
    """IBP that is interrupted in its second call."""

    name, batch, calls = "test-stops", 4, 0

    def __init__(self, options: StageOptions) -> None:
        self._ibp = BoundStage(RELAXATIONS.get("ibp"), batch=4)

    def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
        Stops.calls += 1
        if Stops.calls == 2:
            raise KeyboardInterrupt
        return self._ibp(subject, samples, timeout=timeout)


@pytest.fixture
def stops() -> Iterator[str]:
    Stops.calls = 0
    STAGES.register("test-stops", Stops)
    yield "test-stops"
    del STAGES._items["test-stops"]


def small_split() -> Split:
    return Split(torch.rand(30, 1, 2, 2), torch.randint(3, (30,)))


def small_net() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        model[3].bias -= model(torch.full((1, 1, 2, 2), 0.5))[0]
        model[3].weight *= 3
    return model


def decided(folder: RecordFolder) -> dict[int, tuple[str, str]]:
    return {record.index: (record.verdict, record.stage) for record in folder.done.values()}


def test_a_killed_certification_resumes(tmp_path: Path) -> None:
    """Cut anywhere, the rest is done once, with the same verdicts, in whatever batches are left."""
    split, settings = small_split(), Settings(eps=0.05, stages=("ibp", "pgd", "crown"))
    cascade = Cascade(small_net(), split.batch([0])[0], settings)
    with RecordFolder(tmp_path / "whole", SETTINGS) as folder:
        for record in certify_split(cascade, split, folder, samples=30):
            assert folder.done[record.index] is record
        expected = decided(folder)
        assert len({verdict for verdict, _ in expected.values()}) >= 3
    content = (tmp_path / "whole" / "records.jsonl").read_bytes()
    for position in (0, 1, len(content) // 3, len(content) // 2, len(content) - 1, len(content)):
        write(tmp_path / "cut", [])
        (tmp_path / "cut" / "records.jsonl").write_bytes(content[:position])
        with RecordFolder(tmp_path / "cut", SETTINGS) as folder:
            before = len(folder.done)
            again = list(certify_split(cascade, split, folder, samples=30, batch_size=8))
            assert len(again) == 30 - before
            assert decided(folder) == expected
        assert sorted(line["index"] for line in lines(tmp_path / "cut")) == list(range(30))
        assert all((tmp_path / "cut" / str(r.counterexample)).exists() for r in again if r.verdict == "falsified")
        (tmp_path / "cut" / "records.jsonl").unlink()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with an untrained network whose output is centred, so that all verdicts occur."""
    config = TrainConfig(net="cnn3-tiny", limit=200, eps=0.02)
    folder = RunFolder(tmp_path / "run")
    folder.create(config)
    dataset = load_dataset("digits", limit=200)
    model = make_network(config, dataset)
    x, y = dataset.train.batch(range(len(dataset.train)))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    folder.save(folder.weights_file, {"model": model.state_dict()})
    return tmp_path / "run"


def test_a_run_is_certified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = certify_job(run, samples=40, stages="ibp, pgd,crown", eps=0.05)
    folder = run / "certify-eps0.05-test"
    files = {"settings.json", "records.jsonl", "summary.json", "summary.csv", "counterexamples"}
    assert files <= {file.name for file in folder.iterdir()}
    assert summary.samples == 40 and summary.natural > summary.adversarial >= summary.certified
    printed = capsys.readouterr().out
    assert "certified accuracy" in printed and f"{100 * summary.certified:.2f} %" in printed
    settings = json.loads((folder / "settings.json").read_text())
    named = {key: settings[key] for key in ("eps", "split", "samples", "dataset")}
    assert named == {"eps": 0.05, "split": "test", "samples": 40, "dataset": "digits"}
    dataset = load_dataset("digits", limit=200)
    model = make_network(TrainConfig(net="cnn3-tiny"), dataset)
    model.load_state_dict(torch.load(run / "weights.pt", weights_only=True)["model"])
    assert settings["weights"] == weights_hash(model)
    falsified = [line for line in lines(folder) if line["verdict"] == "falsified"]
    assert falsified
    for line in falsified:
        x, _ = dataset.test.batch([line["index"]])
        point, box = torch.from_numpy(np.load(folder / line["counterexample"])), linf_box(x, 0.05)
        assert bool((point >= box.lower[0]).all() and (point <= box.upper[0]).all())
        logits: Tensor = model(point[None])[0]
        assert int((logits >= logits[line["label"]]).sum()) >= 2
    before = (folder / "records.jsonl").read_bytes()
    assert certify_job(run, samples=40, stages="ibp,pgd,crown", eps=0.05) == summary
    assert (folder / "records.jsonl").read_bytes() == before


def test_an_interrupted_run_says_how_to_continue(run: Path, stops: str) -> None:
    arguments = {"samples": 20, "stages": stops, "eps": 0.0, "out": run / "out"}
    with pytest.raises(Interrupted, match=r"of 20 samples .*continue with `glscert certify run`"):
        certify_job(run, **arguments, command="glscert certify run")
    kept = [line["index"] for line in lines(run / "out")]
    assert 0 < len(kept) < 20
    summary = certify_job(run, **arguments)
    assert summary.samples == 20 and summary.unknown == 0
    assert sorted(line["index"] for line in lines(run / "out")) == list(range(20))
    assert [line["index"] for line in lines(run / "out")][: len(kept)] == kept


def with_other_weights(run: Path) -> None:
    state = torch.load(run / "weights.pt", weights_only=True)
    next(iter(state["model"].values())).add_(1e-3)
    RunFolder(run).save(run / "weights.pt", state)


def test_records_of_other_weights_are_refused(run: Path) -> None:
    certify_job(run, samples=2, stages="ibp")
    with_other_weights(run)
    with pytest.raises(ConfigError, match="of other weights"):
        certify_job(run, samples=2, stages="ibp")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"eps": 2.0}, ConfigError, "eps must be"),
        ({"samples": 0}, ConfigError, "samples >= 1"),
        ({"split": "tset"}, ConfigError, "unknown split 'tset'"),
        ({"stages": "ibp,,crwn"}, ConfigError, "did you mean 'crown'"),
        ({"stages": ","}, ConfigError, "one or more different stages"),
        ({"device": "warp:9"}, ConfigError, "device 'warp:9' cannot be used"),
        ({"net": "nowhere.py:make"}, ConfigError, "does not exist"),
    ],
)
def test_bad_options_are_one_clear_error(run: Path, options: dict, error: type[GLSError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        certify_job(run, **options)
    assert "\n" not in str(raised.value)
    assert not any(run.glob("certify*"))


def test_missing_and_damaged_runs(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        certify_job(tmp_path / "nothing")
    weights = (run / "weights.pt").read_bytes()
    (run / "weights.pt").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        certify_job(run)


def test_weights_hash_sees_everything() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    seen = {weights_hash(model)}
    for change in _changes(model):
        change()
        seen.add(weights_hash(model))
    assert len(seen) == 4


def _changes(model: nn.Sequential) -> list[Callable[[], object]]:
    return [
        lambda: model[0].weight.data.add_(1.0),
        lambda: model[1].running_mean.add_(1.0),
        lambda: model[1].double(),
    ]


def test_the_command_imports_nothing_heavy() -> None:
    """``glscert certify --help`` must answer at once."""
    code = (
        "import sys, importlib.util as u; from pathlib import Path; root = Path(sys.argv[1]);"
        "s = u.spec_from_file_location('glscert', root / '__init__.py', submodule_search_locations=[str(root)]);"
        "m = u.module_from_spec(s); sys.modules['glscert'] = m; s.loader.exec_module(m);"
        "import glscert.certify; print('torch' in sys.modules, 'gls_lirpa' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2] / "cli"
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]

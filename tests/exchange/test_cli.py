"""Export, networks from elsewhere and properties through the command line; workers; kill and resume."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from gls_lirpa.certification import Settings, StageOptions
from gls_lirpa.certification.cascade import Cascade
from gls_lirpa.certification.workers import CascadePool
from gls_lirpa.exchange.counterexample import Counterexample
from gls_lirpa.exchange.export import write_onnx
from gls_lirpa.exchange.onnx_model import read_onnx
from gls_lirpa.exchange.vnnlib import read_vnnlib
from gls_lirpa.jobs.exchange import export_job
from gls_lirpa.training import TrainConfig, load_run, train
from tests.helpers.command import Glscert
from tests.helpers.reporters import Quiet

EPS = 0.03
WIDER = 0.1
"""A radius at which some samples of the trained network are robust and some are not."""
SAMPLES = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exchange") / "run"
    config = TrainConfig(net="cnn3-tiny", eps=EPS, loss="natural", epochs=8, lr=2e-2, limit=800, eval_samples=8)
    train(config, folder, reporter=Quiet())
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    folder = trained.parent / "exported"
    export_job(trained, onnx=folder / "net.onnx", vnnlib=folder / "props", samples=SAMPLES, eps=WIDER)
    return folder


def verdicts(folder: Path) -> dict[int, str]:
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert len({record["index"] for record in records}) == len(records)
    return {record["index"]: record["verdict"] for record in records}


def results(file: Path) -> list[dict[str, str]]:
    with file.open() as stream:
        return list(csv.DictReader(stream))


def test_run_onnx_weights_and_properties_agree(trained: Path, exported: Path, glscert: Glscert, tmp_path: Path) -> None:
    common = ("--samples", SAMPLES, "--max-nodes", 200)
    network = ("--dataset", "digits", "--eps", WIDER)
    targets = {
        "run": (trained, "--eps", WIDER),
        "onnx": (exported / "net.onnx", *network),
        "weights": (trained / "weights.pt", "--net", "cnn3-tiny", *network),
    }
    found = {}
    for name, arguments in targets.items():
        answer = glscert("certify", *arguments, *common, "--out", tmp_path / name)
        assert answer.code == 0, answer.err
        found[name] = verdicts(tmp_path / name)
    assert found["run"] == found["onnx"] == found["weights"] and len(found["run"]) == SAMPLES
    assert {"verified", "falsified"} <= set(found["run"].values())
    for name in ("summary.json", "summary.csv", "records.csv", "cactus.png"):
        assert (tmp_path / "run" / name).stat().st_size > 0

    answer = glscert("certify", "--csv", exported / "props" / "instances.csv", "--out", tmp_path / "csv")
    assert answer.code == 0, answer.err
    rows = results(tmp_path / "csv" / "results.csv")
    expected = {"verified": "unsat", "falsified": "sat", "misclassified": "sat"}
    assert [row["verdict"] for row in rows] == [expected[found["run"][i]] for i in range(SAMPLES)]
    onnx = read_onnx(exported / "net.onnx")
    for row in rows:
        if row["verdict"] == "sat":
            point = Counterexample.parse((tmp_path / "csv" / row["counterexample"]).read_text())
            query = read_vnnlib(exported / "props" / row["vnnlib"])
            assert np.allclose(onnx.replay(point.x[None])[0], point.y, atol=1e-6)
            assert query.holds_at(point.x, point.y, tolerance=1e-4)
    again = glscert("certify", "--csv", exported / "props" / "instances.csv", "--out", tmp_path / "csv")
    assert again.out == "" and results(tmp_path / "csv" / "results.csv") == rows


TINY = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= X_0 -1))(assert (<= X_0 1))"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """relu(x) over [−1, 1], and properties with known answers."""
    folder = tmp_path_factory.mktemp("tiny")
    write_onnx(nn.Sequential(nn.Identity(), nn.ReLU()), (1,), folder / "net.onnx")
    for name, constraint in {"unsat": "(<= Y_0 -0.1)", "sat": "(>= Y_0 0.9)", "tie": "(<= Y_0 0)"}.items():
        (folder / f"{name}.vnnlib").write_text(TINY + f"(assert {constraint})")
    (folder / "unbounded.vnnlib").write_text("(declare-const X_0 Real)(declare-const Y_0 Real)(assert (<= X_0 1))")
    return folder


def test_answers_on_standard_output(tiny: Path, glscert: Glscert, tmp_path: Path) -> None:
    unsat = glscert("certify", tiny / "net.onnx", "--vnnlib", tiny / "unsat.vnnlib")
    assert (unsat.code, unsat.out) == (0, "unsat\n")
    file = tmp_path / "point.txt"
    sat = glscert("certify", tiny / "net.onnx", "--vnnlib", tiny / "sat.vnnlib", "--witness", file)
    assert sat.code == 0 and sat.out == "sat\n"
    shown = glscert("certify", tiny / "net.onnx", "--vnnlib", tiny / "sat.vnnlib", "--witness", "-")
    head, _, text = shown.out.partition("\n")
    assert head == "sat" and text == file.read_text()
    both = glscert("certify", tiny / "net.onnx", "--vnnlib", tiny / "sat.vnnlib", "--result", file)
    assert both.out == "sat\n" and file.read_text() == "sat\n" + text
    silent = glscert("certify", tiny / "net.onnx", "--vnnlib", tiny / "sat.vnnlib")
    assert silent.out == "sat\n" and "--witness" in silent.err
    point = Counterexample.parse(text)
    assert 0.9 <= point.x[0] <= 1 and point.y[0] == pytest.approx(point.x[0])
    tie = glscert("certify", tiny / "net.onnx", "--vnnlib", tiny / "tie.vnnlib")
    assert tie.out.startswith("sat\n")
    unknown = glscert("certify", tiny / "net.onnx", "--vnnlib", tiny / "unsat.vnnlib", "--stages", "pgd")
    assert unknown.out == "unknown\n" and "pgd" in unknown.err
    late = glscert("certify", tiny / "net.onnx", "--vnnlib", tiny / "unsat.vnnlib", "--timeout", "1e-9")
    assert late.out == "timeout\n"


def test_a_broken_row_does_not_stop_the_others(tiny: Path, glscert: Glscert, tmp_path: Path) -> None:
    table = tmp_path / "instances.csv"
    names = ["unsat", "missing", "unbounded", "sat"]
    net = os.path.relpath(tiny, tmp_path)
    lines = [f"{net}/net.onnx,{net}/{name}.vnnlib,30" for name in names]
    table.write_text("\n".join([*lines, f"{net}/net.onnx,{net}/sat.vnnlib,soon", f"{net}/no.onnx,{net}/sat.vnnlib,9"]))
    answer = glscert("certify", "--csv", table)
    assert answer.code == 0
    file = tmp_path / "instances-results" / "results.csv"
    rows = results(file)
    assert [row["verdict"] for row in rows] == ["unsat", "error", "error", "sat", "error", "error"]
    assert "X_0 has no lower bound" in rows[2]["reason"] and "expected a timeout" in rows[4]["reason"]
    # As if killed in the middle of the last line: what is whole is kept, errors are tried again.
    kept = file.read_text().splitlines()
    file.write_text("\n".join([*kept[:2], kept[4][:-5]]))
    answer = glscert("certify", "--csv", table)
    assert [line.split()[0] for line in answer.out.splitlines()] == ["error", "error", "sat", "error", "error"]
    assert sorted(row["row"] for row in results(file)) == ["1", "2", "3", "4", "5", "6"]
    lines = [line.split(",") for line in (file.parent / "vnncomp.csv").read_text().splitlines()]
    assert [line[0] for line in lines] == [tmp_path.name] * 6 and [line[3] for line in lines] == ["0"] * 6
    assert [line[4] for line in lines] == [row["verdict"] for row in rows] and all(
        float(line[5]) >= 0 for line in lines
    )
    assert glscert("certify", "--csv", table, "--stages", "ibp").code == 2


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "expected a run folder"),
    "missing network": (("no.onnx", "--vnnlib", "sat.vnnlib"), "No such file"),
    "missing property": (("net.onnx", "--vnnlib", "no.vnnlib"), "No such file"),
    "unbounded": (("net.onnx", "--vnnlib", "unbounded.vnnlib"), "X_0 has no lower bound"),
    "no data": (("net.onnx",), "add --dataset and --eps"),
    "no radius": (("net.onnx", "--dataset", "digits"), "takes inputs of shape"),
    "radius of a property": (("net.onnx", "--vnnlib", "sat.vnnlib", "--eps", "0.1"), "--eps cannot be used"),
    "both": (("--vnnlib", "sat.vnnlib", "--csv", "x.csv"), "exclude each other"),
    "no table": (("--csv", "x.csv"), "cannot be read"),
    "network beside a table": (("net.onnx", "--csv", "x.csv"), "names the networks itself"),
    "stage": (("net.onnx", "--vnnlib", "sat.vnnlib", "--stages", "crwn"), "did you mean 'crown'"),
    "timeout": (("net.onnx", "--vnnlib", "sat.vnnlib", "--timeout", "0"), "expected a timeout > 0"),
    "nodes": (("net.onnx", "--vnnlib", "sat.vnnlib", "--max-nodes", "0"), "max_nodes"),
    "setting": (("net.onnx", "--vnnlib", "sat.vnnlib", "--bab", "iteration=3"), "did you mean 'iterations'"),
    "setting's value": (("net.onnx", "--vnnlib", "sat.vnnlib", "--bab", "iterations=0"), "iterations >= 1, got 0"),
    "property of a run": (("sat.vnnlib", "--vnnlib", "sat.vnnlib"), "needs a network in an .onnx file"),
    "weights without a network": (("sat.vnnlib", "--dataset", "digits", "--eps", "0.1"), "add --net"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(tiny: Path, glscert: Glscert, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tiny)
    arguments, message = BAD[name]
    answer = glscert("certify", *arguments)
    assert answer.code == 2 and answer.out == ""
    assert answer.err.startswith("glscert: ") and answer.err.count("\n") == 1 and message in answer.err


@pytest.mark.parametrize("option", ["--witness", "--result"])
def test_what_is_decided_is_not_overwritten(tiny: Path, glscert: Glscert, option: str) -> None:
    network, prop = tiny / "net.onnx", next(tiny.glob("*.vnnlib"))
    for file in (network, prop):
        before = file.read_bytes()
        result = glscert("certify", network, "--vnnlib", prop, option, file)
        assert result.code == 2 and "would overwrite what is to be decided" in result.err
        assert file.read_bytes() == before


def test_export_asks_before_overwriting(trained: Path, exported: Path, glscert: Glscert, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in exported.rglob("*.*") if file.is_file()}
    other = ("--onnx", tmp_path / "net.onnx", "--vnnlib", exported / "props")
    for arguments in (("--onnx", exported / "net.onnx"), other):
        answer = glscert("export", trained, *arguments)
        assert answer.code == 2 and "exists already" in answer.err
    assert {file: file.read_bytes() for file in before} == before


def test_killed_and_resumed(trained: Path, glscert: Glscert, tmp_path: Path) -> None:
    """SIGKILL at some moment: no sample is lost, none is done twice, and the verdicts are the same."""
    limits = ("--stages", "crown,bab", "--max-nodes", 50, "--samples", 20)
    arguments = [str(part) for part in ("certify", trained, *limits, "--out", tmp_path / "out")]
    command = [sys.executable, "-m", "glscert", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    file = tmp_path / "out" / "records.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if file.exists() and file.read_bytes().count(b"\n") >= 6:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    survived = verdicts(tmp_path / "out") if file.read_bytes().endswith(b"\n") else {}
    assert glscert(*arguments).code == 0
    resumed = verdicts(tmp_path / "out")
    assert sorted(resumed) == list(range(20)) and survived.items() <= resumed.items()
    settings = Settings(EPS, ("crown", "bab"), options=StageOptions(max_nodes=50))
    run = load_run(trained)
    x, labels = run.dataset.test.batch(list(range(20)))
    assert {record.index: record.verdict for record in Cascade(run.model, x, settings).run(x, labels)} == resumed


def test_workers_agree_and_survive_a_kill(trained: Path, tmp_path: Path) -> None:
    run = load_run(trained)
    settings = Settings(WIDER, ("ibp", "pgd", "crown", "bab"), options=StageOptions(max_nodes=50))
    indices = list(range(3, 27))
    x, labels = run.dataset.test.batch(indices)
    alone = {indices[record.index]: record for record in Cascade(run.model, x, settings).run(x, labels)}
    found = {}
    for record in CascadePool(run.model, settings, workers=2, folder=tmp_path).run(run.dataset.test, indices):
        assert record.index not in found
        if not found:
            os.kill(_a_worker(), signal.SIGKILL)
        found[record.index] = record
    assert {i: r.verdict for i, r in found.items()} == {i: r.verdict for i, r in alone.items()}


def _a_worker() -> int:
    """A process of this test's own Ray that runs a CascadeWorker."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_text()
        except OSError:
            continue
    for pid, name in names.items():
        ancestors, up = set(), pid
        while up in parents and up not in ancestors:
            ancestors.add(up)
            up = parents[up]
        if name.startswith("ray::CascadeWorker") and os.getpid() in ancestors:
            return pid
    raise AssertionError("no worker is running")

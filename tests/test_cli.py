"""The command line end to end on digits, and one clear line for every kind of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.command import Glscert

SMALL = ("--net", "cnn3-tiny", "--limit", 150, "--epochs", 2, "--eps", 0.02, "--eval-samples", 32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    command = [
        sys.executable,
        "-m",
        "glscert",
        "train",
        "--out",
        out,
        *SMALL,
        "--relaxation",
        "ibp",
        "--estimator",
        "grad",
    ]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return out


def test_train_certify_and_certify_again(trained: Path, glscert: Glscert) -> None:
    files = {path.name for path in trained.iterdir()}
    assert {"config.json", "versions.json", "metrics.jsonl", "weights.pt", "summary.json", "curve.png"} <= files
    arguments = ("certify", trained, "--samples", 20, "--stages", "ibp,pgd,crown-ibp,crown")
    first = glscert(*arguments)
    assert first.code == 0, first.err
    (folder,) = trained.glob("certify-*")
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(20))
    again = glscert(*arguments)
    assert again.code == 0
    assert len((folder / "records.jsonl").read_text().splitlines()) == 20


def test_resume_of_a_finished_run_changes_nothing(trained: Path, glscert: Glscert) -> None:
    before = (trained / "metrics.jsonl").read_text()
    weights = torch.load(trained / "weights.pt", weights_only=True)["model"]
    assert glscert("train", "--out", trained, "--resume").code == 0
    assert (trained / "metrics.jsonl").read_text() == before
    after = torch.load(trained / "weights.pt", weights_only=True)["model"]
    assert all(torch.equal(weights[name], after[name]) for name in weights)


def test_doctor_really_computes_bounds(glscert: Glscert) -> None:
    result = glscert("doctor")
    assert result.code == 0
    for name in ("ibp", "hbox", "crown-ibp", "crown", "alpha-crown"):
        assert f"bounds: {name}" in result.out


def test_doctor_says_which_way_a_network_is_bounded(glscert: Glscert, tmp_path: Path) -> None:
    assert "rows of unstable neurons: affine layers and ReLUs alone" in glscert("doctor", "--net", "cnn3-tiny").out
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def make(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Sigmoid(), nn.Linear(8, classes))\n"
    )
    found = glscert("doctor", "--net", f"{file}:make")
    assert found.code == 0 and "bounds by auto_LiRPA" in found.out and "Sigmoid" in found.out
    assert glscert("doctor", "--net", "nope").code == 2


@pytest.mark.parametrize("command", ["", "bench", "collect", "config", "doctor", "zoo"])
def test_help_imports_nothing_heavy(command: str) -> None:
    """But for the commands whose help is made from the tables of methods, which come with torch."""
    code = f"""
import sys
sys.argv = ["glscert", *{command.split()}, "--help"]
from glscert.__main__ import run
try:
    run()
except SystemExit:
    pass
print(sorted({{"torch", "gls_lirpa", "ray", "numpy"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert "Usage: glscert" in result.stdout


BAD = {
    "command": (("trian",), "did you mean 'train'"),
    "relaxation": (("train", "--relaxation", "crwn"), "did you mean 'crown'"),
    "estimator": (("train", "--estimator", "rsg"), "did you mean 'rgs'"),
    "loss": (("train", "--loss", "sabrr"), "did you mean 'sabr'"),
    "net": (("train", "--net", "cnn4"), "unknown network 'cnn4'"),
    "dataset": (("train", "--dataset", "minst"), "did you mean 'mnist'"),
    "negative eps": (("train", "--eps", "-0.1"), "eps must be a number in [0, 1]"),
    "nan eps": (("train", "--eps", "nan"), "eps must be a number in [0, 1]"),
    "large eps": (("train", "--eps", "1.5"), "eps must be a number in [0, 1]"),
    "text eps": (("train", "--eps", "2/x"), "not a number or a fraction"),
    "no data": (("train", "--dataset", "mnist", "--data-root", "nowhere", "--eps", "0.1"), "nowhere"),
    "no config": (("train", "--config", "nowhere.json"), "cannot be read"),
    "missing run": (("certify", "nowhere"), "nowhere"),
    "alpha-crown without pgpe": (("train", "--relaxation", "alpha-crown"), "use --estimator pgpe"),
    "resume without out": (("train", "--resume"), "--resume needs --out"),
    "unknown option": (("train", "--epsilon", "0.1"), "No such option"),
    "missing network file": (("train", "--net", "nowhere.py:make"), "does not exist"),
    "device": (("train", "--device", "cuda:9"), "device 'cuda:9' cannot be used here"),
    "large seed": (("train", "--seed", "9" * 30), "0 <= seed < 2**61 - 1"),
    "negative seed": (("certify", "zoo:digits-cnn3-crown-rgs", "--seed", "-1"), "0 <= seed < 2**61 - 1"),
    "network file without factory": (("train", "--net", "net.py"), "path/to/file.py:factory"),
    "data of a study": (("tune", "--dataset", "folder", "--eps", "0.1", "--data-root", "nowhere"), "nowhere"),
    "missing study": (("bench", "fronts", "--study", "nowhere"), "'nowhere' is not a study: No such file"),
    "sigma of grad": (("train", "--estimator", "grad", "--sigma", "0.1"), "--sigma is an option of pgpe, rgs"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(
    case: str, glscert: Glscert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[case]
    result = glscert(*arguments)
    assert result.code != 0
    lines = [line for line in result.err.splitlines() if line.strip()]
    assert len(lines) == 1, result.err
    assert lines[0].startswith("glscert: ")
    assert message in lines[0]
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_version_is_told(trained: Path, glscert: Glscert, tmp_path: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    for changed, message in (
        ({**config, "brand_new": 3}, "unknown configuration key 'brand_new'"),
        ({**config, "relaxation": "newest"}, "unknown relaxation 'newest'"),
        ([config], "is damaged: expected one JSON object"),
    ):
        run = tmp_path / message[:12]
        run.mkdir(exist_ok=True)
        (run / "versions.json").write_text('{"gls-lirpa": "99.0"}')
        (run / "config.json").write_text(json.dumps(changed))
        answer = glscert("certify", run)
        assert answer.code == 2 and answer.err.count("\n") == 1 and message in answer.err, answer.err
        assert isinstance(changed, list) or "made by gls-lirpa 99.0, this is " in answer.err
        assert str(run) in answer.err


def test_places_that_cannot_be_written_are_one_line(trained: Path, glscert: Glscert, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    for arguments, message in (
        (("train", *SMALL, "--out", file), "is a file, not a folder: choose another --out"),
        (("train", *SMALL, "--out", file / "run"), "Not a directory"),
        (("export", trained, "--onnx", file / "net.onnx"), "cannot be read or written: "),
    ):
        answer = glscert(*arguments)
        assert answer.code == 2 and answer.err.count("\n") == 1 and message in answer.err, answer.err
    assert file.read_text() == "kept"


def test_a_suite_whose_runs_failed_does_not_end_well(glscert: Glscert, tmp_path: Path) -> None:
    answer = glscert(
        "bench", "tightness", "--data-root", tmp_path / "nowhere", "--out", tmp_path / "out", "--workers", 1
    )
    assert answer.code == 2 and (tmp_path / "out" / "report.html").exists()
    assert answer.err.splitlines()[-1].startswith("glscert: 1 of 1 runs failed")


def test_debug_shows_the_traceback(glscert: Glscert) -> None:
    with pytest.raises(Exception, match="unknown relaxation"):
        glscert("train", "--relaxation", "crwn", "--debug")


def test_existing_folders_and_foreign_weights(trained: Path, glscert: Glscert, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in trained.iterdir() if path.is_file()}
    result = glscert("train", "--out", trained, *SMALL)
    assert result.code != 0
    assert "not empty" in result.err
    assert {path: path.read_bytes() for path in trained.iterdir() if path.is_file()} == before
    result = glscert("train", "--out", tmp_path / "new", *SMALL, "--init-from", trained, "--net", "cnn3")
    assert result.code != 0
    assert "another network" in result.err


def test_truncated_weights(trained: Path, glscert: Glscert, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((trained / "config.json").read_text())
    (broken / "weights.pt").write_bytes((trained / "weights.pt").read_bytes()[:500])
    result = glscert("certify", broken)
    assert result.code != 0
    assert "cannot be loaded" in result.err


def test_configuration_that_executes_code_is_refused(glscert: Glscert, tmp_path: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\ndef make(): pass\n")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"net": f"{evil}:make"}))
    result = glscert("train", "--config", config, "--out", tmp_path / "run")
    assert result.code != 0
    assert "asks for code to be executed" in result.err
    assert not (tmp_path / "executed").exists()

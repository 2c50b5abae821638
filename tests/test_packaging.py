"""The package as others install it: a wheel in a fresh environment, and one without the optional pieces."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
QUICK = ["--net", "cnn3-tiny", "--relaxation", "ibp", "--epochs", "1", "--limit", "64", "--eval-samples", "20"]
HEAVY = ("ray", "evotorch", "onnx", "onnxruntime", "matplotlib", "highspy", "pandas", "tensorboard", "auto_LiRPA")

WITHOUT = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder
class Others:
    find_distributions = PathFinder.find_distributions
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Others
from glscert.__main__ import run
answers = []
for arguments in {commands!r}:
    sys.argv, code, error = ["glscert", *arguments], 0, io.StringIO()
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            run()
    except SystemExit as stop:
        code = stop.code
    answers.append([code, error.getvalue()])
print(json.dumps(answers))
"""
"""Runs commands as if some packages were not installed; prints each one's exit code and standard error."""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a fresh environment with the wheel, and this environment's libraries."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("gls_lirpa", "cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    (packages,) = (folder / "env" / "lib").glob("*/site-packages")
    # A path file is not read recursively: an editable installation of this package stays invisible.
    (packages / "libraries.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--ignore-installed", str(wheel)], check=True, capture_output=True)
    return python.parent


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True)


def test_wheel_works_by_itself(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import gls_lirpa, glscert; print(gls_lirpa.__file__)", cwd=tmp_path)
    assert str(installed.parent) in where.stdout, where.stderr
    for arguments in (["doctor"], ["train", "--out", "run", *QUICK], ["certify", "run", "--samples", "5"]):
        answer = run(installed / "glscert", *arguments, cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "run" / "weights.pt").exists()
    assert (tmp_path / "run" / "certify-eps0.1-test" / "summary.json").exists()


def without(names: tuple[str, ...], commands: list[list[str]], python: Path, cwd: Path) -> list[tuple[int, str]]:
    answer = run(python, "-c", WITHOUT.format(names=names, commands=commands), cwd=cwd)
    assert answer.returncode == 0, answer.stderr
    return [(code, error) for code, error in json.loads(answer.stdout)]


def test_core_works_without_the_extras_and_names_them(installed: Path, tmp_path: Path) -> None:
    names = ("ray", "evotorch", "onnx", "onnx2torch", "onnxruntime", "vnnlib", "matplotlib", "highspy", "pandas")
    train, certify = ["train", "--out", "run", *QUICK], ["certify", "run", "--samples", "5"]
    refused = {
        "'evotorch>=0.6' 'ray>=2.9'": ["train", "--out", "other", *QUICK, "--actors", "2"],
        "'onnx>=1.15' 'onnx2torch>=1.5.13' 'onnxruntime>=1.17' 'vnnlib>=1.0.2'": ["export", "run", "--onnx", "n.onnx"],
    }
    answers = without(names, [train, certify, *refused.values()], installed / "python", tmp_path)
    assert [code for code, _ in answers] == [0, 0, 2, 2], answers
    for packages, (_, error) in zip(refused, answers[2:], strict=True):
        assert error.endswith(f"which is not installed: pip install {packages}\n") and error.count("\n") == 1
    assert not (tmp_path / "run" / "curve.png").exists()


def test_a_missing_auto_lirpa_is_cured_by_one_command(installed: Path, tmp_path: Path) -> None:
    command = ["train", "--out", "run", *QUICK]
    ((code, error),) = without(("auto_LiRPA",), [command], installed / "python", tmp_path)
    assert code == 2 and error.count("\n") == 1 and "pip install --no-deps auto_LiRPA==0.3" in error
    assert not (tmp_path / "run").exists()


def test_importing_loads_nothing_heavy() -> None:
    code = f"import sys, gls_lirpa; gls_lirpa.CertifiedLoss, gls_lirpa.RGS; print(set({HEAVY}) & sys.modules.keys())"
    answer = run(sys.executable, "-c", code, cwd=ROOT)
    assert answer.stdout.strip() == "set()", answer.stdout + answer.stderr


def test_every_package_and_data_file_is_in_the_wheel(installed: Path) -> None:
    (wheel,) = installed.parents[1].glob("*.whl")
    listed = set(zipfile.ZipFile(wheel).namelist())
    for file in (ROOT / "gls_lirpa").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert str(file.relative_to(ROOT)) in listed
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert {"actors", "onnx", "plots", "milp", "docs", "tensorboard"} <= set(config["options.extras_require"])

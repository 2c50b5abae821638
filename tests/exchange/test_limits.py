"""Strict inequalities, VNN-LIB 2.0, limits that hold, and the competition's scripts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gls_lirpa.errors import GLSError
from gls_lirpa.exchange.counterexample import Counterexample
from gls_lirpa.exchange.deadline import GRACE, TimeLimit, time_limit
from gls_lirpa.exchange.export import write_onnx
from gls_lirpa.exchange.instances import timed_answer
from gls_lirpa.exchange.onnx_model import OnnxNetwork, read_onnx
from gls_lirpa.exchange.query import Limits, decide
from gls_lirpa.exchange.vnnlib import parse_vnnlib, read_vnnlib
from gls_lirpa.exchange.vnnlib2 import parse_vnnlib2
from tests.helpers.vnnlib import declared

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "vnncomp"


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> OnnxNetwork:
    file = tmp_path_factory.mktemp("strict") / "net.onnx"
    write_onnx(nn.ReLU(), (1,), file)
    return read_onnx(file)


def _relu_of(lower: str, upper: str, output: str) -> str:
    return declared(1, 1) + f"(assert ({lower}))(assert ({upper}))(assert ({output}))"


STRICT = {
    "beyond equality": (">= X_0 -1", "<= X_0 1", "> Y_0 0.5", "sat"),
    "equality at the centre": (">= X_0 -1", "<= X_0 1", "> Y_0 0", "sat"),
    "never": (">= X_0 -1", "<= X_0 1", "< Y_0 -0.1", "unsat"),
    "equality alone": (">= X_0 -1", "<= X_0 1", "> Y_0 1", "unknown"),
    "equality allowed": (">= X_0 -1", "<= X_0 1", ">= Y_0 1", "sat"),
    "open box": ("> X_0 -1", "< X_0 1", ">= Y_0 0.999", "sat"),
    "open box, closed proof": ("> X_0 -1", "< X_0 1", ">= Y_0 1.01", "unsat"),
    "empty box": ("> X_0 0.5", "<= X_0 0.5", ">= Y_0 0", "unsat"),
    "one number left": (">= X_0 0.5", "<= X_0 0.5", ">= Y_0 0.5", "sat"),
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_inequalities(relu: OnnxNetwork, name: str) -> None:
    *parts, verdict = STRICT[name]
    query = parse_vnnlib(_relu_of(*parts))
    answer = decide(relu, query)
    assert answer.verdict == verdict
    if answer.counterexample is not None:
        x, y = answer.counterexample.x[0], answer.counterexample.y[0]
        compare = {">": np.greater, "<": np.less, ">=": np.greater_equal, "<=": np.less_equal}
        for constraint in parts:
            symbol, variable, bound = constraint.split()
            assert compare[symbol](x if variable == "X_0" else y, float(bound)), constraint


def test_strict_ends_do_not_belong_to_the_box() -> None:
    query = parse_vnnlib(_relu_of("> X_0 0", "< X_0 1", "< Y_0 2"))
    (case,) = query.cases
    assert (case.lower.tolist(), case.upper.tolist()) == ([0.0], [1.0])  # what a proof covers
    y = np.array([1.0])
    assert [query.holds_at(np.array([x]), y) for x in (0.0, 1e-300, 0.5, 1.0)] == [False, True, True, False]
    assert not query.holds_at(np.array([0.5]), np.array([2.0]), tolerance=1e-4)
    same = parse_vnnlib(_relu_of("> X_0 0", "<= X_0 1", "< Y_0 2") + "(assert (>= X_0 0))(assert (< X_0 1))")
    assert not same.cases[0].holds(np.array([0.0])) and not same.cases[0].holds(np.array([1.0]))


VERSION_2 = """; a comment
(vnnlib-version <2.0>)
(declare-network N
    (declare-input In float32 [2,2])
    (declare-output Out float32 [1,3])
)
(assert (or (and (>= In[0,0] 0.0) (<= In[0,0] 0.25)) (and (>= In[0,0] 0.75) (< In[0,0] 1.0))))
(assert (and (>= In[0,1] -1.0) (<= In[0,1] 0.1) (== In[1,0] 0.5) (>= In[1,1] 0.0) (<= In[1,1] 2.0)))
(assert (or (<= (+ (* 2.0 Out[0,0]) 1.0) Out[0,2]) (> (- Out[0,1] Out[0,0]) 3.0)))
"""

VERSION_1 = (
    declared(4, 3)
    + """
(assert (or (and (>= X_0 0.0) (<= X_0 0.25)) (and (>= X_0 0.75) (< X_0 1.0))))
(assert (and (>= X_1 -1.0) (<= X_1 0.1) (= X_2 0.5) (>= X_3 0.0) (<= X_3 2.0)))
(assert (or (<= (+ (* 2.0 Y_0) 1.0) Y_2) (> (- Y_1 Y_0) 3.0)))
"""
)


def test_both_versions_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "two.vnnlib").write_text(VERSION_2)
    new, old = read_vnnlib(tmp_path / "two.vnnlib"), parse_vnnlib(VERSION_1)
    assert (new.inputs, new.outputs, len(new.cases)) == (4, 3, 2) == (old.inputs, old.outputs, len(old.cases))
    for ours, theirs in zip(new.cases, old.cases, strict=True):
        for first, second in zip(ours.inner(), theirs.inner(), strict=True):
            assert np.array_equal(first, second)
        for mine, other in zip(ours.unsafe, theirs.unsafe, strict=True):
            assert all(np.array_equal(getattr(mine, n), getattr(other, n)) for n in ("rows", "bounds", "strict"))


def test_unequal_is_either_side() -> None:
    query = parse_vnnlib2(
        "(vnnlib-version <2.0>)(declare-network N (declare-input X float32 [1])(declare-output Y float32 [1]))"
        "(assert (>= X[0] 0.0))(assert (<= X[0] 1.0))(assert (!= Y[0] 2.0))"
    )
    assert [query.holds_at(np.array([0.0]), np.array([y])) for y in (1.9, 2.0, 2.1)] == [True, False, True]


BAD_2 = {
    "version": (VERSION_2.replace("<2.0>", "<3.0>"), "Expected VNNLib version"),
    "index": (VERSION_2.replace("Out[0,2]", "Out[0,3]"), "out of bounds"),
    "symbol": (VERSION_2.replace("Out[0,2]", "Other[0,2]"), "Other"),
    "cut off": (VERSION_2[:-40], "syntax error"),
    "unbounded": (VERSION_2.replace("(<= In[1,1] 2.0)", ""), "X_3 has no upper bound"),
    "nonlinear": (VERSION_2.replace("(* 2.0 Out[0,0])", "(* Out[0,1] Out[0,0])"), "linear term"),
    "mixed": (VERSION_2.replace("Out[0,2])", "In[0,0])"), "one input with constant bounds"),
    "deep": (VERSION_2 + "(assert " + "(and " * 200_000, "nested"),
    "two networks": (
        VERSION_2 + "(declare-network M (declare-input A float32 [1])(declare-output B float32 [1]))",
        "syntax error|2 networks",
    ),
    "two inputs": (VERSION_2.replace("(declare-output", "(declare-input Z float32 [1])(declare-output"), "2 inputs"),
}


@pytest.mark.parametrize("name", BAD_2)
def test_what_is_wrong_with_version_2_is_one_line(tmp_path: Path, name: str) -> None:
    text, message = BAD_2[name]
    (tmp_path / "bad.vnnlib").write_text(text)
    with pytest.raises(GLSError, match=message) as caught:
        read_vnnlib(tmp_path / "bad.vnnlib")
    assert "\n" not in str(caught.value) and "bad.vnnlib" in str(caught.value) and len(str(caught.value)) < 600


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of 3,072 inputs."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("image") / "net.onnx"
    write_onnx(nn.Sequential(nn.Flatten(), nn.Linear(3072, 20), nn.ReLU(), nn.Linear(20, 10)), (3, 32, 32), file)
    return file


def _boxed(number: int) -> str:
    return declared(number, 10) + "".join(f"(assert (>= X_{i} 0.4))(assert (<= X_{i} 0.6))\n" for i in range(number))


def test_fifty_thousand_disjuncts_end_in_time(image: Path) -> None:
    """No disjunct can be proven by IBP, none has a counterexample that is easy to find."""
    parts = "".join(f"(and (>= Y_{i % 10} {50 + i / 1000}) (<= Y_{(i + 1) % 10} {-50 - i})) " for i in range(50_000))
    property_file = image.with_name("many.vnnlib")
    property_file.write_text(_boxed(3072) + f"(assert (or {parts}))")
    started = time.monotonic()
    answer = timed_answer(image, property_file, Limits(timeout=4.0))
    assert answer.verdict in ("timeout", "unsat")
    # The limit, its grace and one operation that was under way; without the limit it takes minutes.
    assert time.monotonic() - started < 4.0 + GRACE + 6.0


def test_many_disjuncts_are_all_decided(relu: OnnxNetwork) -> None:
    """More than one network decides together: a violation of any one is found, and none is forgotten."""
    box = declared(1, 1) + "(assert (>= X_0 -1))(assert (<= X_0 1))"
    never = [f"(and (>= Y_0 {2 + i / 1000}))" for i in range(700)]
    limits = Limits(stages=("ibp", "pgd", "crown"))
    assert decide(relu, parse_vnnlib(box + f"(assert (or {' '.join(never)}))"), limits).verdict == "unsat"
    some = [*never[:600], "(and (>= Y_0 0.9))", *never[600:]]
    assert decide(relu, parse_vnnlib(box + f"(assert (or {' '.join(some)}))"), limits).verdict == "sat"


def test_the_limit_passes_through_what_catches_exceptions() -> None:
    started = time.monotonic()
    with pytest.raises(TimeLimit), time_limit(0.05), contextlib.suppress(Exception):  # as a library may do
        while time.monotonic() - started < 10:
            sum(range(1000))
    assert time.monotonic() - started >= 0.05
    with time_limit(0.01):
        pass
    time.sleep(0.4)  # nothing is raised any more


def _instance(tmp_path: Path, image: Path, constraint: str, *more: str) -> tuple[subprocess.CompletedProcess[str], str]:
    (tmp_path / "p.vnnlib").write_text(_boxed(3072) + f"(assert {constraint})")
    result = tmp_path / "result.txt"
    environment = os.environ | {"GLSCERT_PYTHON": sys.executable}
    arguments = ["v1", "test", str(image), str(tmp_path / "p.vnnlib")]
    subprocess.run([SCRIPTS / "prepare_instance.sh", *arguments], check=True)
    done = subprocess.run(
        [SCRIPTS / "run_instance.sh", *arguments, str(result), *(more or ("60",))],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    return done, result.read_text()


def test_scripts_of_the_competition(tmp_path: Path, image: Path) -> None:
    done, result = _instance(tmp_path, image, "(<= Y_0 Y_0)")
    head, _, text = result.partition("\n")
    assert done.returncode == 0 and done.stdout == "sat\n" and head == "sat"
    point = Counterexample.parse(text)
    assert point.x.shape == (3072,) and bool(((point.x >= 0.4) & (point.x <= 0.6)).all())
    assert np.allclose(read_onnx(image).replay(point.x[None])[0], point.y)
    done, result = _instance(tmp_path, image, "(>= Y_0 1000.0)")
    assert (done.returncode, done.stdout, result) == (0, "unsat\n", "unsat\n")
    done, result = _instance(tmp_path, image, "(>= Y_0")
    assert done.returncode == 2 and result == "error\n" and "Traceback" not in done.stderr


def test_scripts_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    missing = ["v1", "test", str(tmp_path / "no.onnx"), str(tmp_path / "no.vnnlib")]
    assert subprocess.run([SCRIPTS / "prepare_instance.sh", *missing], capture_output=True).returncode == 1
    for script in ("install_tool.sh", "prepare_instance.sh", "run_instance.sh"):
        refused = subprocess.run([SCRIPTS / script, "v2"], capture_output=True, text=True)
        assert refused.returncode == 1 and refused.stderr.startswith("usage: ")

"""VNN-LIB files: what they mean, as a formula and as part of a network."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.errors import DataError, GLSError
from gls_lirpa.exchange.cases import Conjunction
from gls_lirpa.exchange.counterexample import Counterexample
from gls_lirpa.exchange.export import property_text
from gls_lirpa.exchange.property import enclosing_box, property_network
from gls_lirpa.exchange.vnnlib import parse_vnnlib, read_vnnlib
from tests.helpers.vnnlib import declared

BOX = "(assert (and (>= X_0 -1) (<= X_0 1)))"


def test_numbers_comments_and_terms() -> None:
    query = parse_vnnlib(
        "; a comment (with parentheses\n"
        + declared(2, 3)
        + """
        (assert (<= X_0 +2.5E-1)) ; scientific
        (assert (>= X_0 -.5))(assert (<= -1e-3 X_1))
        (assert (>= 0.75 X_1))
        (assert (<= (+ Y_0 (* 2.0 Y_1) (- Y_2) 1) (* -3 (- Y_1 2) )))
        """
    )
    (case,) = query.cases
    assert case.lower.tolist() == [-0.5, -1e-3] and case.upper.tolist() == [0.25, 0.75]
    (unsafe,) = case.unsafe
    assert unsafe.rows.tolist() == [[1.0, 5.0, -1.0]] and unsafe.bounds.tolist() == [5.0]


def test_nested_and_or() -> None:
    query = parse_vnnlib(
        declared(1, 2)
        + BOX
        + "(assert (or (and (<= Y_0 0) (or (<= Y_1 1) (and (>= Y_1 2) (<= Y_0 -1)))) (>= Y_0 Y_1)))(assert (<= Y_1 9))"
    )
    (case,) = query.cases
    expected = [[([1, 0], 0), ([0, 1], 1)], [([1, 0], 0), ([0, -1], -2), ([1, 0], -1)], [([-1, 1], 0)]]
    found = [
        {(tuple(row), float(bound)) for row, bound in zip(unsafe.rows.tolist(), unsafe.bounds, strict=True)}
        for unsafe in case.unsafe
    ]
    assert found == [{(tuple(row), float(bound)) for row, bound in [*rows, ([0, 1], 9)]} for rows in expected]


def test_formula_against_direct_evaluation() -> None:
    """The network's class 0 wins exactly where Python's own and/or finds nothing unsafe."""
    generator = np.random.default_rng(0)
    for _ in range(40):
        text, meaning = _random_formula(generator, depth=3)
        query = parse_vnnlib(declared(1, 3) + BOX + f"(assert {text})")
        points = generator.integers(-4, 5, size=(200, 3)) / 2
        expected = [bool(eval(meaning, {"y": y})) for y in points]
        assert [query.holds_at(np.zeros(1), y) for y in points] == expected
        unsafe = query.cases[0].unsafe
        outputs = property_network(nn.Identity(), unsafe, torch.float64)(torch.from_numpy(points))
        assert (outputs[:, 0] == 0).all()
        assert (outputs[:, 1:] >= 0).any(1).tolist() == expected


def _random_formula(generator: np.random.Generator, depth: int) -> tuple[str, str]:
    if depth == 0 or generator.random() < 0.3:
        i, j = generator.integers(0, 3, size=2)
        if generator.random() < 0.5:
            bound = float(generator.integers(-3, 4))
            return f"(<= Y_{i} {bound})", f"(y[{i}] <= {bound})"
        return f"(>= Y_{i} (* 2.0 Y_{j}))", f"(y[{i}] >= 2 * y[{j}])"
    parts = [_random_formula(generator, depth - 1) for _ in range(generator.integers(1, 4))]
    head = "and" if generator.random() < 0.5 else "or"
    return f"({head} {' '.join(p for p, _ in parts)})", "(" + f" {head} ".join(m for _, m in parts) + ")"


def test_boxes_in_disjunctions() -> None:
    boxes = [(0.0, 0.25), (0.5, 0.75), (3.0, 2.0)]
    parts = [f"(and (>= X_0 {low}) (<= X_0 {high}) (<= Y_0 {i}))" for i, (low, high) in enumerate(boxes)]
    query = parse_vnnlib(declared(1, 1) + f"(assert (or {' '.join(parts)}))")
    assert [(case.lower[0], case.upper[0]) for case in query.cases] == boxes[:2]  # the last one is empty
    assert [case.unsafe[0].bounds[0] for case in query.cases] == [0.0, 1.0]


def test_without_output_constraints_everything_is_unsafe() -> None:
    query = parse_vnnlib(declared(1, 1) + BOX)
    assert query.holds_at(np.zeros(1), np.array([123.0]))
    assert parse_vnnlib(declared(1, 1) + BOX + "(assert (<= 1 0))").cases == ()


def test_many_constraints_are_read_fast() -> None:
    number = 20_000
    bounds = "".join(f"(assert (<= X_{i} 0.5))\n(assert (>= X_{i} -0.5))\n" for i in range(number))
    started = time.perf_counter()
    assert parse_vnnlib(declared(number, 1) + bounds + "(assert (<= Y_0 0))").inputs == number
    assert time.perf_counter() - started < 20  # about one second when the machine is idle


BAD = {
    "unbounded above": (declared(1, 1) + "(assert (>= X_0 0))", "X_0 has no upper bound"),
    "unbounded below": (declared(2, 1) + BOX + "(assert (<= X_1 0))", "X_1 has no lower bound"),
    "unbounded in one case": (declared(1, 1) + "(assert (or (<= Y_0 0) (<= X_0 1)))", "X_0 has no"),
    "unknown symbol": (declared(1, 1) + BOX + "(assert (<= Y_7 0))", "unknown symbol 'Y_7'"),
    "not a number": (declared(1, 1) + "(assert (<= X_0 nan))", "unknown symbol 'nan'"),
    "gap": ("(declare-const X_0 Real)(declare-const X_2 Real)(declare-const Y_0 Real)", "X_1 is not declared"),
    "twice": (declared(1, 1) + declared(1, 0), "X_0 is declared twice"),
    "nothing": ("", "X_0 is not declared"),
    "truncated": (declared(1, 1) + "(assert (or (<= Y_0", "cut off"),
    "closed too often": (declared(1, 1) + ")", "expected '\\('"),
    "mixed": (declared(1, 1) + BOX + "(assert (<= Y_0 X_0))", "one input with constant bounds"),
    "no box": (declared(2, 1) + "(assert (<= (+ X_0 X_1) 1))", "one input with constant bounds"),
    "nonlinear": (declared(1, 2) + BOX + "(assert (<= (* Y_0 Y_1) 1))", "linear term"),
    "three sides": (declared(1, 1) + BOX + "(assert (< Y_0 1 2))", "expected and, or"),
    "infinite": (declared(1, 1) + BOX + "(assert (>= Y_0 inf - inf))", "expected and, or"),
    "infinities": (declared(1, 1) + BOX + "(assert (>= Y_0 (- inf inf)))", "unknown symbol 'inf'"),
    "overflow": (declared(1, 1) + BOX + "(assert (>= Y_0 (- (* 1e308 10) (* 1e308 10))))", "larger than any"),
    "overflowing sum": (declared(1, 1) + BOX + "(assert (>= Y_0 (+ 1.7e308 1.7e308)))", "larger than any"),
    "overflowing factor": (declared(1, 1) + BOX + "(assert (>= (* 1e308 (* 1e308 Y_0)) 0))", "larger than any"),
    "long index": (declared(1, 1) + f"(declare-const X_{'1' * 5000} Real)", "expected inputs X_i"),
    "long number": (declared(1, 1) + BOX + f"(assert (<= Y_0 {'1' * 5000}))", "unknown symbol"),
    "not": (declared(1, 1) + BOX + "(assert (not (<= Y_0 1)))", "expected and, or"),
    "name": ("(declare-const Z Real)", "expected inputs X_i"),
    "version 3": ("(vnnlib-version <3.0>)", "syntax error"),
    "deep": (declared(1, 1) + "(assert " + "(and " * 500, "nested"),
    "huge": (declared(1, 1) + BOX + "(assert (or (<= Y_0 1) (<= Y_0 2)))" * 20, "more than 100000 cases"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    file = tmp_path / "bad.vnnlib"
    file.write_text(text)
    with pytest.raises(GLSError, match=message) as caught:
        read_vnnlib(file)
    assert "\n" not in str(caught.value) and "bad.vnnlib" in str(caught.value)


def test_binary_files(tmp_path: Path) -> None:
    (tmp_path / "bad.vnnlib").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not a text file"):
        read_vnnlib(tmp_path / "bad.vnnlib")


def test_rounding_never_loses_inputs_or_unsafe_outputs() -> None:
    numbers = np.random.default_rng(0).normal(size=100) * 10.0 ** np.arange(100).clip(0, 6)
    query = parse_vnnlib(declared(1, 1) + "(assert (>= X_0 0.1))(assert (<= X_0 0.1))(assert (<= Y_0 0.3))")
    box = enclosing_box(query.cases, (1,))
    assert box.lower.double().item() < 0.1 < box.upper.double().item()
    for rows in ([[1.0]], [[1.0], [1.0]]):  # without and with a maximum
        for number in numbers:
            unsafe = Conjunction(np.array(rows), np.full(len(rows), number))
            network = property_network(nn.Identity(), [unsafe])
            offset = network(torch.zeros(1, 1, dtype=torch.float32))[0, 1].double().item()
            assert offset >= number and abs(offset - number) <= 2e-7 * abs(number)


def test_written_properties_are_read_back_exactly() -> None:
    x = torch.rand(1, 1, 4, 4)
    x[0, 0, 0] = torch.tensor([0.0, 1.0, 1e-30, 0.1])
    box = linf_box(x, 0.1)
    query = parse_vnnlib(property_text(box, 1, 3, comment="two\nlines"))
    (case,) = query.cases
    read = enclosing_box([case], (1, 4, 4))
    assert torch.equal(read.lower, box.lower) and torch.equal(read.upper, box.upper)
    assert query.holds_at(case.lower, np.array([0.0, 1.0, 1.0])) and not query.holds_at(
        case.lower, np.array([0.0, 1.0, 0.9])
    )


def test_counterexamples_are_read_back_exactly() -> None:
    found = Counterexample(np.random.default_rng(0).normal(size=20) * 1e-5, np.array([1 / 3, -2.0]))
    read = Counterexample.parse(found.text())
    assert np.array_equal(read.x, found.x) and np.array_equal(read.y, found.y)
    for text in ("", "((X_1 0.5))", "((X_0 abc))"):
        with pytest.raises(DataError):
            Counterexample.parse(text)

"""VNN-LIB 1.0 properties: boxes of inputs and linear constraints on outputs, in and/or formulas."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gls_lirpa.errors import DataError
from gls_lirpa.exchange.dnf import Atom, Clause, disjuncts
from gls_lirpa.exchange.onnx_model import read_bytes

Array = npt.NDArray[np.float64]
Expression = Any
"""A token, or a list of expressions."""

MAX_DEPTH = 100
_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")
_NAME = re.compile(r"([XY])_(\d+)")
_IGNORED = ("set-logic", "set-info", "set-option", "check-sat", "get-model", "exit")


@dataclass(frozen=True)
class Conjunction:
    """All y with ``rows`` · y ≤ ``bounds``."""

    rows: Array
    bounds: Array


@dataclass(frozen=True)
class Case:
    """A box of inputs in which none may lead to an output in any of ``unsafe``."""

    lower: Array
    upper: Array
    unsafe: tuple[Conjunction, ...]


@dataclass(frozen=True)
class Property:
    """What a VNN-LIB file asks: is there an input in the box of a case with an unsafe output?"""

    inputs: int
    outputs: int
    cases: tuple[Case, ...]

    def holds_at(self, x: Array, y: Array, *, tolerance: float = 0.0) -> bool:
        """Whether x (inside a box, exactly) with the output y is such an input; rows may be missed by ``tolerance``.

        >>> query = parse_vnnlib("(declare-const X_0 Real)(declare-const Y_0 Real)"
        ...                      "(assert (>= X_0 0))(assert (<= X_0 1))(assert (<= Y_0 2e-1))")
        >>> query.holds_at(np.array([0.5]), np.array([0.1])), query.holds_at(np.array([1.5]), np.array([0.1]))
        (True, False)
        """
        return any(
            bool(((case.lower <= x) & (x <= case.upper)).all())
            and any(bool((unsafe.rows @ y <= unsafe.bounds + tolerance).all()) for unsafe in case.unsafe)
            for case in self.cases
        )


def read_vnnlib(path: str | Path) -> Property:
    """The property in a ``.vnnlib`` or ``.vnnlib.gz`` file."""
    path = Path(path)
    try:
        return parse_vnnlib(read_bytes(path, "property").decode())
    except UnicodeDecodeError as error:
        raise DataError(f"property {str(path)!r} is not a text file") from error
    except DataError as error:
        raise DataError(f"property {str(path)!r}: {error}") from error


def parse_vnnlib(text: str) -> Property:
    """The property written in ``text``.

    >>> query = parse_vnnlib('''
    ... (declare-const X_0 Real) (declare-const Y_0 Real) (declare-const Y_1 Real)
    ... (assert (or (and (>= X_0 0.0) (<= X_0 0.5)) (and (>= X_0 0.7) (<= X_0 1.0)))) ; two boxes
    ... (assert (<= Y_0 Y_1))
    ... ''')
    >>> [(case.lower.tolist(), case.upper.tolist()) for case in query.cases]
    [([0.0], [0.5]), ([0.7], [1.0])]
    >>> query.cases[0].unsafe[0].rows.tolist()
    [[1.0, -1.0]]
    """
    declared: dict[str, tuple[str, int]] = {}
    asserted: list[Expression] = []
    for command in _commands(text):
        head = command[0] if command else "()"
        if head in ("declare-const", "declare-fun"):
            _declare(command, declared)
        elif head == "assert" and len(command) == 2:
            asserted.append(command[1])
        elif head not in _IGNORED:
            raise DataError(f"unknown command {_shown(command)}, expected declare-const or assert (VNN-LIB 1.0)")
    sizes = {kind: _count(declared, kind) for kind in "XY"}
    formula = ["and", *(_formula(expression, declared) for expression in asserted)]
    cases = _cases(disjuncts(formula), sizes["X"], sizes["Y"])
    return Property(sizes["X"], sizes["Y"], tuple(cases))


def _commands(text: str) -> Iterator[list[Expression]]:
    stack: list[list[Expression]] = []
    for match in _TOKEN.finditer(_COMMENT.sub("", text)):
        token = match[0]
        if token == "(":
            stack.append([])
            if len(stack) > MAX_DEPTH:
                raise DataError(f"parentheses are nested more than {MAX_DEPTH} deep")
        elif not stack:
            raise DataError(f"expected '(', got {token!r}")
        elif token != ")":
            stack[-1].append(token)
        else:
            done = stack.pop()
            if not stack:
                yield done
            else:
                stack[-1].append(done)
    if stack:
        raise DataError(f"the file ends inside {_shown(stack[0])}: it is cut off")


def _declare(command: list[Expression], declared: dict[str, tuple[str, int]]) -> None:
    name = command[1] if len(command) > 1 else ""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or command[-1] != "Real":
        raise DataError(f"expected inputs X_i and outputs Y_j of type Real, got {_shown(command)}")
    if name in declared:
        raise DataError(f"{name} is declared twice")
    declared[name] = (match[1], int(match[2]))


def _count(declared: dict[str, tuple[str, int]], kind: str) -> int:
    numbers = {number for letter, number in declared.values() if letter == kind}
    missing = next((i for i in range(len(numbers)) if i not in numbers), None)
    if not numbers or missing is not None:
        raise DataError(f"{kind}_{missing or 0} is not declared")
    return len(numbers)


def _formula(expression: Expression, declared: dict[str, tuple[str, int]]) -> Any:
    """Nested ["and"/"or", …] lists over atoms."""
    head = expression[0] if isinstance(expression, list) and expression else None
    if head in ("and", "or"):
        return [head, *(_formula(part, declared) for part in expression[1:])]
    if head in ("<=", ">=", "=") and len(expression) == 3:
        left, right = _term(expression[1], declared), _term(expression[2], declared)
        if head == "=":
            return ["and", _atom(left, right, expression), _atom(right, left, expression)]
        return _atom(*((left, right) if head == "<=" else (right, left)), expression)
    if head in ("<", ">"):
        raise DataError(f"strict inequalities are not supported, write <= or >=: {_shown(expression)}")
    raise DataError(f"expected and, or, <= or >=, got {_shown(expression)}")


Term = tuple[dict[tuple[str, int], float], float]
"""Coefficients of variables, and a constant."""


def _term(expression: Expression, declared: dict[str, tuple[str, int]]) -> Term:
    if isinstance(expression, str):
        variable = declared.get(expression)
        return ({variable: 1.0}, 0.0) if variable is not None else ({}, _number(expression))
    head, parts = (expression[0], [_term(part, declared) for part in expression[1:]]) if expression else ("()", [])
    if head == "+" and parts:
        return _sum(parts)
    if head == "-" and parts:
        rest = [_times(part, -1.0) for part in (parts if len(parts) == 1 else parts[1:])]
        return _sum(rest if len(parts) == 1 else [parts[0], *rest])
    if head == "*" and sum(bool(part[0]) for part in parts) <= 1 and parts:
        factor = math.prod(part[1] for part in parts if not part[0])
        return _times(next((part for part in parts if part[0]), ({}, 1.0)), factor)
    if head == "/" and len(parts) == 2 and not parts[1][0] and parts[1][1] != 0:
        return _times(parts[0], 1 / parts[1][1])
    raise DataError(f"expected a linear term, got {_shown(expression)}")


def _number(token: str) -> float:
    try:
        number = float(token)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or "_" in token:
        raise DataError(f"unknown symbol {token!r}: neither declared nor a number")
    return number


def _sum(parts: list[Term]) -> Term:
    total: dict[tuple[str, int], float] = {}
    for coefficients, _ in parts:
        for variable, factor in coefficients.items():
            total[variable] = total.get(variable, 0.0) + factor
    return total, math.fsum(constant for _, constant in parts)


def _times(term: Term, factor: float) -> Term:
    return {variable: factor * value for variable, value in term[0].items()}, factor * term[1]


def _atom(small: Term, large: Term, source: Expression) -> Atom | bool:
    """small ≤ large, as coefficients · variables ≤ bound."""
    coefficients, constant = _sum([small, _times(large, -1.0)])
    coefficients = {variable: factor for variable, factor in coefficients.items() if factor != 0.0}
    kinds = {letter for letter, _ in coefficients}
    if not kinds:
        return constant <= 0.0
    if kinds == {"X", "Y"} or (kinds == {"X"} and len(coefficients) > 1):
        raise DataError(f"expected one input with constant bounds, or outputs alone, got {_shown(source)}")
    if kinds == {"X"}:
        ((_, index), factor) = next(iter(coefficients.items()))
        return ("X", ((index, 1.0 if factor > 0 else -1.0),), -constant / abs(factor))
    return ("Y", tuple((index, factor) for (_, index), factor in coefficients.items()), -constant)


def _cases(clauses: tuple[Clause, list[Clause]], inputs: int, outputs: int) -> list[Case]:
    """Clauses with the same box share a case; those without inputs are left out."""
    common, alternatives = clauses
    lower, upper = np.full(inputs, -np.inf), np.full(inputs, np.inf)
    _narrow(lower, upper, common)
    boxes: dict[tuple[Atom, ...], tuple[Array, Array]] = {}
    unsafe: dict[tuple[Atom, ...], list[Conjunction]] = {}
    for clause in alternatives:
        key = tuple(atom for atom in clause if atom[0] == "X")
        if key not in boxes:
            boxes[key] = (lower, upper) if not key else (lower.copy(), upper.copy())
            _narrow(*boxes[key], key)
            _check_bounded(*boxes[key])
        unsafe.setdefault(key, []).append(_conjunction([*common, *clause], outputs))
    return [Case(*boxes[key], tuple(unsafe[key])) for key in boxes if bool((boxes[key][0] <= boxes[key][1]).all())]


def _narrow(lower: Array, upper: Array, atoms: Clause) -> None:
    for kind, coefficients, bound in atoms:
        if kind == "X":
            index, sign = coefficients[0]
            if sign > 0:
                upper[index] = min(upper[index], bound)
            else:
                lower[index] = max(lower[index], -bound)


def _check_bounded(lower: Array, upper: Array) -> None:
    for name, side in (("lower", lower), ("upper", upper)):
        if not bool(np.isfinite(side).all()):
            raise DataError(f"input X_{int(np.flatnonzero(~np.isfinite(side))[0])} has no {name} bound")


def _conjunction(atoms: Clause, outputs: int) -> Conjunction:
    """Without constraints on outputs every output is unsafe: the row 0 · y ≤ 0."""
    found = [atom for atom in atoms if atom[0] == "Y"] or [("Y", (), 0.0)]
    rows, bounds = np.zeros((len(found), outputs)), np.zeros(len(found))
    for i, (_, coefficients, bound) in enumerate(found):
        for index, factor in coefficients:
            rows[i, index] = factor
        bounds[i] = bound
    return Conjunction(rows, bounds)


def _shown(expression: Expression) -> str:
    def flat(part: Expression) -> str:
        return part if isinstance(part, str) else f"({' '.join(flat(p) for p in part[:8])})"

    text = flat(expression)
    return repr(text if len(text) <= 60 else text[:57] + "…")

"""VNN-LIB properties: boxes of inputs and linear constraints on outputs, in and/or formulas.

Files of version 2.0 are read by the package vnnlib (see ``vnnlib2``), which knows no other version; those of
1.0, the version of all published benchmarks up to 2024, here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gls_lirpa.errors import DataError
from gls_lirpa.exchange.cases import Property, property_of
from gls_lirpa.exchange.onnx_model import read_bytes
from gls_lirpa.exchange.terms import Term, comparison, difference, product, sum_of, times
from gls_lirpa.exchange.vnnlib2 import is_version_2, parse_vnnlib2

Expression = Any
"""A token, or a list of expressions."""

MAX_DEPTH = 100
_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")
_NAME = re.compile(r"([XY])_([0-9]{1,9})")
_IGNORED = ("set-logic", "set-info", "set-option", "check-sat", "get-model", "exit")


def read_vnnlib(path: str | Path) -> Property:
    """The property in a ``.vnnlib`` or ``.vnnlib.gz`` file."""
    path = Path(path)
    try:
        text = read_bytes(path, "property").decode()
        return parse_vnnlib2(text) if is_version_2(text) else parse_vnnlib(text)
    except UnicodeDecodeError as error:
        raise DataError(f"property {str(path)!r} is not a text file") from error
    except DataError as error:
        raise DataError(f"property {str(path)!r}: {error}") from error


def parse_vnnlib(text: str) -> Property:
    """The property written in ``text`` in VNN-LIB 1.0.

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
    return property_of(formula, sizes["X"], sizes["Y"])


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
    if head in ("<=", ">=", "=", "<", ">") and len(expression) == 3:
        left, right = _term(expression[1], declared), _term(expression[2], declared)
        return comparison(left, head, right, _shown(expression))
    raise DataError(f"expected and, or, <= or >=, got {_shown(expression)}")


def _term(expression: Expression, declared: dict[str, tuple[str, int]]) -> Term:
    if isinstance(expression, str):
        variable = declared.get(expression)
        return ({variable: 1.0}, 0.0) if variable is not None else ({}, _number(expression))
    head, parts = (expression[0], [_term(part, declared) for part in expression[1:]]) if expression else ("()", [])
    if head == "+" and parts:
        return sum_of(parts)
    if head == "-" and parts:
        return difference(parts)
    multiple = product(parts) if head == "*" else None
    if multiple is not None:
        return multiple
    if head == "/" and len(parts) == 2 and not parts[1][0] and parts[1][1] != 0:
        return times(parts[0], 1 / parts[1][1])
    raise DataError(f"expected a linear term, got {_shown(expression)}")


def _number(token: str) -> float:
    try:
        number = float(token)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or "_" in token:
        raise DataError(f"unknown symbol {_shown(token)}: neither declared nor a number")
    return number


def _shown(expression: Expression) -> str:
    def flat(part: Expression) -> str:
        return part if isinstance(part, str) else f"({' '.join(flat(p) for p in part[:8])})"

    text = flat(expression)
    return repr(text if len(text) <= 60 else text[:57] + "…")

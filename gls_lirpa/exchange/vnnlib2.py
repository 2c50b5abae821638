"""VNN-LIB 2.0 properties, read by the package vnnlib: one network with one input and one output."""

from __future__ import annotations

import importlib
import json
import math
import re
from typing import Any

from gls_lirpa.base.extras import install_command
from gls_lirpa.errors import CheckpointError, DataError
from gls_lirpa.exchange.cases import Property, property_of
from gls_lirpa.exchange.terms import Term, comparison, difference, product, sum_of

MAX_DEPTH = 100
"""Of parentheses: the package's own functions call themselves once for each."""

_COMMENT = re.compile(r";[^\n]*")
_SYMBOLS = {
    **{"LessEqual": "<=", "LessThan": "<", "GreaterEqual": ">=", "GreaterThan": ">"},
    **{"Equal": "==", "NotEqual": "!="},
}


def is_version_2(text: str) -> bool:
    """Whether a file says that it is VNN-LIB 2.0 or later, as such a file must with its first command.

    >>> is_version_2("; a comment\\n(vnnlib-version <2.0>)"), is_version_2("(declare-const X_0 Real)")
    (True, False)
    """
    return re.match(r"(\s|;[^\n]*(\n|$))*\(\s*vnnlib-version\b", text) is not None


def parse_vnnlib2(text: str) -> Property:
    """The property written in ``text`` in VNN-LIB 2.0; inputs and outputs are numbered row by row.

    >>> query = parse_vnnlib2('''(vnnlib-version <2.0>)
    ... (declare-network N (declare-input X float32 [1, 2]) (declare-output Y float32 [2]))
    ... (assert (and (>= X[0,0] 0.0) (<= X[0,0] 0.5) (== X[0,1] 1.0)))
    ... (assert (< Y[0] Y[1]))''')
    >>> query.cases[0].upper.tolist(), query.cases[0].unsafe[0].strict.tolist()
    ([0.5, 1.0], [True])
    """
    _check_depth(text)
    query = _parsed(text)
    if len(query.networks) != 1:
        raise DataError(f"the property is about {len(query.networks)} networks, expected one")
    network = query.networks[0]
    counts = len(network.inputs), len(network.outputs), len(network.hidden)
    if counts != (1, 1, 0):
        raise DataError(
            f"the property names {counts[0]} inputs, {counts[1]} outputs and {counts[2]} hidden values of the network, "
            "expected one input and one output"
        )
    names = {str(network.inputs[0].name): "X", str(network.outputs[0].name): "Y"}
    formula = ["and", *(_formula(assertion.expr, names) for assertion in query.assertions)]
    return property_of(formula, math.prod(network.inputs[0].shape), math.prod(network.outputs[0].shape))


def _parsed(text: str) -> Any:
    try:
        library: Any = importlib.import_module("vnnlib")
    except ImportError as error:
        raise CheckpointError(
            f"VNN-LIB 2.0 files need the package vnnlib ({error}): {install_command('onnx')}"
        ) from error
    try:
        return library.parse_query_string(text)
    except library.VNNLibException as error:
        raise DataError(_message(str(error))) from error


def _message(text: str) -> str:
    """What the package says, in one line: its errors of meaning are JSON."""
    try:
        first = json.loads(text)["errors"][0]
        text = f"line {first['line']}: {first['message']} {first['offendingSymbol']!r}: {first['hint']}"
    except (ValueError, KeyError, IndexError, TypeError):
        pass
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"


def _check_depth(text: str) -> None:
    depth = 0
    for match in re.finditer(r"[()]", _COMMENT.sub("", text)):
        depth += 1 if match[0] == "(" else -1
        if depth > MAX_DEPTH:
            raise DataError(f"parentheses are nested more than {MAX_DEPTH} deep")


def _formula(expression: Any, names: dict[str, str]) -> Any:
    kind = type(expression).__name__
    if kind in ("And", "Or"):
        return [kind.lower(), *(_formula(part, names) for part in expression.args)]
    if kind in _SYMBOLS:
        left, right = _term(expression.lhs, names), _term(expression.rhs, names)
        return comparison(left, _SYMBOLS[kind], right, _shown(expression))
    raise DataError(f"expected and, or or a comparison, got {_shown(expression)}")


def _term(expression: Any, names: dict[str, str]) -> Term:
    kind = type(expression).__name__
    if kind == "Var":
        return {(names[str(expression.name)], _position(expression)): 1.0}, 0.0
    if kind in ("Float", "Int", "IntExpr"):
        return {}, float(expression.lexeme)
    if kind == "Negate":
        return difference([_term(expression.expr, names)])
    if kind == "Plus":
        return sum_of([_term(part, names) for part in expression.args])
    if kind == "Minus":
        return difference([_term(part, names) for part in (expression.head, *expression.rest)])
    multiple = product([_term(part, names) for part in expression.args]) if kind == "Multiply" else None
    if multiple is None:
        raise DataError(f"expected a linear term, got {_shown(expression)}")
    return multiple


def _position(variable: Any) -> int:
    """The number of an element in the order of its indices, the last of which runs fastest."""
    position = 0
    for index, size in zip(variable.indices, variable.shape, strict=True):
        position = position * size + index
    return position


def _shown(expression: Any) -> str:
    text = " ".join(str(expression).split())
    return repr(text if len(text) <= 60 else text[:57] + "…")

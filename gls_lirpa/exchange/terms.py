"""Linear terms over inputs and outputs, and the atoms that compare two of them."""

from __future__ import annotations

import math
from typing import Any

from gls_lirpa.errors import DataError
from gls_lirpa.exchange.dnf import Atom

Term = tuple[dict[tuple[str, int], float], float]
"""Coefficients of variables by kind (X or Y) and index, and a constant; all of them finite."""


def sum_of(parts: list[Term]) -> Term:
    """The sum of some terms.

    >>> sum_of([({("X", 0): 1.0}, 2.0), ({("X", 0): 0.5}, 1.0)])
    ({('X', 0): 1.5}, 3.0)
    """
    total: dict[tuple[str, int], float] = {}
    for coefficients, _ in parts:
        for variable, factor in coefficients.items():
            total[variable] = total.get(variable, 0.0) + factor
    try:
        constant = math.fsum(constant for _, constant in parts)
    except OverflowError:
        constant = math.inf
    return _finite(total, constant)


def times(term: Term, factor: float) -> Term:
    """A term times a number."""
    return _finite({variable: factor * value for variable, value in term[0].items()}, factor * term[1])


def product(parts: list[Term]) -> Term | None:
    """The product of some terms; None where it is not linear."""
    if not parts or sum(bool(coefficients) for coefficients, _ in parts) > 1:
        return None
    factor = math.prod(constant for coefficients, constant in parts if not coefficients)
    return times(next((part for part in parts if part[0]), ({}, 1.0)), factor)


def difference(parts: list[Term]) -> Term:
    """The first term minus the others; a single one's negative."""
    rest = [times(part, -1.0) for part in (parts if len(parts) == 1 else parts[1:])]
    return sum_of(rest if len(parts) == 1 else [parts[0], *rest])


def comparison(left: Term, symbol: str, right: Term, source: str) -> Any:
    """A formula (see ``dnf``) for left symbol right, symbol one of <= < >= > = == !=.

    >>> comparison(({("X", 0): 2.0}, 0.0), "<", ({}, 1.0), "")
    ('X', ((0, 1.0),), 0.5, True)
    """
    if symbol in ("=", "=="):
        return ["and", _atom(left, right, False, source), _atom(right, left, False, source)]
    if symbol == "!=":
        return ["or", _atom(left, right, True, source), _atom(right, left, True, source)]
    small, large = (left, right) if symbol in ("<=", "<") else (right, left)
    return _atom(small, large, symbol in ("<", ">"), source)


def _finite(coefficients: dict[tuple[str, int], float], constant: float) -> Term:
    if not all(map(math.isfinite, [constant, *coefficients.values()])):
        raise DataError("a number in it is larger than any floating-point number")
    return coefficients, constant


def _atom(small: Term, large: Term, strict: bool, source: str) -> Atom | bool:
    """small ≤ large, or small < large, as coefficients · variables against a bound."""
    coefficients, constant = sum_of([small, times(large, -1.0)])
    coefficients = {variable: factor for variable, factor in coefficients.items() if factor != 0.0}
    kinds = {letter for letter, _ in coefficients}
    if not kinds:
        return constant < 0.0 if strict else constant <= 0.0
    if kinds == {"X", "Y"} or (kinds == {"X"} and len(coefficients) > 1):
        raise DataError(f"expected one input with constant bounds, or outputs alone, got {source}")
    if kinds == {"X"}:
        ((_, index), factor) = next(iter(coefficients.items()))
        return ("X", ((index, 1.0 if factor > 0 else -1.0),), -constant / abs(factor), strict)
    return ("Y", tuple((index, factor) for (_, index), factor in coefficients.items()), -constant, strict)

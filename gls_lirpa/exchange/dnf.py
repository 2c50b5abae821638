"""And/or formulas as a disjunction of conjunctions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gls_lirpa.errors import DataError

Atom = tuple[str, tuple[tuple[int, float], ...], float, bool]
"""Kind (X or Y), coefficients by index, bound, strict: coefficients · variables ≤ bound, or < if strict."""

Clause = Sequence[Atom]
MAX_CLAUSES = 100_000


def disjuncts(formula: Any) -> tuple[Clause, list[Clause]]:
    """Atoms that every clause shares, and what each clause has besides.

    ``formula`` is an atom, True, False or a list that starts with "and" or "or".

    >>> a, b, c = (("Y", ((i, 1.0),), 0.0, False) for i in range(3))
    >>> common, clauses = disjuncts(["and", a, ["or", b, ["and", c]]])
    >>> len(common), [len(clause) for clause in clauses]
    (1, [1, 1])
    """
    common: list[Atom] = []
    alternatives: list[Any] = []
    if not _gather(formula, common, alternatives):
        return common, []
    clauses: list[Clause] = [()]
    for alternative in alternatives:
        parts = [
            [*shared, *clause] for part in alternative[1:] for shared, rest in [disjuncts(part)] for clause in rest
        ]
        if len(clauses) * len(parts) > MAX_CLAUSES:
            raise DataError(f"the formula has more than {MAX_CLAUSES} cases")
        clauses = [[*clause, *part] for clause in clauses for part in parts]
    return common, clauses


def _gather(formula: Any, atoms: list[Atom], alternatives: list[Any]) -> bool:
    """Split nested conjunctions into atoms and disjunctions; False if one part is false."""
    if isinstance(formula, bool):
        return formula
    if isinstance(formula, tuple):
        atoms.append(formula)
        return True
    if formula[0] == "or":
        if len(formula) == 2:
            return _gather(formula[1], atoms, alternatives)
        alternatives.append(formula)
        return True
    return all(_gather(part, atoms, alternatives) for part in formula[1:])

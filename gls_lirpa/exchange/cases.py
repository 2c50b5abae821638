"""What a property asks: boxes of inputs, and unions of polyhedra of outputs that none may lead to.

Strict inequalities count as their closures where safety is proven, so that a proof covers more than is
asked, and as what they are where a counterexample is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gls_lirpa.errors import DataError
from gls_lirpa.exchange.dnf import Atom, Clause, disjuncts

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

INSIDE = 1e-6
"""By how much a strict inequality is tightened, relative to 1 + |bound|, to look for points beyond equality."""


@dataclass(frozen=True)
class Conjunction:
    """All y with ``rows`` · y ≤ ``bounds``, or < where ``strict``."""

    rows: Array
    bounds: Array
    strict: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def holds(self, y: Array, *, tolerance: float = 0.0) -> bool:
        """Whether y is one of them; rows may be missed by ``tolerance``, strict ones may not.

        >>> both = Conjunction(np.eye(2), np.zeros(2), np.array([True, False]))
        >>> both.holds(np.array([-1.0, 0.05]), tolerance=0.1), both.holds(np.array([0.0, 0.0]), tolerance=0.1)
        (True, False)
        """
        values = self.rows @ y
        if not self.strict.any():
            return bool((values <= self.bounds + tolerance).all())
        return bool(np.where(self.strict, values < self.bounds, values <= self.bounds + tolerance).all())

    def tightened(self) -> Conjunction:
        """A closed part of it: strict rows stay below their bounds by a little."""
        if not self.strict.any():
            return self
        less = np.where(self.strict, INSIDE * (1 + np.abs(self.bounds)), 0.0)
        return Conjunction(self.rows, self.bounds - less)


@dataclass(frozen=True)
class Case:
    """A box of inputs in which none may lead to an output in any of ``unsafe``; ``open_lower`` and
    ``open_upper`` name the ends that do not belong to it."""

    lower: Array
    upper: Array
    unsafe: tuple[Conjunction, ...]
    open_lower: Mask | None = None
    open_upper: Mask | None = None

    def inner(self) -> tuple[Array, Array]:
        """The least and the largest numbers that belong to it."""
        lower, upper = self.lower, self.upper
        if self.open_lower is not None:
            lower = np.where(self.open_lower, np.nextafter(lower, np.inf), lower)
        if self.open_upper is not None:
            upper = np.where(self.open_upper, np.nextafter(upper, -np.inf), upper)
        return lower, upper

    def holds(self, x: Array) -> bool:
        """Whether x belongs to the box."""
        lower, upper = self.inner()
        return bool(((lower <= x) & (x <= upper)).all())

    @property
    def strict(self) -> bool:
        """Whether some inequality of its outputs is strict."""
        return any(bool(unsafe.strict.any()) for unsafe in self.unsafe)

    def tightened(self) -> Case:
        return replace(self, unsafe=tuple(unsafe.tightened() for unsafe in self.unsafe))


@dataclass(frozen=True)
class Property:
    """What a VNN-LIB file asks: is there an input in the box of a case with an unsafe output?"""

    inputs: int
    outputs: int
    cases: tuple[Case, ...]

    def holds_at(self, x: Array, y: Array, *, tolerance: float = 0.0) -> bool:
        """Whether x (inside a box, exactly) with the output y is such an input; rows may be missed by ``tolerance``.

        >>> unsafe = Conjunction(np.ones((1, 1)), np.array([0.2]))
        >>> query = Property(1, 1, (Case(np.zeros(1), np.ones(1), (unsafe,)),))
        >>> query.holds_at(np.array([0.5]), np.array([0.1])), query.holds_at(np.array([1.5]), np.array([0.1]))
        (True, False)
        """
        return any(
            case.holds(x) and any(unsafe.holds(y, tolerance=tolerance) for unsafe in case.unsafe) for case in self.cases
        )


def property_of(formula: Any, inputs: int, outputs: int) -> Property:
    """The property that a formula over atoms (see ``dnf``) states.

    >>> atoms = [("X", ((0, -1.0),), 0.0, False), ("X", ((0, 1.0),), 1.0, True), ("Y", ((0, 1.0),), 2.0, False)]
    >>> (case,) = property_of(["and", *atoms], 1, 1).cases
    >>> case.lower.tolist(), case.upper.tolist(), case.holds(np.array([1.0]))
    ([-0.0], [1.0], False)
    """
    return Property(inputs, outputs, tuple(_cases(disjuncts(formula), inputs, outputs)))


class _Bounds:
    """A box in the making."""

    def __init__(self, inputs: int) -> None:
        self.ends = [np.full(inputs, -np.inf), np.full(inputs, np.inf)]
        self.open = [np.zeros(inputs, dtype=np.bool_), np.zeros(inputs, dtype=np.bool_)]

    def copy(self) -> _Bounds:
        other = _Bounds(0)
        other.ends, other.open = [side.copy() for side in self.ends], [side.copy() for side in self.open]
        return other

    def narrow(self, atoms: Sequence[Atom]) -> None:
        """The tighter of two ends holds; of two equal ones the strict one."""
        for kind, coefficients, bound, strict in atoms:
            if kind == "X":
                index, sign = coefficients[0]
                side = int(sign > 0)
                distance = sign * (self.ends[side][index] - sign * bound)  # of the old end beyond the new one
                if distance > 0 or (distance == 0 and strict):
                    self.ends[side][index], self.open[side][index] = sign * bound, strict

    def check(self) -> None:
        for name, side in zip(("lower", "upper"), self.ends, strict=True):
            if not bool(np.isfinite(side).all()):
                raise DataError(f"input X_{int(np.flatnonzero(~np.isfinite(side))[0])} has no {name} bound")

    def case(self, unsafe: Sequence[Conjunction]) -> Case | None:
        """None where no number lies in the box."""
        lower, upper = (side if side.any() else None for side in self.open)
        case = Case(self.ends[0], self.ends[1], tuple(unsafe), lower, upper)
        first, last = case.inner()
        return case if bool((first <= last).all()) else None


def _cases(clauses: tuple[Clause, list[Clause]], inputs: int, outputs: int) -> list[Case]:
    """Clauses with the same box share a case; those without inputs are left out."""
    common, alternatives = clauses
    whole = _Bounds(inputs)
    whole.narrow(common)
    shared = [atom for atom in common if atom[0] == "Y"]
    boxes: dict[tuple[Atom, ...], _Bounds] = {}
    unsafe: dict[tuple[Atom, ...], list[Conjunction]] = {}
    for clause in alternatives:
        key = tuple(atom for atom in clause if atom[0] == "X")
        if key not in boxes:
            boxes[key] = whole if not key else whole.copy()
            boxes[key].narrow(key)
            boxes[key].check()
        own = [atom for atom in clause if atom[0] == "Y"]
        unsafe.setdefault(key, []).append(_conjunction([*shared, *own], outputs))
    cases = [boxes[key].case(unsafe[key]) for key in boxes]
    return [case for case in cases if case is not None]


def _conjunction(atoms: list[Atom], outputs: int) -> Conjunction:
    """Without constraints on outputs every output is unsafe: the row 0 · y ≤ 0."""
    found = atoms or [("Y", (), 0.0, False)]
    rows, bounds = np.zeros((len(found), outputs)), np.zeros(len(found))
    for i, (_, coefficients, bound, _) in enumerate(found):
        for index, factor in coefficients:
            rows[i, index] = factor
        bounds[i] = bound
    return Conjunction(rows, bounds, np.array([strict for *_, strict in found], dtype=np.bool_))

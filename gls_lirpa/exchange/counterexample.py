"""Counterexamples in VNN-COMP's text form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gls_lirpa.errors import DataError
from gls_lirpa.exchange.cases import Array, Case, Property
from gls_lirpa.exchange.onnx_model import OnnxNetwork

TOLERANCE = 1e-4
"""VNN-COMP's absolute tolerance for output constraints. Inputs have none here: they lie in the box."""


@dataclass(frozen=True)
class Counterexample:
    """An input of a box and the output that onnxruntime gives for it."""

    x: Array
    y: Array

    def text(self) -> str:
        """Every number such that reading it gives the same number.

        >>> print(Counterexample(np.array([0.5]), np.array([1.0, -2.0])).text())
        ((X_0 0.5)
        (Y_0 1.0)
        (Y_1 -2.0))
        """
        both = (("X", self.x), ("Y", self.y))
        named = [f"({kind}_{i} {value!r})" for kind, values in both for i, value in enumerate(values.tolist())]
        return "(" + "\n".join(named) + ")"

    @classmethod
    def parse(cls, text: str) -> Counterexample:
        """The counterexample written in ``text``.

        >>> Counterexample.parse("((X_0 0.5) (Y_0 1e-3))").y.tolist()
        [0.001]
        """
        found: dict[str, list[float]] = {"X": [], "Y": []}
        for kind, number, value in re.findall(r"\(\s*([XY])_([0-9]{1,9})\s+([^\s()]+)\s*\)", text):
            try:
                found[kind].append(float(value))
            except ValueError as error:
                raise DataError(f"{kind}_{number} is {value!r}, expected a number") from error
            if len(found[kind]) != int(number) + 1:
                raise DataError(f"expected {kind}_{len(found[kind]) - 1}, got {kind}_{number}")
        if not found["X"]:
            raise DataError("expected a counterexample of the form ((X_0 0.1) … (Y_0 0.2) …)")
        return cls(np.array(found["X"]), np.array(found["Y"]))


def replayed(network: OnnxNetwork, query: Property, case: Case, point: npt.NDArray[Any]) -> Counterexample | None:
    """``point`` as a counterexample, if onnxruntime agrees that it is one.

    The box that was searched may be wider than the case's own by one rounding; the point is moved into it.
    """
    x = np.clip(np.asarray(point, dtype=np.float64).reshape(-1), *case.inner())
    y = network.replay(x[None])[0].astype(np.float64)
    return Counterexample(x, y) if query.holds_at(x, y, tolerance=TOLERANCE) else None

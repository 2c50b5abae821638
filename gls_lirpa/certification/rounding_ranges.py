"""Narrow ranges of ReLU inputs for the magnitude pass.

Over a wide box intervals grow by |W| at every layer, and with them what rounding could do: 8 for a network of ACAS Xu
whose outputs are 0.01 and whose error is 3e-8. CROWN's bounds of the same values are far narrower; above all they show
which ReLUs are off, and a ReLU that is off passes no error on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gls_lirpa.certification.magnitudes import NoRuleError, Spread, Value, relu
from gls_lirpa.certification.rounding_rules import in_place

aten = torch.ops.aten


class Ranges:
    """Bounds (lower, upper) in float64 of every ReLU's input, in the order in which the network calls its ReLUs.

    They were computed in floating point: ``share`` · slack is what each may be off by, where the slack is what the pass
    knows of such a bound in the network's dtype.
    """

    def __init__(self, bounds: Sequence[tuple[Tensor, Tensor]], *, share: float) -> None:
        self._bounds = bounds
        self._share = share
        self._met = 0

    def part(self, start: int, count: int) -> Ranges:
        """Those of some boxes."""
        part = slice(start, start + count)
        return Ranges([(lower[part], upper[part]) for lower, upper in self._bounds], share=self._share)

    def rules(self) -> dict[Any, Callable[..., Any]]:
        return {aten.relu: self._relu, aten.relu_: in_place(self._relu)}

    def check(self) -> None:
        """Raise NoRuleError if the network did not call as many ReLUs as there are ranges."""
        if self._met != len(self._bounds):
            raise NoRuleError(f"{self._met} ReLUs where {len(self._bounds)} were bounded")

    def _relu(self, func: Any, x: Spread) -> Spread:
        if self._met >= len(self._bounds):
            raise NoRuleError(f"more ReLUs than the {len(self._bounds)} that were bounded")
        lower, upper = (end.reshape(x.value.lower.shape) for end in self._bounds[self._met])
        self._met += 1
        return x.like(relu(x.arithmetic, narrowed(x.value, lower, upper, self._share)))


def narrowed(value: Value, lower: Tensor, upper: Tensor, share: float) -> Value:
    """Within other bounds of the same value, widened by what those may be off by; NaN and crossed ones are none."""
    off = share * value.slack
    low, high = torch.fmax(value.lower, lower - off), torch.fmin(value.upper, upper + off)
    usable = low <= high
    return replace(value, lower=torch.where(usable, low, value.lower), upper=torch.where(usable, high, value.upper))

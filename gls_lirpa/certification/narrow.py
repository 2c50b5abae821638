"""What rounding requires of a bound where CROWN in float64 says how far the network's values go.

The magnitude pass by intervals is cheap and mostly enough. Where it asks for more than a bound can show, the values of
the ReLUs are bounded by CROWN, and where few inputs vary the box is halved until every part is proven by itself.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gls_lirpa.attacks import random_points
from gls_lirpa.base.boxes import Box, crossed, margin_spec
from gls_lirpa.certification.rounding import SINGLE_TO_DOUBLE, Rounding, rounding
from gls_lirpa.certification.rounding_ranges import Ranges
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import EngineError
from gls_lirpa.relaxations import get_relaxation
from gls_lirpa.solver.sub_boxes import SubBoxes, halves, joined

aten = torch.ops.aten

PARTS = 64
"""Parts of a box that are bounded at once."""

_SAME = 1e-9
"""Relative difference of a ReLU's input in the network and in its graph, both in float64."""


class Narrow:
    """Rounding of ``plain`` over boxes, with ranges from ``engine``, which bounds it in float64.

    ``folded``: the engine's network has BatchNorm folded, at the price of some roundings of its own.
    """

    def __init__(self, plain: nn.Module, engine: BoundEngine, *, folded: bool) -> None:
        self._plain = plain
        self._engine = engine
        self._factor = 2 if folded else 1
        self._matches: bool | None = None

    def rounding(self, box: Box, labels: Tensor) -> tuple[Tensor, Rounding] | None:
        """CROWN's bounds of the margins in float64, and the errors; None where ReLUs cannot be told apart."""
        exact = Box(box.lower.double(), box.upper.double())
        if self._matches is None:
            self._matches = self._fits(exact)
        if not self._matches:
            return None
        lower, ranges = self._bounds(exact, labels)
        share = SINGLE_TO_DOUBLE if box.lower.dtype == torch.float32 else 1.0
        known = Ranges(ranges, share=share * self._factor)
        return lower, rounding(self._plain, box, labels, classes=self._engine.classes, known=known)

    @torch.no_grad()
    def _bounds(self, box: Box, labels: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        spec = margin_spec(labels, self._engine.classes, torch.float64)
        bounds = self._engine.bounds(box, spec, get_relaxation("crown"))
        lower = torch.where(crossed(bounds).unsqueeze(1), torch.nan, bounds.lower)
        return lower, list(bounds.intermediate.values())

    @torch.no_grad()
    def _fits(self, box: Box) -> bool:
        """Whether the engine's ReLUs, in its order, are the network's, in the order of its calls.

        At a point the bounds of a ReLU's input are its value: compared at three random points of the box.
        """
        copies = box[:1].map(lambda end: end.expand(3, *end.shape[1:]))
        points = random_points(copies, generator=torch.Generator().manual_seed(0))
        with _ReluInputs() as met:
            copy.deepcopy(self._plain).double()(points)
        try:
            _, found = self._bounds(
                Box(points, points.clone()), torch.zeros(3, dtype=torch.int64, device=points.device)
            )
        except EngineError:
            return False
        return len(found) == len(met.values) and all(
            side.numel() == value.numel()
            and bool(((side.flatten() - value.flatten()).abs() <= _SAME * (1 + value.abs().max())).all())
            for ends, value in zip(found, met.values, strict=True)
            for side in ends
        )


class _ReluInputs(TorchDispatchMode):
    """Collects what ReLUs are applied to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.relu, aten.relu_):
            self.values.append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))


def proven_by_parts(narrow: Narrow, box: Box, label: Tensor, *, deadline: float, most: int = 100_000) -> bool:
    """Whether the margins of the network as it runs are positive all over the box of one sample.

    Each part is proven by its own bounds, which exceed all that rounding can do over that part; the halves of a part
    share an end, so no number lies between them. False where time, ``most`` parts or numbers to halve at run out.
    """
    share = SINGLE_TO_DOUBLE if box.lower.dtype == torch.float32 else 1.0
    shape, flat = box.lower.shape[1:], (box.lower.flatten(1), box.upper.flatten(1))
    width = (flat[1] - flat[0])[0]
    nothing = torch.full_like(flat[0], torch.nan)  # so that the widest input is halved
    open_boxes = SubBoxes(*flat, torch.zeros_like(flat[0][:, :1]), nothing, torch.zeros(1, dtype=torch.int64))
    done = 0
    while len(open_boxes):
        if time.monotonic() > deadline or done + len(open_boxes) > most:
            return False
        now = torch.arange(len(open_boxes)) < PARTS
        some, rest = open_boxes[now], open_boxes[~now]
        parts = Box(some.lower.reshape(-1, *shape), some.upper.reshape(-1, *shape))
        found = narrow.rounding(parts, label.expand(len(parts)))
        if found is None:
            return False
        lower, errors = found
        proven = (lower > errors.forward + share * errors.bound).all(1)  # false for a NaN
        done += int(proven.sum())
        children, possible = halves(some[~proven], width)
        if not bool(possible.all()):
            return False
        open_boxes = joined([children, rest])
    return True

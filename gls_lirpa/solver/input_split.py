"""Branch and bound over the input box: complete, and fast where few inputs vary.

Sub-boxes are bounded many at a time, by IBP where that suffices and by CROWN otherwise; what is left is cut
down by CROWN's linear functions and halved, the lowest bound first. A margin's bound is the lowest of
all sub-boxes. Centres and the corners where the linear functions are least are tried as counterexamples.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, crossed
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.linear import linear_bounds
from gls_lirpa.relaxations import get_relaxation
from gls_lirpa.solver.descent import Descent
from gls_lirpa.solver.query import Query, SearchOutcome
from gls_lirpa.solver.settings import SolverSettings
from gls_lirpa.solver.sub_boxes import SubBoxes, clipped, halves, joined

AIM = {torch.float32: 4e-5, torch.float64: 1e-9}
"""Sub-boxes are bounded until above AIM · max(1, |f|). Smaller than in the ReLU tree, because outputs of control
networks are often small themselves."""

FEW = 8
"""Inputs up to which halving them beats the ReLU tree: it then has all the time, else half, and the tree the rest."""

_ROUND = 0.5
"""Seconds that one round of bounds may take: a time limit is noticed between rounds."""


def split_inputs(model: nn.Module, engine: BoundEngine, query: Query, settings: SolverSettings) -> SearchOutcome:
    """Decide the rows of a query; where more than a few inputs vary, in half of the time until its deadline."""
    if int((query.box.upper > query.box.lower).sum()) > FEW:
        now = time.monotonic()
        query = replace(query, deadline=now + (query.deadline - now) / 2)
    return _Search(model, engine, query, settings).run()


class _Search:
    """One sample. ``closed``: the lowest bound of each row over all sub-boxes that are done with."""

    def __init__(self, model: nn.Module, engine: BoundEngine, query: Query, settings: SolverSettings) -> None:
        box = query.box
        self._engine = engine
        self._settings = settings
        self._spec = query.spec
        self._known = query.known.double()
        self._deadline = query.deadline
        self._shape = box.lower.shape[1:]
        self._descent = Descent(model, box, query.spec)
        self._lower, self._upper = box.lower.flatten(1), box.upper.flatten(1)
        self._width = (self._upper - self._lower)[0]
        with torch.no_grad():
            size = float(model(box.center).abs().max())
        self._target = AIM[box.lower.dtype] * max(1.0, size)
        self._closed = torch.full_like(self._known, torch.inf)
        self._nodes = 0
        self._pace = 1e-2

    def run(self) -> SearchOutcome:
        depth = torch.zeros(1, dtype=torch.int64)
        root = SubBoxes(self._lower, self._upper, self._known.to(self._lower)[None], self._lower * math.nan, depth)
        open_boxes, found = self._bounded(root)
        stuck = False
        while found is None and len(open_boxes) and not self._ended():
            chosen = open_boxes.bound.amin(1).argsort(stable=True)[: self._batch() // 2]
            rest = torch.ones(len(open_boxes), dtype=torch.bool)
            rest[chosen] = False
            children, possible = halves(open_boxes[chosen], self._width)
            whole = open_boxes[chosen[~possible]]
            if len(whole):  # no number lies between the ends of any input
                stuck = True
                self._close(whole.bound)
            others = open_boxes[rest]
            if len(children):
                left, found = self._bounded(children)
                others = joined([others, left])
            open_boxes = others
        lower = torch.minimum(self._closed, open_boxes.bound.double().amin(0)) if len(open_boxes) else self._closed
        ended = found is None and len(open_boxes) > 0 and not stuck
        return SearchOutcome(torch.maximum(lower, self._known), found, ended, self._nodes)

    def _ended(self) -> bool:
        limit = self._settings.max_nodes
        # Room for both halves of one sub-box, or they would not be bounded and the bound not be that of all.
        return time.monotonic() > self._deadline or (limit is not None and self._nodes + 2 > limit)

    def _batch(self) -> int:
        """How many to bound at once: even, within the limits of time and nodes."""
        left = min(_ROUND, max(self._deadline - time.monotonic(), 0.0))
        count = min(self._settings.input_batch, max(2, int(left / self._pace)))
        if self._settings.max_nodes is not None:
            count = min(count, self._settings.max_nodes - self._nodes)
        return max(2, count - count % 2)

    def _bounded(self, boxes: SubBoxes) -> tuple[SubBoxes, Tensor | None]:
        """The boxes that stay open, bounded and cut down, and a counterexample if one was met."""
        started, count = time.monotonic(), len(boxes)
        self._nodes += count
        boxes = self._improved(boxes, *self._ibp(boxes))
        boxes = self._still_open(boxes)
        found: Tensor | None = None
        if len(boxes):
            box = self._box(boxes)
            linear = linear_bounds(self._engine, box, self._specification(boxes))
            bound = torch.where(crossed(linear.bounds).unsqueeze(1), -torch.inf, linear.bounds.lower)
            boxes = self._improved(boxes, bound, linear.matrix)
            found = self._counterexample(boxes, linear.matrix)
            odd = ~torch.isfinite(bound)
            is_open = (boxes.bound <= self._target).any(1)
            if linear.matrix is not None and linear.offset is not None:
                # Where the bound is not a finite number, neither is its function to be trusted.
                offset = torch.where(odd, torch.nan, linear.offset)[is_open]
                boxes, matrix = self._still_open(boxes), linear.matrix[is_open]
                boxes = self._cut(boxes, matrix, offset)
            else:
                boxes = self._still_open(boxes)
        self._pace = max(1e-6, (time.monotonic() - started) / count)
        return boxes, found

    def _ibp(self, boxes: SubBoxes) -> tuple[Tensor, None]:
        bounds = self._engine.bounds(self._box(boxes), self._specification(boxes), get_relaxation("ibp"))
        return torch.where(crossed(bounds).unsqueeze(1), -torch.inf, bounds.lower), None

    def _improved(self, boxes: SubBoxes, bound: Tensor, matrix: Tensor | None) -> SubBoxes:
        """With the better of two bounds, which both hold; one that is no number counts as none."""
        best = torch.maximum(boxes.bound, torch.where(torch.isfinite(bound), bound, -torch.inf))
        smear = boxes.smear
        if matrix is not None:
            is_open = (best <= self._target).unsqueeze(2)
            smear = (matrix.abs() * is_open).sum(1) * (boxes.upper - boxes.lower)
        return SubBoxes(boxes.lower, boxes.upper, best, smear, boxes.depth)

    def _still_open(self, boxes: SubBoxes) -> SubBoxes:
        done = (boxes.bound > self._target).all(1)
        self._close(boxes.bound[done])
        return boxes[~done]

    def _cut(self, boxes: SubBoxes, matrix: Tensor, offset: Tensor) -> SubBoxes:
        """Over what is cut off every open row is above the target, every other one above its bound."""
        smaller, changed = clipped(boxes, matrix, offset, self._target)
        self._close(boxes.bound[changed].clamp(min=self._target))
        return smaller

    def _close(self, bound: Tensor) -> None:
        if len(bound):
            self._closed = torch.minimum(self._closed, bound.double().amin(0))

    def _counterexample(self, boxes: SubBoxes, matrix: Tensor | None) -> Tensor | None:
        """From the centres, and from where the linear function of each sub-box's lowest row is least."""
        row = boxes.bound.argmin(1)
        points, rows = [(boxes.lower + boxes.upper) / 2], [row]
        if matrix is not None:
            slope = matrix[torch.arange(len(row)), row]
            points.append(torch.where(slope > 0, boxes.lower, boxes.upper))
            rows.append(row)
        x = self._descent.inside(torch.cat(points).reshape(-1, *self._shape))
        with torch.no_grad():
            margins = self._descent.margins(x).amin(1)
        lowest = int(margins.nan_to_num(torch.inf).argmin())
        if float(margins[lowest]) <= 0:
            return x[lowest].clone()
        starts, steps = self._settings.attack_starts, self._settings.attack_steps
        return self._descent.search(x, torch.cat(rows), starts=starts, steps=steps) if starts else None

    def _box(self, boxes: SubBoxes) -> Box:
        return Box(boxes.lower.reshape(-1, *self._shape), boxes.upper.reshape(-1, *self._shape))

    def _specification(self, boxes: SubBoxes) -> Tensor:
        return self._spec.expand(len(boxes), -1, -1)

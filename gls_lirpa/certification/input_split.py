"""Branch and bound over the input box: complete, and fast where few inputs vary.

Sub-boxes are bounded many at a time, by IBP where that suffices and by CROWN otherwise; what is left is cut
down by CROWN's linear functions and halved, the lowest bound first. A margin's bound is the lowest of
all sub-boxes. Centres and the corners where the linear functions are least are tried as counterexamples.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Box, margin_spec
from gls_lirpa.certification.branch_attack import Descent
from gls_lirpa.certification.branch_tree import Outcome
from gls_lirpa.certification.incomplete import crossed
from gls_lirpa.certification.input_boxes import Leaves, clipped, halves, joined
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from gls_lirpa.engine.linear import linear_bounds
from gls_lirpa.errors import ConfigError
from gls_lirpa.relaxations import get_relaxation

AIM = {torch.float32: 4e-5, torch.float64: 1e-9}
"""Sub-boxes are bounded until above AIM · max(1, |f|), twice what counts as a proof in float32. Smaller than
in the ReLU tree, because outputs of control networks are often small themselves."""

FEW = 8
"""Inputs up to which the search has all the time; with more of them half, the ReLU tree has the rest."""

MANY = 32
"""Inputs beyond which halving them one by one is hopeless."""

_ROUND = 0.5
"""Seconds that one round of bounds may take: a time limit is noticed between rounds."""


@dataclass(frozen=True)
class InputSettings:
    """``max_nodes``: sub-boxes bounded per sample, the root included; ``batch_size``: bounded at once."""

    max_nodes: int | None = None
    batch_size: int = 512
    attack_starts: int = 4
    attack_steps: int = 5

    def __post_init__(self) -> None:
        if self.max_nodes is not None and self.max_nodes < 1:
            raise ConfigError(f"expected max_nodes >= 1 or None, got {self.max_nodes}")
        if self.batch_size < 2:
            raise ConfigError(f"expected batch_size >= 2, got {self.batch_size}")


class InputSplit:
    """The stage ``input-split``.

    >>> from torch import nn
    >>> from gls_lirpa.engine.bounds import BoundEngine
    >>> from gls_lirpa.base.boxes import linf_box
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    >>> x = torch.rand(1, 1, 2, 2)
    >>> label, box = model(x).argmax(1), linf_box(x, 0.01)
    >>> samples = OpenSamples(torch.arange(1), x, label, box, torch.full((1, 2), -1.0), torch.zeros(1, 2).bool())
    >>> found = InputSplit()(Subject(model, BoundEngine(model, x)), samples, timeout=10.0)
    >>> bool((found.lower > 0).all()), found.exhausted
    (True, [False])
    """

    name = "input-split"
    batch = 1
    max_inputs = MANY

    def __init__(self, settings: InputSettings | None = None) -> None:
        self.settings = InputSettings() if settings is None else settings

    def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
        lower = torch.full_like(samples.lower, -torch.inf)
        counterexamples: list[Tensor | None] = []
        exhausted: list[bool] = []
        for i in range(len(samples)):
            box = samples.box[i : i + 1]
            free = int((box.upper > box.lower).sum())
            deadline = time.monotonic() + timeout * (1.0 if free <= FEW else 0.5)
            rows = (~samples.proven[i]).nonzero().flatten()
            spec = margin_spec(samples.labels[i : i + 1], subject.engine.classes, samples.x.dtype)[0]
            outcome = _Search(subject, box, spec[rows], samples.lower[i][rows], deadline, self.settings).run()
            lower[i, rows] = outcome.lower.to(lower)
            counterexamples.append(outcome.counterexample)
            exhausted.append(outcome.exhausted)
        return Findings(lower, counterexamples, exhausted)


class _Search:
    """One sample. ``closed``: the lowest bound of each row over all sub-boxes that are done with."""

    def __init__(
        self, subject: Subject, box: Box, spec: Tensor, known: Tensor, deadline: float, settings: InputSettings
    ) -> None:
        self._subject = subject
        self._settings = settings
        self._spec = spec
        self._known = known.double()
        self._deadline = deadline
        self._shape = box.lower.shape[1:]
        self._descent = Descent(subject.model, box, spec)
        self._lower, self._upper = box.lower.flatten(1), box.upper.flatten(1)
        self._width = (self._upper - self._lower)[0]
        with torch.no_grad():
            size = float(subject.model(box.center).abs().max())
        self._target = AIM[box.lower.dtype] * max(1.0, size)
        self._closed = torch.full_like(self._known, torch.inf)
        self._nodes = 0
        self._pace = 1e-2

    def run(self) -> Outcome:
        depth = torch.zeros(1, dtype=torch.int64)
        root = Leaves(self._lower, self._upper, self._known.to(self._lower)[None], self._lower * math.nan, depth)
        open_leaves, found = self._bounded(root)
        stuck = False
        while found is None and len(open_leaves) and not self._ended():
            chosen = open_leaves.bound.amin(1).argsort(stable=True)[: self._batch() // 2]
            rest = torch.ones(len(open_leaves), dtype=torch.bool)
            rest[chosen] = False
            children, possible = halves(open_leaves[chosen], self._width)
            whole = open_leaves[chosen[~possible]]
            if len(whole):  # no number lies between the ends of any input
                stuck = True
                self._close(whole.bound)
            others = open_leaves[rest]
            if len(children):
                left, found = self._bounded(children)
                others = joined([others, left])
            open_leaves = others
        lower = torch.minimum(self._closed, open_leaves.bound.double().amin(0)) if len(open_leaves) else self._closed
        ended = found is None and len(open_leaves) > 0 and not stuck
        return Outcome(torch.maximum(lower, self._known), found, ended, self._nodes)

    def _ended(self) -> bool:
        limit = self._settings.max_nodes
        # Room for both halves of one sub-box, or they would not be bounded and the bound not be that of all.
        return time.monotonic() > self._deadline or (limit is not None and self._nodes + 2 > limit)

    def _batch(self) -> int:
        """How many to bound at once: even, within the limits of time and nodes."""
        left = min(_ROUND, max(self._deadline - time.monotonic(), 0.0))
        count = min(self._settings.batch_size, max(2, int(left / self._pace)))
        if self._settings.max_nodes is not None:
            count = min(count, self._settings.max_nodes - self._nodes)
        return max(2, count - count % 2)

    def _bounded(self, leaves: Leaves) -> tuple[Leaves, Tensor | None]:
        """The leaves that stay open, bounded and cut down, and a counterexample if one was met."""
        started, count = time.monotonic(), len(leaves)
        self._nodes += count
        leaves = self._improved(leaves, *self._ibp(leaves))
        leaves = self._still_open(leaves)
        found: Tensor | None = None
        if len(leaves):
            box = self._box(leaves)
            linear = linear_bounds(self._subject.engine, box, self._specification(leaves))
            bound = torch.where(crossed(linear.bounds).unsqueeze(1), -torch.inf, linear.bounds.lower)
            leaves = self._improved(leaves, bound, linear.matrix)
            found = self._counterexample(leaves, linear.matrix)
            odd = ~torch.isfinite(bound)
            is_open = (leaves.bound <= self._target).any(1)
            if linear.matrix is not None and linear.offset is not None:
                # Where the bound is not a finite number, neither is its function to be trusted.
                offset = torch.where(odd, torch.nan, linear.offset)[is_open]
                leaves, matrix = self._still_open(leaves), linear.matrix[is_open]
                leaves = self._cut(leaves, matrix, offset)
            else:
                leaves = self._still_open(leaves)
        self._pace = max(1e-6, (time.monotonic() - started) / count)
        return leaves, found

    def _ibp(self, leaves: Leaves) -> tuple[Tensor, None]:
        bounds = self._subject.engine.bounds(self._box(leaves), self._specification(leaves), get_relaxation("ibp"))
        return torch.where(crossed(bounds).unsqueeze(1), -torch.inf, bounds.lower), None

    def _improved(self, leaves: Leaves, bound: Tensor, matrix: Tensor | None) -> Leaves:
        """With the better of two bounds, which both hold; one that is no number counts as none."""
        best = torch.maximum(leaves.bound, torch.where(torch.isfinite(bound), bound, -torch.inf))
        smear = leaves.smear
        if matrix is not None:
            is_open = (best <= self._target).unsqueeze(2)
            smear = (matrix.abs() * is_open).sum(1) * (leaves.upper - leaves.lower)
        return Leaves(leaves.lower, leaves.upper, best, smear, leaves.depth)

    def _still_open(self, leaves: Leaves) -> Leaves:
        done = (leaves.bound > self._target).all(1)
        self._close(leaves.bound[done])
        return leaves[~done]

    def _cut(self, leaves: Leaves, matrix: Tensor, offset: Tensor) -> Leaves:
        """Over what is cut off every open row is above the target, every other one above its bound."""
        smaller, changed = clipped(leaves, matrix, offset, self._target)
        self._close(leaves.bound[changed].clamp(min=self._target))
        return smaller

    def _close(self, bound: Tensor) -> None:
        if len(bound):
            self._closed = torch.minimum(self._closed, bound.double().amin(0))

    def _counterexample(self, leaves: Leaves, matrix: Tensor | None) -> Tensor | None:
        """From the centres, and from where the linear function of each sub-box's lowest row is least."""
        row = leaves.bound.argmin(1)
        points, rows = [(leaves.lower + leaves.upper) / 2], [row]
        if matrix is not None:
            slope = matrix[torch.arange(len(row)), row]
            points.append(torch.where(slope > 0, leaves.lower, leaves.upper))
            rows.append(row)
        x = self._descent.inside(torch.cat(points).reshape(-1, *self._shape))
        with torch.no_grad():
            margins = self._descent.margins(x).amin(1)
        lowest = int(margins.nan_to_num(torch.inf).argmin())
        if float(margins[lowest]) <= 0:
            return x[lowest].clone()
        starts, steps = self._settings.attack_starts, self._settings.attack_steps
        return self._descent.search(x, torch.cat(rows), starts=starts, steps=steps) if starts else None

    def _box(self, leaves: Leaves) -> Box:
        return Box(leaves.lower.reshape(-1, *self._shape), leaves.upper.reshape(-1, *self._shape))

    def _specification(self, leaves: Leaves) -> Tensor:
        return self._spec.expand(len(leaves), -1, -1)

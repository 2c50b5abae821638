"""Sub-boxes of an input box: halves that share an endpoint, and what linear bounds cut off from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLACK = {torch.float32: 2.0**-19, torch.float64: 2.0**-48}
"""Rounding allowed for in a linear function, as a share of the sizes of its terms: 16 units of its dtype."""


@dataclass(frozen=True)
class SubBoxes:
    """Sub-boxes (n, inputs) and the best bounds (n, rows) proven over each; ``depth`` (n): splits behind them.

    ``smear`` (n, inputs): how much each input contributes to the gap of the linear bounds of open rows.
    """

    lower: Tensor
    upper: Tensor
    bound: Tensor
    smear: Tensor
    depth: Tensor

    def __len__(self) -> int:
        return len(self.lower)

    def __getitem__(self, index: Tensor) -> SubBoxes:
        return SubBoxes(self.lower[index], self.upper[index], self.bound[index], self.smear[index], self.depth[index])


def joined(parts: list[SubBoxes]) -> SubBoxes:
    """All boxes of some parts."""
    fields = ("lower", "upper", "bound", "smear", "depth")
    return SubBoxes(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))


def halves(boxes: SubBoxes, width: Tensor) -> tuple[SubBoxes, Tensor]:
    """Both halves of every sub-box that can be split, all first halves before all second ones; which could be.

    The input with the largest smear is halved; at every fourth depth the one that is widest in units of
    ``width``, the root's, so that no input is left whole forever. The halves share their endpoint, so
    together they are the sub-box.

    >>> one = torch.ones(1, 1)
    >>> children, whole = halves(SubBoxes(-one, one, -one, one, torch.zeros(1).long()), 2 * one[0])
    >>> children.lower.flatten().tolist(), children.upper.flatten().tolist(), whole.tolist()
    ([-1.0, 0.0], [0.0, 1.0], [True])
    """
    middle = boxes.lower + (boxes.upper - boxes.lower) / 2
    splittable = (middle > boxes.lower) & (middle < boxes.upper)
    relative = (boxes.upper - boxes.lower) / torch.where(width > 0, width, 1.0)
    by_width = (boxes.depth % 4 == 3).unsqueeze(1) | ~torch.isfinite(boxes.smear).all(1, keepdim=True)
    # Among inputs without any smear, the widest.
    score = torch.where(by_width, relative, boxes.smear + 1e-12 * relative)
    score = torch.where(splittable, score, -1.0)
    possible = splittable.any(1)
    chosen, middle = boxes[possible], middle[possible]
    index = score[possible].argmax(1, keepdim=True)
    cut = middle.gather(1, index)
    below = chosen.upper.scatter(1, index, cut)
    above = chosen.lower.scatter(1, index, cut)
    depth = chosen.depth + 1
    first = SubBoxes(chosen.lower, below, chosen.bound, chosen.smear, depth)
    second = SubBoxes(above, chosen.upper, chosen.bound, chosen.smear, depth)
    return joined([first, second]), possible


def clipped(boxes: SubBoxes, matrix: Tensor, offset: Tensor, target: float) -> tuple[SubBoxes, Tensor]:
    """SubBoxes without what their linear bounds prove, and the boxes (n) that lost something.

    Where a row's bound over the sub-box is not above ``target``, only inputs with A x + b ≤ ``target`` are
    left to it: over the box, x_i is limited by A_i x_i ≤ target − b − Σ_{j≠i} min(A_j x_j). A sub-box
    shrinks to the hull of what is left to any of its open rows.

    >>> row = SubBoxes(torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), -0.5), torch.ones(1, 1), torch.zeros(1))
    >>> smaller, changed = clipped(row, torch.ones(1, 1, 1), torch.full((1, 1), -0.5), 0.0)
    >>> round(smaller.upper.item(), 4), changed.tolist()
    (0.5, [True])
    """
    dtype = boxes.lower.dtype
    exact, shift = matrix.double(), offset.double()
    low, high = boxes.lower.double().unsqueeze(1), boxes.upper.double().unsqueeze(1)
    least = torch.minimum(exact * low, exact * high)
    size = (exact.abs() * torch.maximum(low.abs(), high.abs())).sum(2) + shift.abs()
    room = target + SLACK[dtype] * size - shift - least.sum(2)
    limit = (room.unsqueeze(2) + least) / exact
    is_open = (boxes.bound <= target).unsqueeze(2)
    usable = is_open & torch.isfinite(limit)
    upper = torch.where(usable & (exact > 0), limit, torch.where(is_open, torch.inf, -torch.inf)).amax(1)
    lower = torch.where(usable & (exact < 0), limit, torch.where(is_open, -torch.inf, torch.inf)).amin(1)
    new_upper = torch.minimum(boxes.upper, _outward(upper, dtype, torch.inf))
    new_lower = torch.maximum(boxes.lower, _outward(lower, dtype, -torch.inf))
    # Nothing is left only where a bound and its linear function disagree: then the sub-box stays as it is.
    keep = ~(new_lower <= new_upper).all(1, keepdim=True)
    new_lower, new_upper = torch.where(keep, boxes.lower, new_lower), torch.where(keep, boxes.upper, new_upper)
    changed = ((new_lower > boxes.lower) | (new_upper < boxes.upper)).any(1)
    return SubBoxes(new_lower, new_upper, boxes.bound, boxes.smear, boxes.depth), changed


def _outward(value: Tensor, dtype: torch.dtype, direction: float) -> Tensor:
    rounded = value.to(dtype)
    return torch.nextafter(rounded, torch.full_like(rounded, direction))

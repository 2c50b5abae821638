"""An attack by many points that exchange windows of their inputs.

A network of convolutions is nearly a sum over positions of the image. Descent from one start settles every position on
its own and keeps what it came to, good here and bad there; a point that takes a window from another and descends
again is often better than both. On PGD-trained networks this finds margins far below those of any number of
independent starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from gls_lirpa.attacks import Forward, ascend, random_points, uniform
from gls_lirpa.base.boxes import Box

FIRST_STEPS = tuple(2.0 * (1 - step / 40) for step in range(40))
STEPS = (1.0, 0.5, 0.2, 0.1)
"""Sizes of the steps from random points and after an exchange, in units of each input's box radius."""

_SMALLEST, _LARGEST = 1 / 7, 4 / 7
"""Sides of a window as a share of the input's: from about one receptive field of a cnn3 to half of the image."""

_RANDOM = 0.3
"""Share of windows that are filled with a random corner of the box, so that the points do not become all alike."""

_RIVALS = 3
"""A window's values come from the point of lowest margin among three drawn at random."""

_REVIEW = 50
"""Every fiftieth round the fall of the lowest margin over the last fifty is extrapolated to the last round; the attack
ends where that stays above 0."""


def exchange_attack(
    margins: Forward,
    box: Box,
    *,
    population: int,
    rounds: int,
    generator: torch.Generator,
    deadline: float = math.inf,
) -> Tensor | None:
    """A point of the box of one sample at which one of the ``margins`` (n, rows) is negative, or None.

    Ends after ``rounds`` exchanges, where they lead nowhere, or at ``deadline`` (of ``time.monotonic``).

    >>> box = Box(torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4))
    >>> generator = torch.Generator().manual_seed(0)
    >>> found = exchange_attack(lambda x: 15.5 - x.flatten(1).sum(1, keepdim=True), box, population=4, rounds=2,
    ...                   generator=generator)
    >>> found.sum().item()
    16.0
    """
    shape, every = box.lower.shape[1:], box[torch.zeros(population, dtype=torch.long)]
    points, values = _lowered(margins, random_points(every, generator=generator), every, FIRST_STEPS, deadline)
    reached = [float(values.min())]
    while len(reached) <= rounds and reached[-1] >= 0 and time.monotonic() <= deadline and _hopeful(reached, rounds):
        others = points[_lowest_of_some(values, generator)]
        corners = torch.where(uniform((population, *shape), points, generator) < 0.5, box.lower, box.upper)
        random = uniform((population, *[1] * len(shape)), points, generator) < _RANDOM
        inside = _windows(population, shape, points, generator)
        given = torch.where(inside, torch.where(random, corners, others), points)
        tried, lowered = _lowered(margins, given, every, STEPS, deadline)
        better = lowered < values
        points[better], values[better] = tried[better], lowered[better]
        reached.append(float(values.min()))
    lowest = int(values.argmin())
    return points[lowest].clone() if float(values[lowest]) < 0 else None


def _hopeful(reached: list[float], rounds: int) -> bool:
    """Whether the margins ``reached`` after every round so far may become negative within all ``rounds``."""
    done = len(reached) - 1
    if done < _REVIEW or done % _REVIEW:
        return True
    return reached[-1] < (reached[-1 - _REVIEW] - reached[-1]) / _REVIEW * (rounds - done)


def _lowered(
    margins: Forward, points: Tensor, box: Box, steps: Sequence[float], deadline: float
) -> tuple[Tensor, Tensor]:
    """The lowest of the points on the way down from each of ``points``, and their lowest margins."""
    best, worst = points.clone(), points.new_full((len(points),), torch.inf)

    def keep(at: Tensor, values: Tensor) -> Tensor:
        better = -values < worst
        best[better], worst[better] = at[better], -values[better]
        return torch.full_like(better, time.monotonic() <= deadline)

    last = ascend(margins, points, points, box, sizes=steps, objective=lambda values, _: -values.amin(1), watch=keep)
    if len(last):
        with torch.no_grad():
            keep(last, -margins(last).amin(1))
    return best, worst


def _lowest_of_some(values: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(len(values), (_RIVALS, len(values)), generator=generator).to(values.device)
    return drawn.gather(0, values[drawn].argmin(0, keepdim=True))[0]


def _windows(count: int, shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Masks (count, *shape) of one window each, the same in all channels (the first of several dimensions)."""
    inside = torch.ones(count, *[1] * len(shape), dtype=torch.bool, device=like.device)
    share = _SMALLEST + (_LARGEST - _SMALLEST) * uniform((count, 1), like, generator)
    for axis in range(min(1, len(shape) - 1), len(shape)):
        side = shape[axis]
        size = (share * side).ceil()
        start = (uniform((count, 1), like, generator) * (side + size - 1)).floor() - size + 1
        position = torch.arange(side, device=like.device)
        along = (position >= start) & (position < start + size)
        inside = inside & along.reshape(count, *[side if other == axis else 1 for other in range(len(shape))])
    return inside

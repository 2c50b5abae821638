"""ε, learning rate and σ as pure functions of the epoch.

An epoch may be fractional: step ``s`` of ``n`` in epoch ``k`` (counted from 0) is ``k + s / n``.
Nothing here keeps state, so a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gls_lirpa.base.checks import require
from gls_lirpa.base.registry import nearest
from gls_lirpa.errors import ConfigError

SHAPES = ("smooth", "linear", "none")

# The 'smooth' curve of the IBP literature: a power of 4 over the first quarter, then a line.
_POWER = 4
_JOINT = 0.25


@dataclass(frozen=True)
class EpsSchedule:
    """ε: 0 for ``warmup_epochs``, then annealed over ``anneal_epochs``, then ``target`` for good.

    ``most``: the largest radius that makes sense, which is 1 for pixels in ℓ∞.

    With u the annealed fraction in [0, 1]:

    * ``linear``: ε = target · u
    * ``smooth``: ε = a·u⁴ for u ≤ ¼, then the tangent line a·¼⁴ + 4a·¼³·(u − ¼), with ``a`` such
      that ε(1) = target; value and slope are continuous at the joint
    * ``none``: ε = target as soon as the warm-up ends; ``anneal_epochs`` is not used

    >>> eps = EpsSchedule(0.3, warmup_epochs=1, anneal_epochs=10, shape="linear")
    >>> [eps.at(epoch) for epoch in (0, 1, 6, 11, 70)]
    [0.0, 0.0, 0.15, 0.3, 0.3]
    """

    target: float
    warmup_epochs: float = 0.0
    anneal_epochs: float = 0.0
    shape: str = "smooth"
    most: float = 1.0

    def __post_init__(self) -> None:
        require(0.0 <= self.target <= self.most, f"0 <= eps <= {self.most:g}", self.target)
        for name in ("warmup_epochs", "anneal_epochs"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"{name} >= 0", value)
        if self.shape not in SHAPES:
            hint = nearest(str(self.shape), list(SHAPES))
            raise ConfigError(f"unknown eps shape {self.shape!r}: expected one of {', '.join(SHAPES)}{hint}")

    @property
    def end(self) -> float:
        """The first epoch from which ε equals its target."""
        return self.warmup_epochs + (0.0 if self.shape == "none" else self.anneal_epochs)

    def at(self, epoch: float) -> float:
        """ε at a (fractional) epoch."""
        if epoch >= self.end:
            return self.target
        if epoch <= self.warmup_epochs:
            return 0.0
        u = (epoch - self.warmup_epochs) / self.anneal_epochs
        if self.shape == "linear":
            return min(self.target * u, self.target)
        slope = _POWER * _JOINT ** (_POWER - 1)
        scale = self.target / (_JOINT**_POWER + slope * (1 - _JOINT))
        value = u**_POWER if u <= _JOINT else _JOINT**_POWER + slope * (u - _JOINT)
        return min(scale * value, self.target)


@dataclass(frozen=True)
class StepDecay:
    """base · factorᵏ, where k counts the milestones m with m <= epoch.

    Milestone 50 means: 50 epochs (0 … 49) run before that decay.

    >>> lr = StepDecay(5e-4, factor=0.2, milestones=(50, 60))
    >>> lr.at(49.99), lr.at(50) == 5e-4 * 0.2
    (0.0005, True)
    """

    base: float
    factor: float = 1.0
    milestones: Sequence[float] = ()

    def __post_init__(self) -> None:
        require(math.isfinite(self.base) and self.base >= 0, "base >= 0", self.base)
        require(0.0 < self.factor <= 1.0, "0 < factor <= 1", self.factor)
        milestones = tuple(self.milestones)
        object.__setattr__(self, "milestones", milestones)
        for milestone in milestones:
            require(math.isfinite(milestone) and milestone >= 0, "milestones >= 0", milestone)
        require(list(milestones) == sorted(set(milestones)), "increasing milestones", milestones)

    def at(self, epoch: float) -> float:
        """The value at a (fractional) epoch."""
        passed = sum(milestone <= epoch for milestone in self.milestones)
        return self.base * self.factor**passed

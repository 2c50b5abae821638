"""What is certified and how."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import gls_lirpa.certification.attack
import gls_lirpa.certification.complete
import gls_lirpa.certification.incomplete  # noqa: F401  (all three register their stages)
from gls_lirpa.base.balls import check_norm
from gls_lirpa.base.boxes import check_eps
from gls_lirpa.base.checks import require
from gls_lirpa.certification.stage import STAGES, StageOptions
from gls_lirpa.errors import ConfigError
from gls_lirpa.relaxations import ball_relaxations

DEFAULT_STAGES = ("ibp", "pgd", "crown-ibp", "crown", "alpha-crown", "input-split", "bab")
"""By cost; splitting inputs is left out where more than a few vary. One IBP pass costs two forward passes, the
attack hundreds: with IBP before it, 1,000 MNIST images on an IBP-trained cnn3 took 2 instead of 21 s of processor
time up to crown, with the same verdicts."""


def default_stages(norm: str | float) -> tuple[str, ...]:
    """Those that are used where none are named: for ℓ2 balls no attack and no complete search.

    >>> default_stages("l2")
    ('ibp', 'crown-ibp', 'crown')
    """
    usable = ball_relaxations() if check_norm(norm) == "l2" else DEFAULT_STAGES
    return tuple(name for name in DEFAULT_STAGES if name in usable)


@dataclass(frozen=True)
class Settings:
    """All that verdicts depend on.

    ``eps``: the radius, of balls in the ``norm`` (linf or l2); ``stages``: in order; ``timeout``: seconds per sample
    over all of them; ``seed``: of the attack and of the complete searches; ``cross_check``: attack what was verified
    and bound what was attacked; ``options``: of the stages.

    >>> Settings(eps=0.1, stages=("IBP", "deeppoly")).stages
    ('ibp', 'crown')
    """

    eps: float
    stages: tuple[str, ...] = DEFAULT_STAGES
    timeout: float = 60.0
    seed: int = 0
    cross_check: bool = False
    options: StageOptions = field(default_factory=StageOptions)
    norm: str = "linf"

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", check_norm(self.norm))
        object.__setattr__(self, "eps", check_eps(self.eps, self.norm))
        names = tuple(STAGES.canonical(name) for name in self.stages)
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"expected one or more different stages, got {', '.join(self.stages) or 'none'}")
        object.__setattr__(self, "stages", names)
        require(0 < self.timeout < math.inf, "a timeout > 0 in seconds", self.timeout)
        require(0 <= self.seed < 2**61 - 1, "0 <= seed < 2**61 - 1", self.seed)
        if self.norm == "l2":
            self._check_l2()

    def _check_l2(self) -> None:
        usable = ball_relaxations()
        for name in self.stages:
            if name not in usable:
                expected = f"expected some of {', '.join(usable)}"
                raise ConfigError(f"stage {name!r} works in linf boxes, not in l2 balls: {expected}")
        if self.cross_check:
            raise ConfigError("cross_check attacks in linf boxes: it is not for l2 balls")

    def told(self) -> dict[str, Any]:
        """As plain values; the usual norm is left out, as in records from before there was another."""
        values = dataclasses.asdict(self)
        return {key: value for key, value in values.items() if (key, value) != ("norm", "linf")}

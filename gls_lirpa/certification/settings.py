"""What is certified and how."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import gls_lirpa.certification.attack
import gls_lirpa.certification.complete
import gls_lirpa.certification.incomplete  # noqa: F401  (all three register their stages)
from gls_lirpa.base.boxes import check_eps
from gls_lirpa.certification.stage import STAGES, StageOptions
from gls_lirpa.errors import ConfigError

DEFAULT_STAGES = ("ibp", "pgd", "crown-ibp", "crown", "alpha-crown", "input-split", "bab")
"""By cost; splitting inputs is left out where more than a few vary. One IBP pass costs two forward passes, the
attack hundreds: with IBP before it, 1,000 MNIST images on an IBP-trained cnn3 took 2 instead of 21 s of processor
time up to crown, with the same verdicts."""


@dataclass(frozen=True)
class Settings:
    """Radius, stages in order, seconds per sample over all stages, seed; all that verdicts depend on.

    >>> Settings(eps=0.1, stages=("IBP", "deeppoly")).stages
    ('ibp', 'crown')
    """

    eps: float
    stages: tuple[str, ...] = DEFAULT_STAGES
    timeout: float = 60.0
    seed: int = 0
    cross_check: bool = False
    options: StageOptions = field(default_factory=StageOptions)

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", check_eps(self.eps))
        names = tuple(STAGES.canonical(name) for name in self.stages)
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"expected one or more different stages, got {', '.join(self.stages) or 'none'}")
        object.__setattr__(self, "stages", names)
        if not math.isfinite(self.timeout) or self.timeout <= 0:
            raise ConfigError(f"expected a timeout > 0 in seconds, got {self.timeout}")

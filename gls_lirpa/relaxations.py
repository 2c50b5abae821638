"""Convex relaxations by name: small records over the engine's primitives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.base.registry import Registry
from gls_lirpa.engine import rows
from gls_lirpa.engine.batchnorm import Statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.relaxation import MembersFunction, Relaxation
from gls_lirpa.errors import ConfigError

__all__ = ["RELAXATIONS", "Relaxation", "get_relaxation"]


@dataclass(frozen=True)
class _Relaxed:
    method: str
    rows: MembersFunction

    def __call__(self, engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics) -> Bounds:
        return engine.relaxed(box, spec, self.method, statistics)


@dataclass(frozen=True)
class _Alpha:
    iterations: int | None

    @property
    def rows(self) -> MembersFunction:
        return partial(rows.alpha_crown, iterations=self.iterations)

    def __call__(self, engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics) -> Bounds:
        return engine.alpha(box, spec, statistics, iterations=self.iterations)


def _lirpa(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics, *, method: str) -> Bounds:
    return engine.lirpa(box, spec, method, statistics)


def _hbox(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics) -> Bounds:
    return engine.hbox(box, spec, statistics)


RELAXATIONS: Registry[Relaxation] = Registry("relaxation")
RELAXATIONS.register("ibp", Relaxation("ibp", _Relaxed("IBP", rows.ibp), light=True), aliases=("box", "interval"))
RELAXATIONS.register("hbox", Relaxation("hbox", _hbox), aliases=("hybrid-box",))
RELAXATIONS.register("crown-ibp", Relaxation("crown-ibp", _Relaxed("CROWN-IBP", partial(rows.crown, tighten=False))))
RELAXATIONS.register(
    "crown", Relaxation("crown", _Relaxed("CROWN", partial(rows.crown, tighten=True))), aliases=("deeppoly",)
)
RELAXATIONS.register("crown-plain", Relaxation("crown-plain", partial(_lirpa, method="CROWN")))
RELAXATIONS.register(
    "alpha-crown",
    Relaxation("alpha-crown", _Alpha(20), differentiable=False),
    aliases=("α-crown", "crown-optimized"),
)
RELAXATIONS.register(
    "alpha-crown-step",
    Relaxation("alpha-crown-step", _Alpha(None), differentiable=False),
    aliases=("α-crown-step",),
)


def get_relaxation(name: str | Relaxation, *, iterations: int | None = None) -> Relaxation:
    """A relaxation by name; ``iterations`` sets the slope optimisation steps of ``alpha-crown``.

    >>> get_relaxation("DeepPoly").name
    'crown'
    """
    relaxation = RELAXATIONS.get(name) if isinstance(name, str) else name
    if iterations is None:
        return relaxation
    if relaxation.name != "alpha-crown" or iterations < 1:
        raise ConfigError(
            f"iterations must be >= 1 and apply to alpha-crown alone, got {iterations} for {relaxation.name}"
        )
    return replace(relaxation, bound=_Alpha(iterations))

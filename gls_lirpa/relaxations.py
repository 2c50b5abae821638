"""Convex relaxations by name: small records over the engine's primitives."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.base.registry import Registry
from gls_lirpa.engine.batchnorm import Statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.relaxation import Relaxation
from gls_lirpa.errors import ConfigError

__all__ = ["RELAXATIONS", "Relaxation", "get_relaxation"]


def _relaxed(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics, *, method: str) -> Bounds:
    return engine.relaxed(box, spec, method, statistics)


def _lirpa(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics, *, method: str) -> Bounds:
    return engine.lirpa(box, spec, method, statistics)


def _hbox(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics) -> Bounds:
    return engine.hbox(box, spec, statistics)


def _alpha(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics, *, iterations: int | None) -> Bounds:
    return engine.alpha(box, spec, statistics, iterations=iterations)


RELAXATIONS: Registry[Relaxation] = Registry("relaxation")
RELAXATIONS.register("ibp", Relaxation("ibp", partial(_relaxed, method="IBP"), light=True), aliases=("box", "interval"))
RELAXATIONS.register("hbox", Relaxation("hbox", _hbox), aliases=("hybrid-box",))
RELAXATIONS.register("crown-ibp", Relaxation("crown-ibp", partial(_relaxed, method="CROWN-IBP")))
RELAXATIONS.register("crown", Relaxation("crown", partial(_relaxed, method="CROWN")), aliases=("deeppoly",))
RELAXATIONS.register("crown-plain", Relaxation("crown-plain", partial(_lirpa, method="CROWN")))
RELAXATIONS.register(
    "alpha-crown",
    Relaxation("alpha-crown", partial(_alpha, iterations=20), differentiable=False),
    aliases=("α-crown", "crown-optimized"),
)
RELAXATIONS.register(
    "alpha-crown-step",
    Relaxation("alpha-crown-step", partial(_alpha, iterations=None), differentiable=False),
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
    return replace(relaxation, bound=partial(_alpha, iterations=iterations))

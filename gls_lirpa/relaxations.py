"""Convex relaxations by name: small records over the engine's primitives.

A new one is a function of the engine's primitives and one ``RELAXATIONS.register`` line; configurations, the command
line, certification stages, the doctor and the tests' tables take it from there.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.base.options import Option, Options
from gls_lirpa.base.registry import Registry
from gls_lirpa.engine import rows
from gls_lirpa.engine.batchnorm import Statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.relaxation import ByRows, Relaxation
from gls_lirpa.errors import ConfigError

__all__ = ["RELAXATIONS", "Relaxation", "ball_relaxations", "drawn_relaxations", "get_relaxation"]


def _relaxed(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics, *, method: str) -> Bounds:
    return engine.relaxed(box, spec, method, statistics)


def _lirpa(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics, *, method: str) -> Bounds:
    return engine.lirpa(box, spec, method, statistics)


def _hbox(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics) -> Bounds:
    return engine.hbox(box, spec, statistics)


def _alpha(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics, *, iterations: int | None) -> Bounds:
    return engine.alpha(box, spec, statistics, iterations=iterations)


_RELAXED, _ALPHA = ByRows(_relaxed, rows.relaxed), ByRows(_alpha, rows.alpha_crown)

RELAXATIONS: Registry[Relaxation] = Registry("relaxation")


def _register(relaxation: Relaxation, *aliases: str) -> None:
    RELAXATIONS.register(relaxation.name, relaxation, aliases=aliases)


# The engine cuts a batch into chunks that fit its memory budget. A stage's batch is as small as still fills a chunk
# on a cnn3, so that verdicts appear early.
_register(
    Relaxation(
        "ibp",
        partial(_RELAXED, method="IBP"),
        light=True,
        balls=True,
        curved=True,
        batch=256,
        help="interval arithmetic",
    ),
    *("box", "interval"),
)
_register(Relaxation("hbox", _hbox, help="hybrid zonotopes"), "hybrid-box")
_register(
    Relaxation(
        "crown-ibp",
        partial(_RELAXED, method="CROWN-IBP"),
        balls=True,
        curved=True,
        batch=64,
        help="CROWN over interval bounds",
    ),
)
_register(
    Relaxation(
        "crown",
        partial(_RELAXED, method="CROWN"),
        balls=True,
        curved=True,
        help="CROWN, intersected with intervals at every layer",
    ),
    "deeppoly",
)
_register(
    Relaxation(
        "crown-plain",
        partial(_lirpa, method="CROWN"),
        balls=True,
        curved=True,
        drawn=False,
        help="CROWN as auto_LiRPA computes it",
    )
)
_register(
    Relaxation(
        "alpha-crown",
        partial(_ALPHA, iterations=20),
        differentiable=False,
        help="CROWN with optimised slopes",
        options=Options(Option("iterations", int, "optimisation steps of the slopes", default=20, least=1)),
        refines="crown",
        # auto_LiRPA's optimisation does not work on every network in float64.
        fallback="crown",
    ),
    *("α-crown", "crown-optimized"),
)
_register(
    Relaxation(
        "alpha-crown-step",
        partial(_ALPHA, iterations=None),
        differentiable=False,
        help="CROWN with slopes after one sign step",
        refines="crown",
        fallback="crown",
        drawn=False,
    ),
    "α-crown-step",
)


def drawn_relaxations(*, differentiable: bool = False) -> list[str]:
    """The names of those that pictures show; ``differentiable``: of those alone that networks are trained with.

    >>> drawn_relaxations(), drawn_relaxations(differentiable=True)
    (['ibp', 'hbox', 'crown-ibp', 'crown', 'alpha-crown'], ['ibp', 'hbox', 'crown-ibp', 'crown'])
    """
    every = [RELAXATIONS.get(name) for name in RELAXATIONS]
    return [each.name for each in every if each.drawn and (each.differentiable or not differentiable)]


def ball_relaxations() -> list[str]:
    """The names of those that bound ℓ2 balls.

    >>> ball_relaxations()
    ['ibp', 'crown-ibp', 'crown', 'crown-plain']
    """
    return [name for name in RELAXATIONS if RELAXATIONS.get(name).balls]


def get_relaxation(name: str | Relaxation, *, iterations: int | None = None) -> Relaxation:
    """A relaxation by name; ``iterations`` sets the slope optimisation steps of ``alpha-crown``.

    >>> get_relaxation("DeepPoly").name
    'crown'
    """
    relaxation = RELAXATIONS.get(name) if isinstance(name, str) else name
    if iterations is None:
        return relaxation
    if "iterations" not in relaxation.options or iterations < 1:
        users = ", ".join(name for name in RELAXATIONS if "iterations" in RELAXATIONS.get(name).options)
        raise ConfigError(f"iterations must be >= 1 and apply to {users} alone, got {iterations} for {relaxation.name}")
    return relaxation.configured({"iterations": iterations})

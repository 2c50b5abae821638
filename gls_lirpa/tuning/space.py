"""What is searched over: each method's own options, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gls_lirpa.losses import LOSSES
from gls_lirpa.training.config import TrainConfig


@dataclass(frozen=True)
class Dimension:
    """A number to choose; ``table`` is the field of the configuration that holds it, where it is an option.

    Logarithmic ranges are for scales, others for shares.
    """

    name: str
    low: float
    high: float
    log: bool = False
    table: str | None = None


_COMMON = (Dimension("lr", 5e-4, 2e-2, log=True), Dimension("l1", 1e-7, 1e-4, log=True))
_NATURAL = Dimension("natural_weight", 0.0, 0.5)
_ALPHA = Dimension("alpha", 1e-3, 0.9, log=True, table="loss_options")
_OF_LOSS: dict[str, tuple[Dimension, ...]] = {
    "mtl": (_ALPHA,),
    "cc": (_ALPHA,),
    "exp": (_ALPHA,),
    "distill": (_ALPHA, Dimension("beta", 0.0, 1.0, table="loss_options")),
    "sabr": (Dimension("lam", 0.05, 0.95, table="loss_options"), _NATURAL),
    "staps": (Dimension("lam", 0.05, 0.95, table="loss_options"), _NATURAL),
}
_OF_ESTIMATOR: dict[str, tuple[Dimension, ...]] = {
    "rgs": (Dimension("sigma", 1e-4, 3e-2, log=True, table="estimator_options"),),
    "pgpe": (Dimension("sigma", 1e-4, 3e-2, log=True, table="estimator_options"),),
    "sam": (Dimension("rho", 1e-3, 1e-1, log=True, table="estimator_options"),),
}
_RELATIVE = Dimension("sigma", 1e-3, 3e-1, log=True, table="estimator_options")


def space_of(config: TrainConfig) -> tuple[Dimension, ...]:
    """The dimensions of a method's space.

    >>> [dimension.name for dimension in space_of(TrainConfig(loss="mtl", estimator="rgs"))]
    ['lr', 'l1', 'eps_factor', 'alpha', 'sigma']
    """
    # A box wider than the pixel range is the range.
    factor = Dimension("eps_factor", 1.0, min(2.0, 1.0 / config.eps) if config.eps > 0 else 1.0)
    of_loss = _OF_LOSS.get(LOSSES.canonical(config.loss), (_NATURAL,))
    relative = config.estimator == "rgs" and config.estimator_options.get("relative")
    return (*_COMMON, factor, *of_loss, *((_RELATIVE,) if relative else _OF_ESTIMATOR.get(config.estimator, ())))


def applied(config: TrainConfig, values: dict[str, float]) -> TrainConfig:
    """The configuration with chosen values.

    >>> applied(TrainConfig(loss="mtl"), {"alpha": 0.1, "lr": 0.5}).loss_options["alpha"]
    0.1
    """
    changes: dict[str, Any] = {}
    for dimension in space_of(config):
        if dimension.name not in values:
            continue
        if dimension.table is None:
            changes[dimension.name] = values[dimension.name]
        else:
            changes.setdefault(dimension.table, {})[dimension.name] = values[dimension.name]
    return config.replaced(changes)

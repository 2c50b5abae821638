"""What is searched over: numbers of the training, and the options of its loss and estimator that have a range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gls_lirpa.base.options import Options, Range, Value
from gls_lirpa.bench.suite import scaled
from gls_lirpa.losses import LOSSES
from gls_lirpa.training.config import TrainConfig


@dataclass(frozen=True)
class Dimension:
    """A number to choose in a ``range``; ``table`` is the field of the configuration that holds it, where it is an
    option."""

    name: str
    range: Range
    table: str | None = None


_COMMON = (Dimension("lr", Range(5e-4, 2e-2, log=True)), Dimension("l1", Range(1e-7, 1e-4, log=True)))
_NATURAL = Dimension("natural_weight", Range(0.0, 0.5))


def space_of(config: TrainConfig) -> tuple[Dimension, ...]:
    """The dimensions of a method's space.

    >>> [dimension.name for dimension in space_of(TrainConfig(loss="mtl", estimator="rgs"))]
    ['lr', 'l1', 'epochs', 'eps_factor', 'alpha', 'sigma']
    """
    # The configuration's epochs are the most that a budget allows, and not best for every method.
    epochs = Dimension("epochs", Range(math.ceil(config.epochs / 2), config.epochs, whole=True))
    # A box wider than the pixel range is the range.
    factor = Dimension("eps_factor", Range(1.0, min(2.0, 1.0 / config.eps) if config.eps > 0 else 1.0))
    loss = LOSSES.get(config.loss)
    return (
        *_COMMON,
        epochs,
        factor,
        *_searched(loss.options, config.loss_options, "loss_options"),
        *(() if loss.mixes else (_NATURAL,)),
        *_searched(config.estimator_method.options, config.estimator_options, "estimator_options"),
    )


def _searched(options: Options, chosen: Mapping[str, Value], table: str) -> list[Dimension]:
    found = [(name, option.searched(chosen)) for name, option in options.items()]
    return [Dimension(name, where, table) for name, where in found if where is not None]


def applied(config: TrainConfig, values: dict[str, float], *, share: float = 1.0) -> TrainConfig:
    """The configuration with chosen values, trained for a ``share`` of its epochs.

    >>> applied(TrainConfig(loss="mtl"), {"alpha": 0.1, "lr": 0.5}).loss_options["alpha"]
    0.1
    """
    changes: dict[str, Any] = {}
    for dimension in space_of(config):
        if dimension.name not in values or dimension.name == "epochs":
            continue
        if dimension.table is None:
            changes[dimension.name] = values[dimension.name]
        else:
            changes.setdefault(dimension.table, {})[dimension.name] = values[dimension.name]
    # Epochs bring the rest of the schedule with them.
    return scaled(config.replaced(changes), share * values.get("epochs", config.epochs) / config.epochs)

"""What was published for losses at a dataset and a radius: options, and CTBench's training around them.

CTBench (Mao et al. 2025) trained CNN7 with BatchNorm: learning rate 5e-4, the schedules of the ``literature`` presets,
IBP initialisation with its penalty, and for each loss a :class:`Training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gls_lirpa.base.options import Value

Setting = tuple[str, float]
"""A dataset and a radius ε."""

SAME_RADIUS = 1e-9
"""Radii this close are the same: 2/255 may have been written in decimals."""

T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """What CTBench sets for a loss: ``l1`` weighs the L1 norm, ``robust_weight`` the worst case, and the trained radius
    is ``eps_factor`` times the certified one. From the epoch ``average_from`` on weights are averaged. ``of_cnn7``:
    options of the loss that are for this network alone.
    """

    l1: float = 0.0
    robust_weight: float = 1.0
    eps_factor: float = 1.0
    average_from: float | None = None
    of_cnn7: Mapping[str, Value] = field(default_factory=dict)

    def fields(self, *, net: str) -> dict[str, Any]:
        """As fields of a run's configuration for a network.

        >>> Training(1e-6, 0.7, 2.0, of_cnn7={"relus": 3}).fields(net="cnn3")
        {'l1': 1e-06, 'natural_weight': 0.3, 'eps_factor': 2.0, 'loss_options': {}}
        """
        natural = round(1.0 - self.robust_weight, 6)
        found: dict[str, Any] = {"l1": self.l1, "natural_weight": natural, "eps_factor": self.eps_factor}
        if self.average_from is not None:
            found["average_from"] = self.average_from
        return {**found, "loss_options": dict(self.of_cnn7) if net.startswith("cnn7") else {}}


def at(table: Mapping[Setting, T], dataset: str, eps: float) -> T | None:
    """What a table has for a dataset at radius ``eps``.

    >>> at({("cifar10", 2 / 255): 1}, "cifar10", 0.00784313725)
    1
    """
    return next((table[key] for key in table if key[0] == dataset and abs(key[1] - eps) < SAME_RADIUS), None)

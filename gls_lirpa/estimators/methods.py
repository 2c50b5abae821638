"""Estimators by name: how each is built, its options, and what training must know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gls_lirpa.base.options import Options, Range, Value
from gls_lirpa.base.registry import Registry
from gls_lirpa.errors import ConfigError
from gls_lirpa.estimators.protocol import Estimator


@dataclass(frozen=True)
class EstimatorMethod:
    """An estimator by name: ``build(loss, model, **options)``.

    ``needs_gradient``: of the loss in the weights; ``uses_actors``: takes ``actors``, ``ray_address``,
    ``gpus_per_actor`` and ``seed``. ``recipe``: options where no preset has others. ``decays``: the option that a
    training run decays with the learning rate. ``members``: the option that counts the perturbed networks of a step,
    where a step costs as many times what one of them does: probes of speed take fewer. ``schedule(dataset, large)``:
    fields of a run's configuration that go before a preset's, for a dataset and a small or large ε. ``cold_start``:
    what a user is told who starts from random weights. ``help``: what the command line says of it.
    """

    name: str
    build: Callable[..., Estimator]
    help: str = ""
    options: Options = field(default_factory=Options)
    recipe: Mapping[str, Value] = field(default_factory=dict)
    needs_gradient: bool = True
    uses_actors: bool = False
    decays: str | None = None
    members: str | None = None
    schedule: Callable[[str, bool], Mapping[str, Any]] | None = None
    cold_start: str = ""

    def checked(self, options: Mapping[str, Any]) -> dict[str, Value]:
        """Options in their types; what is unknown or out of range is refused."""
        return self.options.checked(f"estimator {self.name!r}", options)

    def around(self, loss: Any, model: Any, options: Mapping[str, Any], *, placement: Mapping[str, Any]) -> Estimator:
        """The estimator around a loss; ``placement`` is where and from which seed it is computed, if it can be told.

        >>> from torch import nn
        >>> method = ESTIMATORS.get("rgs")
        >>> method.around(lambda: None, nn.Linear(1, 1), {"sigma": 0.1}, placement={"seed": 3}).sigma
        0.1
        """
        if not self.uses_actors and placement.get("actors"):
            users = " or ".join(name for name in ESTIMATORS if ESTIMATORS.get(name).uses_actors)
            raise ConfigError(f"estimator {self.name!r} does not use actors: remove --actors, or use {users}")
        try:
            return self.build(loss, model, **{**self.checked(options), **(placement if self.uses_actors else {})})
        except TypeError as error:
            raise ConfigError(f"estimator {self.name!r}: {error}") from error


ESTIMATORS: Registry[EstimatorMethod] = Registry("estimator")
SIGMA_RANGE = Range(1e-4, 3e-2, log=True)
"""Where a search looks for the standard deviation of a smoothing of the weights."""

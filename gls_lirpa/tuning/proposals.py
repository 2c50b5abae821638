"""Configurations worth trying next, by Optuna; the only code that imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gls_lirpa.base.extras import install_command
from gls_lirpa.base.options import Range
from gls_lirpa.errors import ConfigError
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.tuning.pareto import Point
from gls_lirpa.tuning.space import space_of


class Proposer:
    """Multi-objective search over a method's space, a function of seed and of what is known."""

    def __init__(self, config: TrainConfig, *, seed: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(f"tuning needs Optuna: {install_command('tune')}") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self._seed = seed
        self._space = {dimension.name: self._distribution(dimension.range) for dimension in space_of(config)}

    def _distribution(self, where: Range) -> Any:
        kinds = self._optuna.distributions
        if where.whole:
            return kinds.IntDistribution(int(where.low), int(where.high))
        return kinds.FloatDistribution(where.low, where.high, log=where.log)

    def propose(
        self, known: Sequence[tuple[dict[str, float], Point]], count: int, *, done: int
    ) -> list[dict[str, float]]:
        """``count`` configurations, given all evaluations so far; ``done``: how many were proposed before."""
        sampler = self._optuna.samplers.TPESampler(seed=self._seed + done, multivariate=True, constant_liar=True)
        study = self._optuna.create_study(directions=["maximize", "maximize"], sampler=sampler)
        for values, point in known:
            trial = self._optuna.trial.create_trial(params=values, distributions=self._space, values=list(point))
            study.add_trial(trial)
        return [dict(study.ask(self._space).params) for _ in range(count)]

"""A population for people who evaluate its members themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor

from gls_lirpa.errors import ConfigError
from gls_lirpa.estimators.worker import Task, Worker


class Population(Sequence[dict[str, Tensor]]):
    """Members 2i and 2i + 1 are θ + ε and θ − ε of pair i, θ and σ those at the time they were asked for.

    A member is ``{parameter name: tensor}``, as ``torch.func.functional_call`` takes it. It is made from a seed
    each time it is looked at, so memory does not grow with the population.
    """

    def __init__(self, worker: Worker, task: Task, seeds: Sequence[int]) -> None:
        self.task = task
        self.seeds = seeds
        self._worker = worker

    def __len__(self) -> int:
        return 2 * len(self.seeds)

    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Tensor]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected a member of 0…{len(self) - 1}, got {index}")
        pair, sign = divmod(index % len(self), 2)
        epsilon = self._worker.noise(self.seeds[pair]).mul_(self.task.sigma)
        vector = self.task.theta - epsilon if sign else self.task.theta + epsilon
        weights = self._worker.weights
        views = zip(weights.names, weights.tensors, weights.views(vector), strict=True)
        return {name: view.to(parameter.dtype) for name, parameter, view in views}


def no_loss(*args: Any, **kwargs: Any) -> Tensor:
    """What a PGPE without a loss is asked to evaluate."""
    raise ConfigError("this PGPE was made without a loss: evaluate the members of ask() and tell() it their losses")

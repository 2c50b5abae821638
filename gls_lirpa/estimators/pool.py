"""Where shards of members are evaluated: in this process, or on actors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from gls_lirpa.base.extras import require_installed
from gls_lirpa.errors import ConfigError
from gls_lirpa.estimators.worker import Loss, Task, Worker

# The number of shards does not depend on the number of actors: shards are summed in order, so the
# result does not depend on who computed them, and at most SHARDS × 2d numbers travel back.
SHARDS = 16

Factory = Callable[[], tuple[nn.Module, Loss]]
T = TypeVar("T")


class Pool(Protocol):
    """Runs a method of Worker on every shard; results come in the shards' order."""

    def map(self, method: str, task: Task, shards: Sequence[tuple[Any, ...]]) -> Iterator[Any]: ...

    def close(self) -> None: ...


class LocalPool:
    """The same shards, one after the other, on the user's own model."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def map(self, method: str, task: Task, shards: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        run = getattr(self.worker, method)
        return (run(task, *shard) for shard in shards)

    def close(self) -> None:
        """Nothing to stop."""


def in_shards(items: Sequence[T]) -> list[Sequence[T]]:
    """At most SHARDS consecutive parts whose sizes differ by at most one.

    >>> [len(shard) for shard in in_shards(range(20))]
    [2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    count = min(SHARDS, len(items))
    small, extra = divmod(len(items), count)
    starts = [i * small + min(i, extra) for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(starts)]


def make_pool(
    worker: Worker, *, actors: int, factory: Factory | None, ray_address: str | None, gpus_per_actor: float
) -> Pool:
    """The local pool for ``actors=0``, else a pool of Ray actors that build their own model and loss."""
    if actors == 0:
        return LocalPool(worker)
    if factory is None:
        own = getattr(worker.loss, "factory", None)
        if not callable(own):
            raise ConfigError(
                "actors cannot receive a closure: pass factory=, a picklable function without arguments "
                "that returns (model, loss)"
            )
        factory = own()
    # evotorch takes seconds to import, and only actors need it.
    require_installed("ray", "evotorch", extra="actors", feature="actors > 0")
    from gls_lirpa.estimators.actors import ActorPool

    return ActorPool(worker, factory, actors=actors, ray_address=ray_address, gpus_per_actor=gpus_per_actor)

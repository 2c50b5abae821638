"""evotorch's Problem as a pool of actors, each with its own model and loss. Importing it takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from evotorch import Problem
from ray.util import ActorPool as RayActorPool

from gls_lirpa.base.parcels import unpacked
from gls_lirpa.estimators.transport import Shipment, build, describe, pack
from gls_lirpa.estimators.worker import Task, Worker


class ShardProblem(Problem):  # type: ignore[misc]
    """Shards of members instead of solutions: only the creation and addressing of actors is evotorch's."""

    def __init__(self, factory: bytes, names: tuple[str, ...], *, actors: int, gpus_per_actor: float) -> None:
        gpus = {"num_gpus_per_actor": gpus_per_actor} if gpus_per_actor > 0 else {}
        super().__init__(
            "min",
            solution_length=1,
            initial_bounds=(0.0, 1.0),
            num_actors=actors,
            actor_config={"num_cpus": 1},
            **gpus,
        )
        self._num_actors = actors  # evotorch turns one actor into none
        self._factory = factory
        self._names = names
        # A factory from a module that this process found must be found by the actors too.
        self._path = [os.path.abspath(entry) for entry in sys.path]
        self._device_name = "cuda" if gpus_per_actor > 0 else "cpu"
        self._worker: Worker | None = None
        self._received: tuple[str, Task] | None = None

    def start(self) -> None:
        """Create the actors; their seeds, which we never use, must not cost the user random numbers."""
        with torch.random.fork_rng([]):
            self._parallelize()

    def processes(self) -> list[int]:
        """The actors' process ids."""
        return [int(pid) for pid in self._ask("process_id")]

    def descriptions(self, timeout: float) -> list[Any]:
        """How each actor describes its model; waits until all are ready."""
        return self._ask("description", timeout)

    def _ask(self, method: str, timeout: float | None = None) -> list[Any]:
        return list(ray.get([actor.call.remote(method, [], {}) for actor in self.actors], timeout=timeout))

    def each(self, method: str, shipment: Any, shards: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Every shard's result in order, each actor taking the next shard when it is free.

        A pool of its own for every call: one that saw an error would still hold the remaining results.
        """
        pool = RayActorPool(self.actors)
        yield from pool.map(lambda actor, shard: actor.call.remote("run", [method, [shipment], shard], {}), shards)

    # What follows runs in the actors.

    def process_id(self) -> int:
        return os.getpid()

    def description(self) -> list[Any]:
        return describe(self._own_worker())

    def run(self, method: str, shipments: list[Any], shard: tuple[Any, ...]) -> Any:
        worker = self._own_worker()
        key = shipments[0].hex()
        if self._received is None or self._received[0] != key:
            shipment: Shipment = ray.get(shipments[0])
            self._received = (key, shipment.install(worker))
        return pack(getattr(worker, method)(self._received[1], *shard))

    def _own_worker(self) -> Worker:
        if self._worker is None:
            # As many actors as cores and one thread each: no oversubscription, and the same sums everywhere.
            torch.set_num_threads(1)
            sys.path.extend(entry for entry in self._path if entry not in sys.path)
            device = torch.device(self._device_name)
            with device:
                model, loss = unpacked(self._factory)()
            self._worker = build(model, loss, self._names, device)
        return self._worker

"""The population on Ray actors: starting them, replacing those that die, and one-line errors.

evotorch's own distributed modes either ship the whole population or centre the losses per actor; here
its ``Problem`` is the actor pool alone, and the shards, seeds and sums are those of the local pool.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gls_lirpa.base import ray_session
from gls_lirpa.base.checks import number
from gls_lirpa.base.parcels import packed
from gls_lirpa.base.ray_pool import Patience, deaths, last_line, original
from gls_lirpa.errors import ConfigError, GLSError
from gls_lirpa.estimators.pool import SHARDS, Factory
from gls_lirpa.estimators.transport import Shipment, describe, unpack
from gls_lirpa.estimators.worker import Task, Worker

if TYPE_CHECKING:
    from gls_lirpa.estimators.problem import ShardProblem

START_SECONDS = 300.0


class ActorPool:
    """The interface of LocalPool over actors, which start at the first use.

    An actor that dies takes nothing with it: noise comes from seeds, so all actors are replaced and the
    missing shards repeated, with identical results. An error inside the loss is raised as it is.
    """

    def __init__(
        self, worker: Worker, factory: Factory, *, actors: int, ray_address: str | None, gpus_per_actor: float
    ) -> None:
        self.worker = worker
        self.actors = actors
        self.ray_address = ray_address
        self.gpus_per_actor = number("gpus_per_actor", gpus_per_actor, inclusive=True)
        self._factory = factory
        self._ray: Any = None
        self._problem: ShardProblem | None = None
        self._stop: weakref.finalize[[ShardProblem, Any], ActorPool] | None = None
        self._sent: tuple[Task, Any] | None = None

    def map(self, method: str, task: Task, shards: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        problem = self._started()
        patience, done = Patience("the latest checkpoint can be resumed"), 0
        while True:
            try:
                for result in problem.each(method, self._shipped(task), shards[done:]):
                    done += 1
                    yield unpack(result, self.worker.weights.device)
                return
            except self._ray.exceptions.RayTaskError as error:
                raise original(error) from None
            except deaths(self._ray) as error:
                patience.lost(error)
                self._replace(problem)
            except self._ray.exceptions.RayError as error:
                raise GLSError(f"Ray failed: {last_line(error)}; the latest checkpoint can be resumed") from error

    def close(self) -> None:
        if self._stop is not None:
            self._stop()
        self._problem = self._stop = self._sent = None

    def processes(self) -> list[int]:
        """The actors' process ids (starting them if necessary)."""
        return self._started().processes()

    def _started(self) -> ShardProblem:
        if self._problem is not None:
            if self._ray.is_initialized():
                return self._problem
            self.close()  # somebody shut Ray down meanwhile
        numbers = 4 * SHARDS * self.worker.weights.size
        self._ray = ray_session.acquire(
            self.ray_address, actors=self.actors, gpus=self.gpus_per_actor, store_bytes=numbers * 8
        )
        try:
            from gls_lirpa.estimators.problem import ShardProblem

            parcel, names = packed(self._factory, what="the factory"), self.worker.weights.names
            problem = ShardProblem(parcel, names, actors=self.actors, gpus_per_actor=self.gpus_per_actor)
        except BaseException:
            ray_session.release()
            raise
        self._problem = problem
        self._stop = weakref.finalize(self, _stop, problem, self._ray)
        self._stop.atexit = False  # at exit the session ends first, and its actors with it
        try:
            self._launch(problem)
        except BaseException:
            self.close()
            raise
        return problem

    def _launch(self, problem: ShardProblem) -> None:
        errors = self._ray.exceptions
        try:
            problem.start()
            theirs = problem.descriptions(START_SECONDS)
        except errors.RayTaskError as error:
            raise original(error) from None
        except errors.RayError as error:
            raise GLSError(f"the actors could not start: {last_line(error)}") from error
        if any(description != describe(self.worker) for description in theirs):
            raise ConfigError("the factory's model has other parameters, buffers or layers than the wrapped model")

    def _replace(self, problem: ShardProblem) -> None:
        problem.kill_actors()
        self._launch(problem)

    def _shipped(self, task: Task) -> Any:
        """A reference to the task in Ray's store; both phases of an estimate use the same."""
        if self._sent is None or self._sent[0] is not task:
            self._sent = (task, self._ray.put(Shipment.of(task, self.worker)))
        return self._sent[1]


def _stop(problem: ShardProblem, ray: Any) -> None:
    # Without the check, Ray would start a cluster of its own in order to kill an actor in it.
    if problem.actors is not None and ray.is_initialized():
        problem.kill_actors()
    ray_session.release()

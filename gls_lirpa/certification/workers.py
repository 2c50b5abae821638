"""Samples certified in parallel, each by a whole cascade in a process of its own, on Ray."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gls_lirpa.base import ray_session
from gls_lirpa.certification.cascade import Cascade
from gls_lirpa.certification.records import Record
from gls_lirpa.certification.settings import Settings
from gls_lirpa.data import Split
from gls_lirpa.errors import ConfigError, GLSError

log = logging.getLogger(__name__)

LARGEST_BLOCK = 64
RETRIES = 2


class Worker:
    """Certifies blocks of samples in an actor; unpacks there what the pool packed."""

    def __init__(self, packed: bytes) -> None:
        torch.set_num_threads(1)
        model, self._split, settings, folder = pickle.loads(packed)
        self._cascade = Cascade(model, self._split.batch([0])[0], settings, folder=folder)

    def certify(self, positions: list[int], indices: list[int]) -> Iterator[Record]:
        """Records of the samples at some positions of the split, each as soon as it is decided."""
        x, labels = self._split.batch(positions)
        # Ray sends into the generator, which `yield from` would pass on to iterators that take nothing.
        for record in self._cascade.run(x, labels, torch.tensor(indices)):  # noqa: UP028
            yield record

    def unusable(self) -> dict[str, str]:
        """Stages left out, and why."""
        return self._cascade.unusable


class WorkerPool:
    """Workers on Ray actors. A sample's record does not depend on the block or the worker it came to.

    Blocks shrink towards the end, so that no worker waits long for another. A worker that dies is
    replaced, and what it had not delivered is done again.
    """

    def __init__(self, model: nn.Module, settings: Settings, *, workers: int, folder: Path) -> None:
        if workers < 1:
            raise ConfigError(f"expected workers >= 1, got {workers}")
        self._model, self._settings, self._folder = model.cpu(), settings, folder
        self._workers = workers
        self._ray: Any = None
        self.unusable: dict[str, str] = {}

    def run(self, split: Split, indices: Sequence[int]) -> Iterator[Record]:
        """The records of some samples of a split, in the order in which they are decided."""
        if not indices:
            return
        used = split.subset(list(indices))
        size = used.images.numel() * used.images.element_size()
        weights = sum(tensor.numel() * tensor.element_size() for tensor in self._model.state_dict().values())
        self._ray = ray_session.acquire(None, actors=self._workers, gpus=0.0, store_bytes=4 * (size + weights))
        actors: list[Any] = []
        try:
            shipped = self._ray.put(self._pickled(used))
            actors += [self._started(shipped) for _ in range(min(self._workers, len(indices)))]
            yield from self._records(actors, shipped, list(indices))
        finally:
            for actor in actors:
                self._ray.kill(actor)
            ray_session.release()

    def _records(self, actors: list[Any], shipped: Any, indices: list[int]) -> Iterator[Record]:
        errors = self._ray.exceptions
        waiting = list(range(len(indices)))
        busy: dict[Any, tuple[int, list[int]]] = {}
        deaths = 0

        def assign(number: int) -> None:
            if waiting:
                width = max(1, min(LARGEST_BLOCK, len(waiting) // (2 * len(actors))))
                block = waiting[:width]
                del waiting[:width]
                busy[actors[number].certify.remote(block, [indices[i] for i in block])] = (number, block)

        for number in range(len(actors)):
            assign(number)
        while busy:
            ready, _ = self._ray.wait(list(busy), num_returns=1)
            stream = ready[0]
            number, block = busy[stream]
            try:
                record: Record = self._ray.get(next(stream))
            except StopIteration:
                del busy[stream]
                if not waiting:
                    self.unusable |= self._ray.get(actors[number].unusable.remote())
                assign(number)
                continue
            except errors.RayTaskError as error:
                raise _original(error) from None
            except (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError) as error:
                deaths += 1
                if deaths > RETRIES:
                    raise GLSError(f"workers died {deaths} times; the same command resumes") from error
                log.warning("a worker died; it is replaced and what is missing is done again")
                del busy[stream]
                waiting[:0] = block
                actors[number] = self._started(shipped)
                assign(number)
                continue
            block.remove(indices.index(record.index))
            yield record

    def _started(self, shipped: Any) -> Any:
        return self._ray.remote(num_cpus=1)(Worker).remote(shipped)

    def _pickled(self, split: Split) -> bytes:
        cloudpickle = self._ray.cloudpickle
        for module in {type(layer).__module__ for layer in self._model.modules()}:
            if module.startswith("_gls_lirpa_user_"):  # a network file: no worker can import it by that name
                cloudpickle.register_pickle_by_value(sys.modules[module])
        content = (self._model, split, self._settings, str(self._folder))
        try:
            return bytes(cloudpickle.dumps(content))
        except (TypeError, AttributeError, RuntimeError) as error:
            raise ConfigError(f"this network cannot be sent to workers: {error}") from error


def _original(error: Any) -> BaseException:
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return GLSError(f"a worker failed: {lines[-1] if lines else type(error).__name__}")

"""Workers on Ray: taking jobs in turn, replacing those that die, and errors in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from gls_lirpa.base import ray_session
from gls_lirpa.base.parcels import packed
from gls_lirpa.errors import GLSError

log = logging.getLogger(__name__)

RETRIES = 2


def deaths(ray: Any) -> tuple[type[BaseException], ...]:
    """The errors that tell of a process that is gone; an error inside a job is none of them."""
    errors = ray.exceptions
    return errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError


class Patience:
    """How often a worker may die before its job is given up.

    >>> patience = Patience("resume the run")
    >>> for _ in range(RETRIES):
    ...     patience.lost(OSError("killed"))
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._count = 0

    def lost(self, error: BaseException) -> None:
        """One worker more is gone."""
        self._count += 1
        if self._count > RETRIES:
            raise GLSError(f"workers died {self._count} times (last: {last_line(error)}); {self._advice}") from error
        log.warning("a worker died; it is replaced and what is missing is done again")


def original(error: Any) -> BaseException:
    """The exception that was raised in the other process, without the remote traceback around it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else GLSError(f"a worker failed: {last_line(error)}")


def last_line(error: BaseException) -> str:
    """The last line of a message that may be a whole remote traceback.

    >>> last_line(ValueError("Traceback\\n  ...\\nValueError: no"))
    'ValueError: no'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class WorkerPool:
    """Actors made as ``kind(parcel of content)``, whose method ``work(job)`` yields results.

    ``what`` the content is, for messages. Every actor has one core; ``store_bytes`` is what travels beside the content.
    """

    def __init__(self, kind: type[Any], content: Any, *, workers: int, what: str, store_bytes: int = 0) -> None:
        self._kind, self._content, self._what = kind, content, what
        self._workers, self._store_bytes = workers, store_bytes

    def stream(
        self,
        take: Callable[[], Any],
        *,
        poll: float | None = None,
        lost: Callable[[Any, BaseException], Any] | None = None,
    ) -> Iterator[tuple[Any, Any] | None]:
        """(job, result) as they come. ``take`` gives the next job, or None while there is none.

        With ``poll`` a None comes after every wait of so many seconds at most. The job of a worker that died is given
        to another one as it is then: results already seen can be taken out of it. With ``lost`` it is given up instead,
        like one that raises, and ``lost(job, error)`` is its result.
        """
        ray = ray_session.acquire(None, actors=self._workers, gpus=0.0, store_bytes=self._store_bytes)
        actors: list[Any] = []
        try:
            parcel = ray.put(packed(self._content, what=self._what))
            make = ray.remote(num_cpus=1)(self._kind).remote
            actors += [make(parcel) for _ in range(self._workers)]
            yield from self._results(ray, actors, lambda: make(parcel), take, poll, lost)
        finally:
            for actor in actors:
                ray.kill(actor)
            ray_session.release()

    def _results(
        self,
        ray: Any,
        actors: list[Any],
        make: Callable[[], Any],
        take: Callable[[], Any],
        poll: float | None,
        lost: Callable[[Any, BaseException], Any] | None,
    ) -> Iterator[tuple[Any, Any] | None]:
        idle, patience = list(range(len(actors))), Patience("the same command resumes")
        again: list[Any] = []
        busy: dict[Any, tuple[int, Any]] = {}
        while True:
            while idle and (job := again.pop(0) if again else take()) is not None:
                number = idle.pop(0)
                busy[actors[number].work.remote(job)] = (number, job)
            if not busy:
                return
            ready, _ = ray.wait(list(busy), num_returns=1, timeout=poll)
            if poll is not None:
                yield None
            for stream in ready:
                number, job = busy[stream]
                try:
                    yield job, ray.get(next(stream))
                    continue
                except StopIteration:
                    pass
                except ray.exceptions.RayError as error:
                    gone = isinstance(error, deaths(ray))
                    if gone:
                        actors[number] = make()
                    if lost is not None:
                        yield job, lost(job, error)
                    elif not gone:
                        raise original(error) from None
                    else:
                        patience.lost(error)
                        again.append(job)
                del busy[stream]
                idle.append(number)

"""A time limit that holds wherever the time is spent: in reading, preparing, bounding or attacking."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

GRACE = 0.25
"""Seconds after the limit in which the search may end by itself, with what it found."""


class TimeLimit(BaseException):
    """The limit has passed. Not an Exception: what a library catches on its way must not swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[float]:
    """Raise TimeLimit meanwhile, when the limit and a little grace have passed; gives the time it began at.

    Works in the main thread of systems with interval timers; elsewhere the searches watch the clock alone.

    >>> try:
    ...     with time_limit(0.01):
    ...         while True:
    ...             pass
    ... except TimeLimit:
    ...     print("in time")
    in time
    """
    started = time.monotonic()
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield started
        return

    def expired(number: int, frame: object) -> None:
        del number, frame
        raise TimeLimit

    def disarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

    before = signal.signal(signal.SIGALRM, expired)
    try:
        # Again and again: one raised while a destructor runs is only reported.
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE, GRACE)
        yield started
    finally:
        try:
            disarm()
        except TimeLimit:  # it came between the end of the work and here
            disarm()
            raise

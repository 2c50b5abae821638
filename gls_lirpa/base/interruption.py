"""Ctrl-C as a request: what is being done comes to a state from which it can be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gls_lirpa.errors import GLSError


class Interrupted(GLSError):
    """The user stopped the run; it can be resumed."""


@contextmanager
def stop_requests(notify: Callable[[], None]) -> Iterator[threading.Event]:
    """Ctrl-C asks for a stop, which the caller looks for between steps; a second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        notify()

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

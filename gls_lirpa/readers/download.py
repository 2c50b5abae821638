"""Downloads through torchvision that fail within seconds where there is no network."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

PROBE_SECONDS = 5.0
STALL_SECONDS = 30.0


def download(name: str, root: Path) -> str | None:
    """Let torchvision's dataset class ``name`` download into ``root``; the reason if it could not."""
    try:
        from gls_lirpa.base.torchvision import repair_torchvision

        repair_torchvision()
        from torchvision import datasets
    except Exception as error:
        return f"torchvision cannot be imported: {error}"
    source = getattr(datasets, name)
    urls = [f"{mirror}{source.resources[0][0]}" for mirror in source.mirrors] if name == "MNIST" else [source.url]
    if not reachable(urls):
        return "no network"
    try:
        with _stall_timeout(STALL_SECONDS):
            source(str(root), download=True)
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def reachable(urls: Sequence[str], *, seconds: float = PROBE_SECONDS) -> bool:
    """Does a server answer for any of the addresses within ``seconds``?

    >>> reachable([])
    False
    """
    answered = threading.Event()
    deadline = time.monotonic() + seconds
    probes = [threading.Thread(target=_probe, args=(url, seconds, answered), daemon=True) for url in urls]
    for probe in probes:
        probe.start()
    # Name resolution heeds no socket timeout: a thread can be left behind, a call cannot.
    for probe in probes:
        probe.join(max(0.0, deadline - time.monotonic()))
    return answered.is_set()


def _probe(url: str, seconds: float, answered: threading.Event) -> None:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds):
            answered.set()
    except urllib.error.HTTPError:
        answered.set()
    except (OSError, ValueError, http.client.HTTPException):
        return


@contextlib.contextmanager
def _stall_timeout(seconds: float) -> Iterator[None]:
    """torchvision passes no timeout of its own: a stalled connection would hang for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)

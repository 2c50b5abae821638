"""Starting, sharing and stopping Ray: quiet, on loopback only, and gone when the last pool is closed."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
from typing import Any

from gls_lirpa.errors import ConfigError, GLSError

PROBE_SECONDS = 5.0
STORE_BYTES = 128 * 2**20  # Ray refuses less than 75 MiB

# Read by Ray when it is imported or started. Without the first, the node's loopback address is replaced
# by the machine's external one; without the token, Ray writes one into the user's home directory.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


class _Session:
    """How many pools use Ray, and what to undo when none does."""

    def __init__(self) -> None:
        self.users = 0
        self.ours = False
        self.folder = ""
        self.added: list[str] = []


_session = _Session()


def acquire(address: str | None, *, actors: int, gpus: float, store_bytes: int) -> Any:
    """The ray module, connected, with room for the actors; every call needs its ``release``."""
    if _session.users == 0:
        _connect(address, actors, store_bytes)
    _session.users += 1
    ray = importlib.import_module("ray")
    try:
        check_room(ray, actors=actors, gpus=gpus)
    except GLSError:
        release()
        raise
    return ray


def release() -> None:
    """One pool less; the last one shuts Ray down if it was started here."""
    _session.users -= 1
    if _session.users == 0:
        _disconnect()


def check_room(ray: Any, *, actors: int, gpus: float) -> None:
    """Ray waits for ever when resources are missing: say so instead."""
    free = ray.available_resources()
    for kind, needed in (("CPU", float(actors)), ("GPU", actors * gpus)):
        if needed > free.get(kind, 0.0) + 1e-9:
            raise GLSError(
                f"{actors} actors need {needed:g} {kind}s, and Ray has {free.get(kind, 0.0):g} free: "
                "use fewer actors, or a larger cluster"
            )


def _connect(address: str | None, actors: int, store_bytes: int) -> None:
    _session.added = [key for key in ENVIRONMENT if key not in os.environ] if address is None else []
    os.environ.update({key: ENVIRONMENT[key] for key in _session.added})
    os.environ.setdefault("EVOTORCH_VERBOSE_LEVEL", "0")
    ray = importlib.import_module("ray")
    _session.ours = not ray.is_initialized()
    if not _session.ours:  # the user's own connection: use it, and leave it open
        return
    debug = logging.getLogger("gls_lirpa").isEnabledFor(logging.DEBUG)
    quiet = {"log_to_driver": debug, "logging_level": "INFO" if debug else "ERROR"}
    if address is not None:
        _probe(address)
        ray.init(address=address, **quiet)
        return
    # A program that imported Ray before us has already missed the first setting.
    importlib.import_module("ray._private.ray_constants").__dict__["ENABLE_RAY_CLUSTER"] = False
    _session.folder = tempfile.mkdtemp(prefix="gls-ray-")
    atexit.register(_disconnect)
    ray.init(
        num_cpus=max(actors, os.cpu_count() or 1),
        object_store_memory=STORE_BYTES + store_bytes,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=_session.folder,
        **quiet,
    )


def _probe(address: str) -> None:
    """A wrong address would be retried for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise ConfigError(f"expected a Ray address host:port or auto, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise GLSError(f"no Ray cluster answers at {address}: {error}") from error


def _disconnect() -> None:
    if _session.ours:
        importlib.import_module("ray").shutdown()
        _session.ours = False
    if _session.folder:
        shutil.rmtree(_session.folder, ignore_errors=True)
        atexit.unregister(_disconnect)
        _session.folder = ""
    for key in _session.added:
        os.environ.pop(key, None)
    _session.added = []

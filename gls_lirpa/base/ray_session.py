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
from contextlib import ExitStack
from typing import Any

from gls_lirpa.base.extras import optional
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
    """How many pools use Ray, which cluster it is, and what to undo when none does any more."""

    def __init__(self) -> None:
        self.users = 0
        self.address: str | None = None
        self.undo = ExitStack()


_session = _Session()


def acquire(address: str | None, *, actors: int, gpus: float, store_bytes: int) -> Any:
    """The ray module, connected, with room for the actors; every call needs its ``release``."""
    ray = importlib.import_module("ray") if _session.users else None
    if ray is None or not ray.is_initialized():
        _session.undo.close()
        _connect(address, actors, store_bytes)
    elif address != _session.address:
        raise GLSError(f"Ray is already in use at {_session.address or 'this machine'}: close those actors first")
    _session.users += 1
    ray = ray or importlib.import_module("ray")
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
        _session.undo.close()


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
    if address is not None:
        _probe(address)
    with ExitStack() as undo:
        # evotorch configures the process's logging when it is imported, unless told not to.
        _set(undo, os.environ, "EVOTORCH_VERBOSE_LEVEL", "-1")
        # After an error Ray would log that of every other job under way; we raise the first.
        _set(undo, os.environ, "RAY_IGNORE_UNHANDLED_ERRORS", "1")
        if address is None:
            for key, value in ENVIRONMENT.items():
                _set(undo, os.environ, key, value)
        ray = optional("ray", extra="actors", feature="running on several processes")
        if not ray.is_initialized():  # otherwise it is the user's own connection: use it, and leave it open
            try:
                _start(ray, undo, address, actors, store_bytes)
            except (ConnectionError, OSError, RuntimeError, ValueError) as error:
                raise GLSError(f"Ray could not be started: {str(error).strip().splitlines()[0]}") from error
        _session.undo = undo.pop_all()
    _session.address = address
    atexit.register(_session.undo.close)
    _session.undo.callback(atexit.unregister, _session.undo.close)


def _start(ray: Any, undo: ExitStack, address: str | None, actors: int, store_bytes: int) -> None:
    debug = logging.getLogger("gls_lirpa").isEnabledFor(logging.DEBUG)
    quiet = {"log_to_driver": debug, "logging_level": "INFO" if debug else "ERROR"}
    if not debug:
        # The notice of a dead worker goes to standard output whatever the log settings are.
        _set(undo, vars(importlib.import_module("ray._private.worker")), "print_to_stdstream", _ignore)
    folder = tempfile.mkdtemp(prefix="gls-ray-")
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    undo.callback(ray.shutdown)
    if address is not None:
        ray.init(address=address, **quiet)
        return
    # A program that imported Ray before us has already missed the first of the ENVIRONMENT.
    _set(undo, vars(importlib.import_module("ray._private.ray_constants")), "ENABLE_RAY_CLUSTER", False)
    ray.init(
        num_cpus=max(actors, os.cpu_count() or 1),
        object_store_memory=STORE_BYTES + store_bytes,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
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


def _set(undo: ExitStack, table: Any, key: str, value: Any) -> None:
    """Put a value into a table until the session ends; a setting the user made in the environment stays."""
    if table is os.environ and key in table:
        return
    if key in table:
        undo.callback(table.__setitem__, key, table[key])
    else:
        undo.callback(table.pop, key, None)
    table[key] = value


def _ignore(*args: Any, **kwargs: Any) -> None:
    del args, kwargs

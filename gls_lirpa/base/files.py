"""Files that are never met half written, and that two processes do not write at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

from gls_lirpa.errors import ConfigError


def replace_file(file: Path, content: bytes) -> None:
    """Write a file so that it has either the old content or the new one at any moment.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "a.txt"
    >>> replace_file(file, b"new")
    >>> file.read_bytes()
    b'new'
    """
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, file)


def take_lock(file: IO[Any], *, busy: str) -> None:
    """Refuse with the message ``busy`` if another process holds this open file; the lock ends with the process."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(busy) from error

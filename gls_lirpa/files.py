"""Files that are never met half written."""

from __future__ import annotations

import os
from pathlib import Path


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

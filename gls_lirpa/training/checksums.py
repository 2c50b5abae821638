"""Files of a run that are trusted later, with the SHA-256 of what they hold.

``checksums.json`` names, for each file, the digests that it may have. It is written before a file is replaced, with the
digest of the content that is there and of the one to come: whenever the process is killed, the file has one of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from gls_lirpa.errors import CheckpointError

NAME = "checksums.json"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_checked(file: Path, content: bytes) -> None:
    """Replace a file so that it can be checked when it is read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "weights.pt"
    >>> write_checked(file, b"new")
    >>> read_checked(file)
    b'new'
    """
    known = _read(file.parent)
    before = [digest(file.read_bytes())] if file.exists() else []
    _replace(file.parent / NAME, _packed({**known, file.name: [*before, digest(content)]}))
    _replace(file, content)


def read_checked(file: Path, *, cure: str = "") -> bytes:
    """What a file holds, if that is what was written; files that were never listed are not checked.

    ``cure``: what else than a copy brings it back.
    """
    content = file.read_bytes()
    digests = _read(file.parent).get(file.name)
    if digests is not None and digest(content) not in digests:
        cure = cure or f"restore it from a copy, or delete {NAME!r} beside it to use it as it is"
        raise CheckpointError(f"{str(file)!r} is damaged: it is not what was written there (SHA-256); {cure}")
    return content


def _packed(files: dict[str, list[str]]) -> bytes:
    own = digest(json.dumps(files, sort_keys=True).encode())
    return (json.dumps({"files": files, "sha256": own}, indent=2, sort_keys=True) + "\n").encode()


def _read(folder: Path) -> dict[str, list[str]]:
    file = folder / NAME
    if not file.is_file():
        return {}
    try:
        content: Any = file.read_bytes()
        files: dict[str, list[str]] = json.loads(content)["files"]
        if _packed(files) == content:
            return files
    except (ValueError, TypeError, KeyError):
        pass
    raise CheckpointError(
        f"{str(file)!r} is damaged: restore it from a copy, or delete it to use the files beside it unchecked"
    )


def _replace(file: Path, content: bytes) -> None:
    """Replace a file on the disk, not only in the system's memory."""
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)

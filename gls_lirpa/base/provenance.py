"""Which code made a result."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit of the checkout that this package is a part of, ``+`` after it where files differ; None without one.

    >>> commit() is None or len(commit().rstrip("+")) == 12
    True
    """
    folder = Path(__file__).resolve().parents[1]
    try:
        # Installed below somebody's own repository, it is no part of that.
        _git(folder, "ls-files", "--error-unmatch", "version.py")
        name = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return name + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

"""Running Python files of the user's: a network's factory, and plugins that register methods of their own."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

from gls_lirpa.errors import ConfigError

USER_MODULE = "_gls_lirpa_user_"
PLUGIN_MODULE = "_gls_lirpa_plugin_"

_COUNTER = itertools.count()


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """The user's file may import its neighbours."""
    before = sys.path[:]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one line; the cause stays attached for --debug."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"{what}: {type(error).__name__}: {reason}") from error


def execute(file: Path, *, what: str, name: str | None = None) -> types.ModuleType:
    """The module that a file defines, under a name of its own; ``what`` it is, for messages."""
    # A fresh name for every load: the classes of two files called net.py must not mix.
    name = name or f"{USER_MODULE}{next(_COUNTER)}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what} {str(file)!r} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look classes up by their module's name.
    sys.modules[name] = module
    try:
        with reported(f"{what} {str(file)!r} cannot be run"):
            spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    return module


def load_plugins(files: Iterable[str | Path]) -> None:
    """Run files that register losses, relaxations or estimators; one that was run already is left alone.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "mine.py"
    >>> _ = file.write_text("NUMBER = 3")
    >>> load_plugins([file, file])
    >>> loaded_plugins() == [str(file.resolve())]
    True
    """
    for given in files:
        file = Path(given).expanduser().resolve()
        if not file.is_file():
            raise ConfigError(f"plugin {str(given)!r} does not exist")
        # The same name in every process, so that what a plugin defines can be sent to others that run it too.
        name = PLUGIN_MODULE + hashlib.sha256(str(file).encode()).hexdigest()[:16]
        if name not in sys.modules:
            with importable(file.parent):
                execute(file, what="plugin", name=name)


def loaded_plugins() -> list[str]:
    """The files of the plugins that were run in this process."""
    return [str(module.__file__) for name, module in list(sys.modules.items()) if name.startswith(PLUGIN_MODULE)]

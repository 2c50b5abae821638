"""Optional packages: imported where they are used, and named with the command that installs them where they are not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shlex
from typing import Any

from packaging.requirements import Requirement

from gls_lirpa.errors import ConfigError


def require_installed(*modules: str, extra: str, feature: str) -> None:
    """Refuse like :func:`optional` where a package is missing, without importing any.

    >>> require_installed("json", extra="none", feature="this example")
    """
    for module in modules:
        if not installed(module):
            raise _missing(module, extra, feature)


def installed(module: str) -> bool:
    """Whether a package is there, without importing it.

    >>> installed("json"), installed("no_such_package")
    (True, False)
    """
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def optional(module: str, *, extra: str, feature: str) -> Any:
    """Import a package that only one feature needs.

    Raises ConfigError, one line with the command that installs the extra, where it is missing.

    >>> optional("json", extra="none", feature="this example").dumps([1])
    '[1]'
    >>> optional("no_such_package", extra="toys", feature="a toy")
    Traceback (most recent call last):
    ...
    gls_lirpa.errors.ConfigError: a toy needs no_such_package, which is not installed: pip install '.[toys]' in a clone
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise _missing(package, extra, feature) from error


def install_command(extra: str) -> str:
    """What to type for an extra: its packages by name, so that it does not matter where this one was installed from.

    >>> install_command("plots")
    "pip install 'matplotlib>=3.7'"
    """
    try:
        required = [Requirement(line) for line in importlib.metadata.requires("gls-lirpa") or []]
    except importlib.metadata.PackageNotFoundError:  # a clone that was never installed
        required = []
    found = [
        f"{package.name}{package.specifier}"
        for package in required
        if package.marker and package.marker.evaluate({"extra": extra}) and not package.marker.evaluate({"extra": ""})
    ]
    return f"pip install {shlex.join(found)}" if found else f"pip install '.[{extra}]' in a clone"


def _missing(package: str, extra: str, feature: str) -> ConfigError:
    return ConfigError(f"{feature} needs {package}, which is not installed: {install_command(extra)}")

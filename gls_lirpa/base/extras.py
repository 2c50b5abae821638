"""Optional packages: imported where they are used, and named with the command that installs them where they are not."""

from __future__ import annotations

import importlib
from typing import Any

from gls_lirpa.errors import ConfigError


def optional(module: str, *, extra: str, feature: str) -> Any:
    """Import a package that only one feature needs.

    Raises ConfigError, one line with the command that installs the extra, where it is missing.

    >>> optional("json", extra="none", feature="this example").dumps([1])
    '[1]'
    >>> optional("no_such_package", extra="toys", feature="playing")
    Traceback (most recent call last):
    ...
    gls_lirpa.errors.ConfigError: playing needs no_such_package, which is not installed: pip install 'gls-lirpa[toys]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigError(
            f"{feature} needs {package}, which is not installed: pip install 'gls-lirpa[{extra}]'"
        ) from error

"""Objects on their way to another process, with the user's code that they need there."""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

from gls_lirpa.base.user_code import USER_MODULE, load_plugins, loaded_plugins
from gls_lirpa.errors import ConfigError


def packed(item: Any, *, what: str) -> bytes:
    """``item`` and the plugins of this process; ``what`` it is, where it cannot be sent."""
    cloudpickle = importlib.import_module("ray.cloudpickle")
    for name, module in list(sys.modules.items()):
        if name.startswith(USER_MODULE):  # a network file: no other process can import it by that name
            cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(pickle.dumps((loaded_plugins(), cloudpickle.dumps(item))))
    except Exception as error:  # whatever the user's objects raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ConfigError(f"{what} cannot be sent to other processes: {reason}") from error


def unpacked(parcel: bytes) -> Any:
    """What was packed, once the plugins it may refer to were run here."""
    plugins, item = pickle.loads(parcel)
    load_plugins(plugins)
    return pickle.loads(item)

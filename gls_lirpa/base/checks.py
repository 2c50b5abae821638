"""Checks of hyper-parameters: every message says what was expected and what came."""

from __future__ import annotations

import math
from typing import Any

from gls_lirpa.errors import ConfigError


def require(condition: bool, expected: str, got: object) -> None:
    """Raise a ConfigError reading ``expected …, got …`` unless the condition holds.

    >>> require(2 >= 1, "samples >= 1", 2)
    """
    if not condition:
        raise ConfigError(f"expected {expected}, got {got}")


def number(name: str, value: Any, *, above: float = 0.0, inclusive: bool = False, most: float = math.inf) -> float:
    """A finite number larger than ``above`` (or equal, if inclusive) and at most ``most``.

    >>> number("sigma", 1e-3)
    0.001
    """
    upper = "" if math.isinf(most) else f" and <= {most:g}"
    expected = f"a finite {name} {'>=' if inclusive else '>'} {above:g}{upper}"
    require(isinstance(value, (int, float)) and not isinstance(value, bool), expected, repr(value))
    result = float(value)
    inside = result <= most and (result > above or (inclusive and result == above))
    require(math.isfinite(result) and inside, expected, value)
    return result


def whole(name: str, value: Any, *, least: int, even: bool = False) -> int:
    """A whole number, at least ``least``, and even if asked; configuration files may write 8.0.

    >>> whole("population", 256, least=4, even=True)
    256
    """
    expected = f"{name} even and >= {least}" if even else f"{name} >= {least}"
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    require(is_whole and not isinstance(value, bool), f"{expected}, a whole number", repr(value))
    require(value >= least and not (even and value % 2), expected, value)
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """True or False; configurations of earlier versions write 1 and 0.

    >>> boolean("multi", 1)
    True
    """
    require(value in (True, False), f"{name} true or false", repr(value))
    return bool(value)

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


def number(name: str, value: Any, *, above: float = 0.0, inclusive: bool = False) -> float:
    """A finite number larger than ``above`` (or equal, if inclusive).

    >>> number("sigma", 1e-3)
    0.001
    """
    sign = ">=" if inclusive else ">"
    expected = f"a finite {name} {sign} {above:g}"
    require(isinstance(value, (int, float)) and not isinstance(value, bool), expected, repr(value))
    result = float(value)
    require(math.isfinite(result) and (result > above or (inclusive and result == above)), expected, value)
    return result


def whole(name: str, value: Any, *, least: int, even: bool = False) -> int:
    """A whole number, at least ``least``, and even if asked.

    >>> whole("population", 256, least=4, even=True)
    256
    """
    expected = f"{name} even and >= {least}" if even else f"{name} >= {least}"
    require(isinstance(value, int) and not isinstance(value, bool), f"{expected}, a whole number", repr(value))
    require(value >= least and not (even and value % 2), expected, value)
    return int(value)

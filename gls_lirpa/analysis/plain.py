"""Results as plain JSON: what is not a finite number is ``null`` there and NaN here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any


def to_plain(value: Any) -> Any:
    """Dataclasses as dictionaries and sequences as lists, so that any JSON reader takes the result.

    >>> to_plain({"values": (1.0, math.nan), "name": "ibp"})
    {'values': [1.0, None], 'name': 'ibp'}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def number(value: float | None) -> float:
    """A number that ``to_plain`` wrote.

    >>> number(None), number(2)
    (nan, 2.0)
    """
    return math.nan if value is None else float(value)


def numbers(values: Iterable[float | None]) -> list[float]:
    """A list of numbers that ``to_plain`` wrote.

    >>> numbers([1, None])
    [1.0, nan]
    """
    return [number(value) for value in values]

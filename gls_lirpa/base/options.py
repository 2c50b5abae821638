"""Typed options of a method, with limits and help: what configurations and the command line know of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gls_lirpa.base.checks import boolean, number, whole
from gls_lirpa.base.registry import nearest
from gls_lirpa.errors import ConfigError

Value = bool | int | float


@dataclass(frozen=True)
class Range:
    """Where a search looks for a number, from ``low`` to ``high``; ``log``: for scales, ``whole``: for counts, others
    are for shares."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Option:
    """One setting: ``kind`` is bool, int or float; without a ``default`` the method has its own.

    ``least`` itself is allowed unless ``strict``. ``only_with`` names the relaxations that it is defined for.
    ``search``: where ``glscert tune`` looks for it, if it does, and ``search_if``: by the name of a boolean option of
    the same method, where it looks instead if that is on.

    >>> Option("steps", int, "steps of the attack", default=8, least=1).parsed("10")
    10
    """

    name: str
    kind: type[bool] | type[int] | type[float]
    help: str
    default: Value | None = None
    least: float = 0.0
    most: float = math.inf
    strict: bool = False
    even: bool = False
    only_with: tuple[str, ...] = ()
    search: Range | None = None
    search_if: Mapping[str, Range] = field(default_factory=dict)

    def searched(self, chosen: Mapping[str, Value]) -> Range | None:
        """Where a search looks, with the method's other options as they are ``chosen``."""
        return next((found for name, found in self.search_if.items() if chosen.get(name)), self.search)

    def checked(self, value: Any) -> Value:
        """``value`` in the option's type, if it is within the limits."""
        if self.kind is bool:
            return boolean(self.name, value)
        if self.kind is int:
            return whole(self.name, value, least=int(self.least), even=self.even)
        return number(self.name, value, above=self.least, inclusive=not self.strict, most=self.most)

    def applies_to(self, relaxation: str) -> bool:
        """Whether the option is defined for a relaxation."""
        return not self.only_with or relaxation in self.only_with

    def parsed(self, text: str) -> Value:
        """The value that a user wrote."""
        words = {"true": True, "yes": True, "false": False, "no": False}
        try:
            value: Value = words[text.lower()] if text.lower() in words else float(text)
        except ValueError:
            raise ConfigError(f"expected a {self.kind.__name__} for {self.name}, got {text!r}") from None
        return self.checked(value)


class Options(Mapping[str, Option]):
    """The options of one method by name.

    >>> Options(Option("lam", float, "size of the box", default=0.4, most=1.0)).checked("loss 'sabr'", {"lam": 1})
    {'lam': 1.0}
    """

    def __init__(self, *options: Option) -> None:
        self._options = {option.name: option for option in options}

    def __getitem__(self, name: str) -> Option:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def defaults(self) -> dict[str, Value]:
        """The options that have a default, with it."""
        return {name: option.default for name, option in self.items() if option.default is not None}

    def of(self, owner: str, name: str) -> Option:
        """The option ``name``; ``owner`` is who lacks it, for the message."""
        if name not in self:
            expected = ", ".join(self) or "none"
            raise ConfigError(f"{owner} has no option {name!r}: expected {expected}{nearest(name, list(self))}")
        return self[name]

    def checked(self, owner: str, given: Mapping[str, Any]) -> dict[str, Value]:
        """``given`` in the options' types; what is unknown or out of range is refused."""
        return {name: self.of(owner, name).checked(value) for name, value in given.items()}

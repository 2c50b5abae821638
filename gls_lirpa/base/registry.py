"""Name → object tables that refuse silent overwrite and suggest the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from gls_lirpa.errors import ConfigError, UnknownNameError

T = TypeVar("T")


def nearest(name: str, valid: list[str]) -> str:
    """A hint such as ``; did you mean 'crown'?``, or an empty string.

    >>> nearest("crwn", ["ibp", "crown"])
    "; did you mean 'crown'?"
    """
    close = difflib.get_close_matches(name.lower(), valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """Objects by name, with aliases.

    >>> shapes = Registry[int]("shape")
    >>> _ = shapes.register("square", 4, aliases=("quad",))
    >>> shapes.get("QUAD")
    4
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._followers: list[Callable[[str, T, tuple[str, ...]], object]] = []

    def register(self, name: str, item: T, *, aliases: tuple[str, ...] = ()) -> T:
        for key in (name, *aliases):
            if key in self._items or key in self._aliases:
                raise ConfigError(f"{self.kind} {key!r} is already registered; choose another name")
        self._items[name] = item
        self._aliases.update(dict.fromkeys(aliases, name))
        for follow in self._followers:
            follow(name, item, aliases)
        return item

    def follow(self, action: Callable[[str, T, tuple[str, ...]], object]) -> None:
        """Call ``action(name, item, aliases)`` for what is registered now and for what will be."""
        self._followers.append(action)
        for name, item in self._items.items():
            action(name, item, tuple(alias for alias, target in self._aliases.items() if target == name))

    def canonical(self, name: str) -> str:
        """The registered name behind ``name`` (case-insensitive, aliases resolved)."""
        key = name.strip().lower().replace("_", "-")
        key = self._aliases.get(key, key)
        if key not in self._items:
            hint = nearest(name, [*self._items, *self._aliases])
            raise UnknownNameError(f"unknown {self.kind} {name!r}: expected one of {', '.join(self._items)}{hint}")
        return key

    def get(self, name: str) -> T:
        return self._items[self.canonical(name)]

    def names(self) -> list[str]:
        return list(self._items)

    def named(self, *, alias: bool = False) -> str:
        """All names for a line of help, with one of each item's aliases if asked.

        >>> methods = Registry[int]("relaxation")
        >>> _ = methods.register("ibp", 1), methods.register("crown", 2, aliases=("deeppoly",))
        >>> methods.named(alias=True)
        'ibp or crown (= deeppoly)'
        """
        known = {name: other for other, name in reversed(self._aliases.items())} if alias else {}
        shown = [f"{name} (= {known[name]})" if name in known else name for name in self._items]
        return " or ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

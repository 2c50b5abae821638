"""The modules a loss refers to, found without calling it.

A loss over the user's own ``BoundedModule`` usually closes over it: its buffers and flags must be put
back too, although it is not the module whose parameters were handed to the estimator.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

DEPTH = 4
WIDTH = 64


def modules_of(loss: Any) -> list[nn.Module]:
    """Modules in the loss's closure, attributes, bound arguments and the globals it names.

    >>> net = nn.Linear(2, 2)
    >>> [type(m).__name__ for m in modules_of(lambda x: net(x).sum())]
    ['Linear']
    """
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    level = [loss]
    for _ in range(DEPTH):
        following: list[Any] = []
        for item in level:
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, nn.Module):
                found[id(item)] = item
            else:
                following.extend(_neighbours(item))
        level = following
    return list(found.values())


def _neighbours(item: Any) -> Iterator[Any]:
    if isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                yield cell.cell_contents
        yield from item.__defaults__ or ()
        yield from (item.__kwdefaults__ or {}).values()
        yield from (item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__)
    elif isinstance(item, types.MethodType):
        yield item.__self__
        yield item.__func__
    elif isinstance(item, functools.partial):
        yield item.func
        yield from item.args
        yield from item.keywords.values()
    elif isinstance(item, (list, tuple, set, dict)):
        if len(item) <= WIDTH:
            yield from item.values() if isinstance(item, dict) else item
    elif not isinstance(item, (type, types.ModuleType)) and isinstance(getattr(item, "__dict__", None), dict):
        yield from vars(item).values()
        if callable(item) and isinstance(type(item).__call__, types.FunctionType):
            yield type(item).__call__

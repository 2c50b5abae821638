"""Loading a user's own network from ``path/to/file.py:factory``."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gls_lirpa.base.modes import evaluating
from gls_lirpa.base.registry import nearest
from gls_lirpa.base.user_code import execute, importable, reported
from gls_lirpa.errors import ConfigError


def load_user_model(
    spec: str,
    *,
    in_shape: Sequence[int],
    classes: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Run a Python file of the user's and call the factory it defines; ``spec`` is ``path/to/file.py:factory``.

    The factory is called with those of ``in_shape``, ``classes``, ``mean``, ``std`` that it accepts.
    What it returns takes pixels in [0, 1] and gives one logit per class; normalising is its own
    business, which is what ``mean`` and ``std`` are offered for. The file runs with the random state
    seeded by ``seed``; the global state is the same afterwards.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "net.py"
    >>> _ = file.write_text("from torch import nn\\n"
    ...                     "def make(classes): return nn.Sequential(nn.Flatten(), nn.Linear(4, classes))")
    >>> load_user_model(f"{file}:make", in_shape=(1, 2, 2), classes=3)[1].out_features
    3
    """
    path, _, attribute = spec.rpartition(":")
    if not path or not attribute:
        raise ConfigError(f"expected a network as path/to/file.py:factory, got {spec!r}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"network file {str(file)!r} does not exist")
    offered = {"in_shape": tuple(in_shape), "classes": classes, "mean": mean, "std": std}
    with _seeded(seed), importable(file.resolve().parent):
        factory = _factory(execute(file, what="network file"), attribute, spec)
        arguments = _accepted(factory, offered, spec)
        with reported(f"network factory {spec!r} failed"):
            model = factory(**arguments)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"network factory {spec!r} returned {type(model).__name__}, expected an nn.Module")
        _check_output(model, tuple(in_shape), classes, spec)
    return model


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _factory(module: types.ModuleType, attribute: str, spec: str) -> Callable[..., Any]:
    found = getattr(module, attribute, None)
    if found is None:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(f"network file of {spec!r} defines no {attribute!r}{nearest(attribute, public)}")
    if not callable(found) or isinstance(found, nn.Module):
        raise ConfigError(f"{spec!r} is a {type(found).__name__}, expected a function that returns an nn.Module")
    factory: Callable[..., Any] = found
    return factory


def _accepted(factory: Callable[..., Any], offered: dict[str, Any], spec: str) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [name for name in required if name not in named or name not in offered]
    if unknown:
        raise ConfigError(
            f"network factory {spec!r} requires {', '.join(unknown)}; it can be given {', '.join(offered)}"
        )
    return {name: value for name, value in offered.items() if name in named}


def _check_output(model: nn.Module, in_shape: tuple[int, ...], classes: int, spec: str) -> None:
    with torch.no_grad(), evaluating(model), reported(f"network {spec!r} cannot take images of shape {in_shape}"):
        out = model(torch.zeros(2, *in_shape))
    shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
    if shape != (2, classes):
        raise ConfigError(f"network {spec!r} gives {shape} for a batch of 2, expected {(2, classes)}")

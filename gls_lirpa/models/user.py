"""Loading a user's own network from ``path/to/file.py:factory``."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gls_lirpa.base.registry import nearest
from gls_lirpa.errors import ConfigError

_COUNTER = itertools.count()


def load_user_model(
    spec: str,
    *,
    in_shape: Sequence[int],
    classes: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Run a Python file of the user's and call the factory it defines.

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
    with _seeded(seed), _importable(file.resolve().parent):
        factory = _factory(_execute(file), attribute, spec)
        arguments = _accepted(factory, offered, spec)
        with _reported(f"network factory {spec!r} failed"):
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


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """The user's file may import its neighbours."""
    before = sys.path[:]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one line; the cause stays attached for --debug."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"{what}: {type(error).__name__}: {reason}") from error


def _execute(file: Path) -> types.ModuleType:
    # A fresh name for every load: the classes of two files called net.py must not mix.
    name = f"_gls_lirpa_user_{next(_COUNTER)}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"network file {str(file)!r} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look classes up by their module's name.
    sys.modules[name] = module
    try:
        with _reported(f"network file {str(file)!r} cannot be run"):
            spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    return module


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
    training = model.training
    model.eval()
    with torch.no_grad(), _reported(f"network {spec!r} cannot take images of shape {in_shape}"):
        out = model(torch.zeros(2, *in_shape))
    model.train(training)
    shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
    if shape != (2, classes):
        raise ConfigError(f"network {spec!r} gives {shape} for a batch of 2, expected {(2, classes)}")

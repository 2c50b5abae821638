"""The network as auto_LiRPA is shown it: the same function, in operations whose bounds are known to be right.

While a network is traced, every torch function it calls passes through ``Rewriting``. Affine operations
(pooling, padding, slices, concatenation, …) become convolutions or matrix products, piecewise linear
activations become ReLUs, and reading a value of the input in Python, which a trace would freeze, is an
error. Modules and their tensors are the network's own; nothing about it is changed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gls_lirpa.engine.compat import default_dtype
from gls_lirpa.engine.maps import plain, untraced
from gls_lirpa.engine.rewrite_affine import AFFINE_RULES
from gls_lirpa.engine.rewrite_piecewise import PIECEWISE_RULES
from gls_lirpa.errors import UnsupportedLayerError

Rule = Callable[..., Any]
"""``rule(function, args, kwargs, tracked)``: the result by other operations, or NotImplemented.

``tracked`` tells whether a tensor depends on the network's input."""

RULES: dict[Any, Rule] = {**AFFINE_RULES, **PIECEWISE_RULES}

_READS: dict[Any, str] = {
    **{getattr(Tensor, name): name for name in ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero")},
    **{getattr(Tensor, f"__{name}__"): name for name in ("bool", "int", "float", "index", "complex", "array")},
    **{getattr(torch, name): name for name in ("equal", "allclose", "is_nonzero")},
    Tensor.data.__get__: ".data",  # type: ignore[attr-defined]
}
"""Functions whose result a trace would keep as the constant it was at the traced point."""

_ABOUT_SHAPES = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "__len__", "stride", "is_floating_point")),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
}
"""What does not depend on the values: while tracing, torch gives sizes as tensors."""

_CONSTANTS = {torch.linspace, torch.logspace}
"""Whose traces are computed in float32 whatever their dtype."""


class Rewriting(TorchFunctionMode):
    """Inside it what is computed from ``x`` is computed by other operations, to the same result.

    >>> x = torch.rand(2, 1, 4, 4)
    >>> with Rewriting(x):
    ...     pooled = nn.functional.avg_pool2d(x, 3, stride=1)
    >>> bool(torch.allclose(pooled, nn.functional.avg_pool2d(x, 3, stride=1)))
    True
    """

    def __init__(self, x: Tensor, *, scope: Callable[[], str] = lambda: "the network") -> None:
        super().__init__()
        # Objects and not numbers: an id is used again once its object is gone.
        self._tracked: dict[int, Tensor] = {id(x): x}
        self._scope = scope

    def tracked(self, value: Any) -> bool:
        return id(value) in self._tracked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CONSTANTS:
            with untraced():
                return func(*map(plain, args), **kwargs)
        if not any(self.tracked(value) for value in _leaves((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if func in _ABOUT_SHAPES:
            return func(*args, **kwargs)
        if func in _READS:
            raise UnsupportedLayerError(
                f"{self._scope()} reads values of its input in Python ({_READS[func]}), which bounds cannot follow: "
                "use torch operations on the tensor instead"
            )
        result = self._by_rule(func, args, kwargs) if func in RULES else NotImplemented
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for value in _leaves((result,)):
            if isinstance(value, Tensor):
                self._tracked[id(value)] = value
        return result

    def _by_rule(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return RULES[func](func, args, kwargs, self.tracked)
        except UnsupportedLayerError as error:
            raise UnsupportedLayerError(f"{self._scope()}: {error}") from error


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves(value.values())
        else:
            yield value


def rewritten(core: nn.Module) -> nn.Module:
    """A twin of ``core`` with the same layers and tensors, whose forward pass is rewritten.

    It runs under the default dtype of this moment, whatever that is when it is traced.
    """
    twin = copy.copy(core)
    twin.__dict__["forward"] = functools.partial(_forward, core, torch.get_default_dtype())
    return twin


def _forward(core: nn.Module, dtype: torch.dtype, x: Tensor) -> Any:
    scopes: list[str] = []
    names = {module: f"layer {name!r} ({type(module).__name__})" for name, module in core.named_modules() if name}
    handles = [module.register_forward_pre_hook(lambda m, _: scopes.append(names[m])) for module in names]
    handles += [module.register_forward_hook(lambda *_: _left(scopes)) for module in names]
    try:
        scope = lambda: scopes[-1] if scopes else f"the network ({type(core).__name__})"  # noqa: E731
        with default_dtype(dtype), Rewriting(x, scope=scope):
            return core.forward(x)
    finally:
        for handle in handles:
            handle.remove()


def _left(scopes: list[str]) -> None:
    scopes.pop()

"""Is what auto_LiRPA traced the network? The trace is run beside it before any bound is believed.

A trace that froze a value, lost an attribute or changed an operation's meaning gives other outputs than
the network somewhere. It is compared at points of many scales, constant, random and corner ones, each in
batches of several sizes. That finds what shows at some point of that kind; a branch taken only at inputs
of measure zero would not be found here, which is why ``rewrite`` refuses value-dependent Python outright.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.modes import evaluating, preserved
from gls_lirpa.engine.batchnorm import (
    Statistics,
    applied_statistics,
    batchnorms,
    captured_statistics,
    unmoved_statistics,
)
from gls_lirpa.engine.graph import Node, evaluate
from gls_lirpa.engine.rewrite import rewritten
from gls_lirpa.errors import EngineError, UnsupportedLayerError

TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-9, 1e-12)}
"""Accepted difference, relative to the outputs of a sample and to the largest value inside the network."""

FAILURES = (RuntimeError, AssertionError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""How a trace fails on inputs that it was not made for."""

_SCALES = (0.1, 1.0, 10.0, 100.0)

_BATCHES = (2, 65)
"""Batch sizes, besides one sample alone and all points together, at which a sample must have the same output."""


class UnprovenError(EngineError):
    """A trace does not compute what the network computes."""


def proof_points(example: Tensor, normalized: Callable[[Tensor], Tensor]) -> Tensor:
    """Points of the pixel range, as the network behind its normalisation sees them, and far beyond it.

    >>> len(proof_points(torch.rand(1, 4), lambda x: x))
    24
    """
    generator = torch.Generator().manual_seed(0)
    shape = example.shape[1:]

    def random(count: int, draw: Callable[..., Tensor]) -> Tensor:
        return draw(count, *shape, generator=generator, dtype=example.dtype).to(example.device)

    levels = torch.tensor([0.0, 1.0, 0.5, 0.05], dtype=example.dtype, device=example.device)
    uniform = random(6, torch.rand)
    pixels = torch.cat([
        levels.view(-1, *[1] * len(shape)).expand(-1, *shape),
        uniform, uniform[:2].round(), uniform[:1] * 0.2, 1 - uniform[1:2] * 0.2,
    ])  # fmt: skip
    noise = random(len(_SCALES) + 2, torch.randn)
    scales = torch.tensor([*_SCALES, 0.01, 0.3], dtype=example.dtype, device=example.device)
    scaled = noise * scales.view(-1, *[1] * len(shape))
    centre = example.expand(2, *shape)
    # With both signs, so that a linear function of the input is somewhere above and somewhere below any threshold.
    return torch.cat([normalized(pixels), scaled[:4], -scaled[:4], centre + scaled[4:]]).detach()


class Proof:
    """Compares traces of one network with it, at its weights of the moment."""

    def __init__(self, core: nn.Module, points: Tensor) -> None:
        self._core = core
        self._points = points

    @torch.no_grad()
    def samples_are_independent(self) -> None:
        """Refuse a network whose output for a sample depends on the rest of the batch, in eval mode.

        The rewritten network comes first, since it names the layer that reads values in Python.
        """
        with evaluating(self._core):
            anew = rewritten(self._core)(self._points)
            with _Largest(self._core) as largest:
                together = self._core(self._points)
            alone = torch.cat([self._core(point.unsqueeze(0)) for point in self._points])
            _compare(alone, together, largest.value, "one sample alone")
            for size in _BATCHES:
                index = torch.arange(size, device=self._points.device) % len(self._points)
                _compare(self._core(self._points[index]), together[index], largest.value, f"a batch of {size}")
        _compare(anew, together, largest.value, "the rewritten network")

    @torch.no_grad()
    def check(self, wrapped: Any, sizes: Sequence[int]) -> bool:
        """Raise UnprovenError where the trace differs; False if nothing finite could be compared.

        ``wrapped`` has a ``bounded`` module, takes ``synchronise(statistics)``, and gives its ``nodes()``.
        """
        conclusive = self._compare_all(wrapped, {}, sizes)
        if conclusive and batchnorms(self._core):
            statistics = self._statistics()
            if statistics:
                with applied_statistics(self._core, statistics):
                    conclusive = self._compare_all(wrapped, statistics, sizes[:1])
        return conclusive

    def _statistics(self) -> Statistics:
        """What BatchNorm would use in train mode on the points of moderate scale."""
        try:
            with preserved(self._core):
                for layer in batchnorms(self._core).values():
                    layer.train()
                with captured_statistics(self._core) as statistics, unmoved_statistics(self._core):
                    self._core(self._points[:14])
        except (UnsupportedLayerError, ValueError):
            return {}  # such a network is bounded in eval mode alone
        return statistics

    def _compare_all(self, wrapped: Any, statistics: Statistics, sizes: Sequence[int]) -> bool:
        conclusive = False
        wrapped.synchronise(statistics, gradients=False)
        for size in sizes:
            count = math.ceil(len(self._points) / size) if size > 1 else 2
            index = torch.arange(count * size, device=self._points.device) % len(self._points)
            for part in index.split(size):
                conclusive |= self._compare_batch(wrapped, self._points[part])
        wrapped.release()
        return conclusive

    def _compare_batch(self, wrapped: Any, x: Tensor) -> bool:
        with evaluating(self._core), _Largest(self._core) as largest:
            expected = self._core(x)
        nodes: Sequence[Node] = wrapped.nodes()
        try:
            values, traced = evaluate(nodes, x), wrapped.bounded(x)
        except FAILURES as error:
            raise UnprovenError(f"the trace fails at a batch of {len(x)}: {error}") from error
        inner = max(largest.value, *(float(value.abs().max().nan_to_num(0.0, 0.0, 0.0)) for value in values.values()))
        known = _compare(values[nodes[-1].name], expected, inner, f"its graph at a batch of {len(x)}")
        return _compare(traced, expected, inner, f"auto_LiRPA at a batch of {len(x)}") and known


class _Largest:
    """The largest number that a layer adds up, as far as its input and weight tell: what rounding is relative to."""

    def __init__(self, core: nn.Module) -> None:
        self._layers = [module for module in core.modules() if isinstance(getattr(module, "weight", None), Tensor)]
        self.value = 0.0

    def __enter__(self) -> _Largest:
        self._handles = [layer.register_forward_pre_hook(self._meet) for layer in self._layers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _meet(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        product = float(inputs[0].abs().max()) * float(weight.abs().max())
        self.value = max(self.value, product) if math.isfinite(product) else self.value


def _compare(found: Tensor, expected: Tensor, inner: float, who: str) -> bool:
    """Whether there are samples to compare: where either side is not finite, the bound is not either."""
    if found.shape != expected.shape:
        raise UnprovenError(f"{who} gives outputs {tuple(found.shape)} where the network gives {tuple(expected.shape)}")
    known = (torch.isfinite(expected) & torch.isfinite(found)).all(1)
    outer, hidden = TOLERANCE.get(expected.dtype, (1e-2, 1e-2))
    allowed = outer * (1 + expected.abs().amax(1, keepdim=True)) + hidden * inner
    difference = (found - expected).abs()
    if bool((difference > allowed)[known].any()):
        raise UnprovenError(f"{who} differs from the network by {float(difference[known].max()):.2g}")
    return bool(known.any())

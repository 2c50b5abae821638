"""BoundedModules of one network: made on demand, never stale, checked before their first use.

auto_LiRPA copies buffers when it wraps a network and keeps hold of the Parameter objects it saw, so
every use starts by handing it the network's tensors as they are now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.base.modes import evaluating
from gls_lirpa.engine.batchnorm import Statistics
from gls_lirpa.engine.compat import default_dtype, load_lirpa
from gls_lirpa.engine.graph import Node, activations, read_graph, relu_inputs
from gls_lirpa.engine.operators import check_operations
from gls_lirpa.engine.proof import Proof, UnprovenError
from gls_lirpa.engine.row_network import RowNetwork
from gls_lirpa.engine.wrap import LIRPA_FAILURES, unproven, unsupported, wrap
from gls_lirpa.errors import EngineError, UnsupportedLayerError

_TRACE_BATCH = 7
"""auto_LiRPA guesses the batch dimension of constants by their size: an unusual one is safe."""

_KEPT = 8
"""How many modules are kept where each serves one batch size only."""


@dataclass(frozen=True)
class Mode:
    """How the network is wrapped. ``any_batch``: one traced module serves every batch size, which a
    traced ``view`` may prevent. Patches are much faster on images but do not know every operation."""

    conv: str
    any_batch: bool


MODES = (Mode("patches", True), Mode("patches", False), Mode("matrix", True), Mode("matrix", False))


def usable_modes() -> tuple[Mode, ...]:
    """auto_LiRPA 0.7 excluded points of networks that slice images (``x[:, :, :1]``) in plain CROWN by patches and
    not by matrices; why is not known, so there patches are not used at all."""
    return MODES[2:] if load_lirpa().split_nodes else MODES


_HELD = (
    *("lower", "upper", "interval", "linear", "forward_value", "center", "aux"),
    *("lA", "uA", "d", "lower_d", "upper_d", "lower_b", "upper_b", "upper_k", "current_mean", "current_var"),
)
"""Attributes in which auto_LiRPA's nodes keep results of a call; it sets or clears them at the next."""

Probe = Callable[[Mode, Box, Tensor], Tensor]
"""Lower bounds of the rows of a specification in a mode, in eval mode of BatchNorm."""


class BoundedNetwork:
    """One BoundedModule of ``core`` and the modules of ``core`` whose tensors it shares."""

    def __init__(self, core: nn.Module, example: Tensor, *, conv_mode: str) -> None:
        self.bounded = wrap(core, example, conv_mode=conv_mode)
        self._core = core
        self._graph: list[Node] | None = None
        self._rows: RowNetwork | None = None
        self._weights: list[tuple[Any, nn.Module, str]] = []
        self._buffers: list[tuple[Any, nn.Module, str, str]] = []
        for node in self.bounded._modules.values():
            if type(node).__name__ in ("BoundParams", "BoundBuffers"):
                owner, _, name = node.ori_name.rpartition(".")
                layer = core.get_submodule(owner)
                if type(node).__name__ == "BoundParams":
                    self._weights.append((node, layer, name))
                else:
                    self._buffers.append((node, layer, owner, name))

    def graph(self) -> list[Node]:
        """The network as affine maps and ReLUs."""
        if self._graph is None:
            try:
                self._graph = read_graph(self.bounded)
            except UnsupportedLayerError as error:
                raise unsupported("hbox", self._core, str(error)) from error
        return self._graph

    def rows(self) -> RowNetwork:
        """The network in row form; raises UnsupportedLayerError where it has none."""
        if self._rows is None:
            self._rows = RowNetwork(self.graph())
        return self._rows

    def nodes(self) -> list[Node]:
        """The network with all its activations."""
        return read_graph(self.bounded, all_activations=True)

    def synchronise(self, statistics: Statistics, *, gradients: bool) -> None:
        """Hand over weights and buffers as they are now, with ``statistics`` for BatchNorm."""
        for node, layer, name in self._weights:
            weight = getattr(layer, name)
            # auto_LiRPA sets requires_grad of what it is given to the node's training flag.
            node._parameters["param"] = weight if gradients else weight.detach()
            node.training = gradients and weight.requires_grad
        for node, layer, owner, name in self._buffers:
            if owner in statistics and name in ("running_mean", "running_var"):
                node._buffers["buffer"] = statistics[owner][name == "running_var"]
            else:
                node._buffers["buffer"] = getattr(layer, name)

    def release(self) -> None:
        """Drop the bounds and graphs of the last call, which auto_LiRPA would hold until the next."""
        self.bounded.__dict__.update(ibp_lower=None, ibp_upper=None)
        for node in self.bounded._modules.values():
            attributes = node.__dict__
            for name in _HELD:
                attributes.pop(name, None)
            if "_lower" in attributes:  # later versions
                attributes.update(_lower=None, _upper=None)
        self.synchronise({}, gradients=True)


class Modules:
    """The wrapped forms of one network, and which of them each method of bounding it needs."""

    def __init__(self, core: nn.Module, example: Tensor, points: Tensor) -> None:
        self._core = core
        self._example = example
        self._proof = Proof(core, points)
        self._wrapped: dict[tuple[str, Mode, int], BoundedNetwork] = {}
        self._proven: set[tuple[str, Mode, int]] = set()
        self._modes: dict[str, Mode] = {}
        # What cannot be bounded, or not rightly traced, is found here rather than in the first step.
        self._table = self._first()

    def _first(self) -> BoundedNetwork:
        try:
            self._proof.samples_are_independent()
            try:
                return self._get("plain", usable_modes()[0], 1)
            except UnprovenError:
                return self._get("plain", usable_modes()[1], 1)
        except UnprovenError as error:
            raise unproven(self._core, str(error)) from error

    @contextlib.contextmanager
    def use(
        self, kind: str, mode: Mode, batch: int, statistics: Statistics, *, gradients: bool
    ) -> Iterator[BoundedNetwork]:
        """A wrapped network for ``batch`` samples. Methods that leave state behind have a ``kind`` of their own."""
        wrapped = self._get(kind, mode, batch)
        wrapped.synchronise(statistics, gradients=gradients)
        try:
            with default_dtype(self._example.dtype):
                yield wrapped
        finally:
            wrapped.release()

    @property
    def proven(self) -> bool:
        """Whether every trace in use was seen to be the network."""
        return self._proven >= self._wrapped.keys()

    def _get(self, kind: str, mode: Mode, batch: int) -> BoundedNetwork:
        key = (kind, mode, 0 if mode.any_batch else batch)
        size = _TRACE_BATCH if mode.any_batch else batch
        if key not in self._wrapped:
            example = self._example.expand(size, *self._example.shape[1:]).contiguous()
            fixed = [key for key in self._wrapped if key[2]]
            if len(fixed) >= _KEPT:
                del self._wrapped[fixed[0]]
                self._proven.discard(fixed[0])
            self._wrapped[key] = BoundedNetwork(self._core, example, conv_mode=mode.conv)
        if key not in self._proven:
            sizes = (size, 1, 3) if mode.any_batch else (size,)
            if self._proof.check(self._wrapped[key], sizes):
                self._proven.add(key)
        return self._wrapped[key]

    def mode(self, method: str, probe: Probe) -> Mode:
        """The first mode in which ``method`` gives right bounds, found at its first use."""
        if method not in self._modes:
            relaxation = "hbox" if method == "rows" else method.lower()
            try:
                check_operations(self._table.bounded, relaxation)
            except UnsupportedLayerError as error:
                raise unsupported(relaxation, self._core, str(error)) from error
            first: Exception | None = None
            for mode in usable_modes():
                try:
                    conclusive = self._check(mode, probe)
                except torch.OutOfMemoryError:
                    raise
                except (*LIRPA_FAILURES, _WrongProbe, UnprovenError) as error:
                    first = first or error
                    continue
                if conclusive:
                    self._modes[method] = mode
                return mode
            message = " ".join(str(first).split())[:300] or type(first).__name__
            raise UnsupportedLayerError(f"{method} cannot bound this network: {message}") from first
        return self._modes[method]

    def _check(self, mode: Mode, probe: Probe) -> bool:
        """At radius 0 the bound must be the forward pass; elsewhere it must be below it.

        False if the network's own output is not finite, so that nothing can be said.
        """
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(2, *self._example.shape[1:], generator=generator, dtype=self._example.dtype)
        x = x.to(self._example.device)
        radius = torch.tensor([0.0, 0.05], dtype=x.dtype, device=x.device).view(2, *[1] * (x.dim() - 1))
        with torch.no_grad(), evaluating(self._core):
            expected = self._core(x)
            spec = torch.eye(expected.shape[1], dtype=x.dtype, device=x.device).expand(2, -1, -1)
            lower = probe(mode, Box(x - radius, x + radius), spec)
        if not torch.isfinite(expected).all():
            return False
        tolerance = 1e-3 * (1.0 + expected.abs().max())
        right = lower.shape == expected.shape and bool(
            (lower <= expected + tolerance).all() and (lower[0] >= expected[0] - tolerance).all()
        )
        if not right:
            raise _WrongProbe("auto_LiRPA's bounds of this network do not fit its own output")
        return True


class _WrongProbe(EngineError):
    """The bound of a point is not the network's value there."""


def read_bounds(bounded: Any, lower: Tensor) -> Bounds:
    """The rows' bounds with those of the pre-activations, as auto_LiRPA left them in the module.

    NaN for samples with an activation whose input is not bounded in finite numbers, and for all of
    them where other activations than ReLUs are: there auto_LiRPA drops terms of the whole batch.
    """
    nodes = list(activations(bounded))
    intermediate = {node.name: (node.lower, node.upper) for _, node in relu_inputs(bounded)}
    if nodes:
        # Of each the width, which may overflow where both ends are finite, and what both add up to.
        ends = [(node.inputs[0].lower.detach(), node.inputs[0].upper.detach()) for node in nodes]
        found = [side.flatten(1).sum(1) for a, b in ends for side in (a, b)]
        widest = [(b - a).flatten(1).amax(1) for a, b in ends]
        bad = ~torch.isfinite(torch.stack(found).sum(0)) | ~torch.isfinite(torch.stack(widest)).all(0)
        if bool(bad.any()):
            if any(type(node).__name__ != "BoundRelu" for node in nodes):
                bad = torch.ones_like(bad)
            lower = lower.masked_fill(bad.unsqueeze(1), torch.nan)
    return Bounds(lower, intermediate)

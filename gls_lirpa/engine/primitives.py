"""What relaxations are made of: each way of bounding a network over boxes, by rows or by auto_LiRPA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.balls import Ball
from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.engine import alpha, hbox, rows
from gls_lirpa.engine.batchnorm import Statistics
from gls_lirpa.engine.graph import Node, evaluate
from gls_lirpa.engine.intersection import intersected
from gls_lirpa.engine.modules import Mode, Modules, read_bounds
from gls_lirpa.engine.proof import proof_points
from gls_lirpa.engine.row_compiled import is_compiled
from gls_lirpa.engine.row_members import stacked
from gls_lirpa.engine.row_network import RowNetwork, Tensors
from gls_lirpa.engine.wrap import bounded_input, check_first_layers, check_layers, count_classes, split_normalization
from gls_lirpa.errors import ConfigError, UnsupportedLayerError

ROUTES = ("auto", "lirpa")


class Primitives:
    """The bounds of one network over boxes, method by method, of a whole batch at once."""

    def __init__(self, model: nn.Module, example: Tensor, *, route: str) -> None:
        if route not in ROUTES:
            raise ConfigError(f"expected route {' or '.join(map(repr, ROUTES))}, got {route!r}")
        check_layers(model)
        self.model = model
        self.normalize, self.core = split_normalization(model)
        self.classes = count_classes(model, example)
        self._example = self._normalized(example[:1].detach())
        self._modules = Modules(self.core, self._example, proof_points(self._example, self._normalized))
        self._route = route
        self._reason: str | None = None
        self._compiled = False

    def relaxed(self, box: Box, spec: Tensor, method: str, statistics: Statistics) -> Bounds:
        """IBP, CROWN-IBP, or CROWN with intermediate bounds intersected with intervals, by the engine's route."""
        box = self.normalized_box(box)
        if self.route()[0] == "rows" and not isinstance(box, Ball):
            with self._row_form(statistics) as (network, tensors):
                return rows.relaxed(network, tensors, box, spec, method=method)
        return self._lirpa(self._mode(method), box, spec, method, statistics, intersect=True)

    def lirpa(self, box: Box, spec: Tensor, method: str, statistics: Statistics) -> Bounds:
        """One ``compute_bounds`` call of auto_LiRPA, its intermediate bounds as they are."""
        return self._lirpa(self._mode(method), self.normalized_box(box), spec, method, statistics)

    def _lirpa(
        self, mode: Mode, box: Box, spec: Tensor, method: str, statistics: Statistics, *, intersect: bool = False
    ) -> Bounds:
        with self._modules.use("plain", mode, len(box), statistics, gradients=True) as wrapped:
            bounded = wrapped.bounded
            if isinstance(box, Ball):
                check_first_layers(bounded)
            with intersected(bounded) if intersect and method == "CROWN" else contextlib.nullcontext():
                lower = bounded.compute_bounds(x=(bounded_input(box),), C=spec, method=method, bound_upper=False)[0]
            return read_bounds(bounded, lower)

    def route(self) -> tuple[str, str]:
        """Which way bounds of this network go, ``rows`` or ``lirpa``, and why."""
        if self._route == "lirpa":
            return "lirpa", "asked for"
        if self._reason is None:
            try:
                with self._row_form({}) as (network, _):
                    self._reason = ""
                    self._compiled = bool(network.chains) and is_compiled(self._example)
            except UnsupportedLayerError as error:
                self._reason = str(error)
        if self._reason:
            return "lirpa", self._reason
        return "rows", "affine layers and ReLUs alone" + (", convolutions by compiled kernels" * self._compiled)

    @contextlib.contextmanager
    def _row_form(self, statistics: Statistics) -> Iterator[tuple[RowNetwork, Tensors]]:
        """The network in row form with its weights as they are now."""
        example = self._example
        with self._modules.use("plain", self._mode("rows"), 1, statistics, gradients=True) as wrapped:
            network = wrapped.rows()
            yield network, stacked([network.tensors(example.dtype, example.device)])

    def _row_probe(self, mode: Mode, box: Box, spec: Tensor) -> Tensor:
        with self._modules.use("plain", mode, 1, {}, gradients=True) as wrapped:
            network = wrapped.rows()
            tensors = stacked([network.tensors(box.lower.dtype, box.lower.device)])
            return rows.crown(network, tensors, box, spec, tighten=True).lower

    def hbox(self, box: Box, spec: Tensor, statistics: Statistics) -> Bounds:
        _refuse_ball("hbox", box)
        return self._hbox(self._mode("hbox"), self.normalized_box(box), spec, statistics)

    def _hbox(self, mode: Mode, box: Box, spec: Tensor, statistics: Statistics) -> Bounds:
        with self._modules.use("plain", mode, len(box), statistics, gradients=True) as wrapped:
            return hbox.hbox_bounds(wrapped.graph(), box, spec)

    def _graph_value(self, mode: Mode, x: Tensor) -> Tensor:
        with self._modules.use("plain", mode, len(x), {}, gradients=True) as wrapped:
            nodes = wrapped.graph()
            return evaluate(nodes, x)[nodes[-1].name]

    def alpha(self, box: Box, spec: Tensor, statistics: Statistics, *, iterations: int | None) -> Bounds:
        """α-CROWN: auto_LiRPA's optimisation, or the one-step form where ``iterations`` is None."""
        _refuse_ball("alpha-crown", box)
        statistics = {name: (mean.detach(), var.detach()) for name, (mean, var) in statistics.items()}
        if self.route()[0] == "rows":
            with torch.no_grad(), self._row_form(statistics) as (network, tensors):
                return rows.alpha_crown(network, tensors, self.normalized_box(box), spec, iterations=iterations)
        mode = self._mode("alpha-crown-step" if iterations is None else "alpha-crown")
        return self._alpha(mode, self.normalized_box(box), spec, statistics, iterations)

    def _alpha(self, mode: Mode, box: Box, spec: Tensor, statistics: Statistics, iterations: int | None) -> Bounds:
        with torch.no_grad():
            crown = self._lirpa(mode, box, spec, "CROWN", statistics, intersect=True)
        if not crown.intermediate:
            return crown
        with self._modules.use("alpha", mode, len(box), statistics, gradients=False) as wrapped:
            if iterations is None:
                return alpha.one_step(wrapped.bounded, bounded_input(box), spec, crown)
            return alpha.optimised(wrapped.bounded, bounded_input(box), spec, crown, iterations=iterations)

    def graph(self, statistics: Statistics | None = None) -> list[Node]:
        """The network as affine maps and ReLUs, after the leading normalisation.

        The maps read the weights when they are applied. With ``statistics``, BatchNorm uses those
        until the next call of this engine.
        """
        with self._modules.use("plain", self._mode("hbox"), 1, {}, gradients=True) as wrapped:
            nodes = wrapped.graph()
        if statistics:
            wrapped.synchronise(statistics, gradients=True)
        return nodes

    @contextlib.contextmanager
    def _module(self, kind: str, batch: int, statistics: Statistics) -> Iterator[Any]:
        """A BoundedModule for a method that keeps state in it, cut off from the weights' gradients."""
        with self._modules.use(kind, self._mode("CROWN"), batch, statistics, gradients=False) as wrapped:
            yield wrapped.bounded

    def _mode(self, method: str) -> Mode:
        """The way of wrapping in which ``method`` works, tried out when it is first asked for."""
        if method == "hbox":
            # The graph alone is auto_LiRPA's: at a point it must give the network's value.
            return self._modules.mode(method, lambda mode, box, spec: self._graph_value(mode, box.center))
        if method == "rows":
            return self._modules.mode(method, self._row_probe)
        if method.startswith("alpha"):
            steps = 1 if method == "alpha-crown" else None
            return self._modules.mode(method, lambda mode, box, spec: self._alpha(mode, box, spec, {}, steps).lower)
        return self._modules.mode(
            method, lambda mode, box, spec: self._lirpa(mode, box, spec, method, {}, intersect=True).lower
        )

    def _normalized(self, x: Tensor) -> Tensor:
        return x if self.normalize is None else self.normalize(x)

    def normalized_box(self, box: Box) -> Box:
        if isinstance(box, Ball):
            return box if self.normalize is None else box.scaled(self._normalized, self.normalize.stretch)
        return Box(self._normalized(box.lower), self._normalized(box.upper))


def _refuse_ball(name: str, box: Box) -> None:
    if isinstance(box, Ball):
        raise ConfigError(f"{name} has no bounds over l2 balls: use ibp, crown-ibp or crown")

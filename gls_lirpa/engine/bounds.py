"""BoundEngine: the one place where bounds of a network are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gls_lirpa.autograd import scalar_with_gradient
from gls_lirpa.engine import alpha, hbox
from gls_lirpa.engine.batchnorm import Statistics, batchnorms, captured_statistics, in_train_mode
from gls_lirpa.engine.boxes import Bounds, Box, linf_box, margin_spec
from gls_lirpa.engine.graph import Node, read_graph, relu_inputs
from gls_lirpa.engine.wrap import bounded_input, preserved, wrap
from gls_lirpa.errors import EngineError, UnsupportedLayerError
from gls_lirpa.models import Normalize

if TYPE_CHECKING:
    from gls_lirpa.relaxations import Relaxation

_ENGINE_FAILURES = (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError)
"""What auto_LiRPA raises where it meets something it does not expect."""

CPU_CHUNK_MIB = 192
"""Retained memory per chunk on a CPU. Larger chunks of CROWN leave the caches and were slower."""


class BoundEngine:
    """Bounds of one network over input boxes, through auto_LiRPA and our HBox.

    The network's weights are shared: whatever they are at the time of a call is what is bounded.
    ``example`` fixes the input shape and may have any batch size. A leading ``Normalize`` layer is
    applied to the box itself, which is exact.

    >>> from gls_lirpa.relaxations import RELAXATIONS
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
    >>> engine = BoundEngine(model, x)
    >>> engine.margins(linf_box(x, 0.01), y, RELAXATIONS.get("crown")).shape
    torch.Size([2, 2])
    """

    def __init__(self, model: nn.Module, example: Tensor, *, chunk_mib: int | None = None) -> None:
        self.model = model
        self.normalize, self.core = _split_normalization(model)
        self._example = self._normalized(example[:1].detach())
        self._chunk_mib = chunk_mib
        self._modules: dict[tuple[str, int], Any] = {}
        self._graphs: dict[int, list[Node]] = {}
        self._sample_bytes: dict[str, float] = {}
        self._conv_mode = "patches"
        self._any_batch = False
        self._select_modes()
        with torch.no_grad(), preserved(model):
            model.eval()
            self.classes = int(model(example[:1]).shape[-1])

    # -- public ---------------------------------------------------------------------------------

    def fits(self, x: Tensor) -> bool:
        """Whether this engine was made for inputs of this shape, type and device."""
        return x.shape[1:] == self._example.shape[1:] and x.dtype == self._example.dtype and x.device == self._example.device

    def forward(self, x: Tensor) -> tuple[Tensor, Statistics]:
        """Logits of the clean batch and the batch statistics its train-mode BatchNorm layers used."""
        with captured_statistics(self.core) as statistics:
            logits: Tensor = self.core(self._normalized(x))
        return logits, statistics

    def margins(
        self, box: Box, labels: Tensor, relaxation: Relaxation, *, statistics: Statistics | None = None
    ) -> Tensor:
        """Lower bounds of f_y − f_j over the box for every j ≠ y, ascending: (batch, classes − 1)."""
        return self.bounds(box, margin_spec(labels, self.classes, box.lower.dtype), relaxation, statistics=statistics).lower

    def bounds(
        self, box: Box, spec: Tensor, relaxation: Relaxation, *, statistics: Statistics | None = None
    ) -> Bounds:
        """Bounds of ``spec`` · f and of every pre-activation, in chunks where no graph is needed."""
        statistics = self._statistics(box, statistics)
        if self._needs_graph(relaxation):
            return self._bounds(box, spec, relaxation, statistics)
        parts = [
            self._bounds(box[part], spec[part], relaxation, statistics)
            for part in self._chunks(len(box), relaxation, box, spec, statistics)
        ]
        return _concatenated(parts)

    def mean_loss(
        self,
        box: Box,
        labels: Tensor,
        relaxation: Relaxation,
        sample_loss: Callable[[Tensor], Tensor],
        *,
        statistics: Statistics | None = None,
    ) -> Tensor:
        """The mean of ``sample_loss(margins)`` over the batch, in bounded memory.

        Where the batch does not fit one chunk, each chunk's gradient is computed at once and the
        result carries the sum of them, so only one chunk's graph exists at a time.
        """
        spec = margin_spec(labels, self.classes, box.lower.dtype)
        statistics = self._statistics(box, statistics)
        parts = self._chunks(len(box), relaxation, box, spec, statistics)
        names = list(statistics)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        shared = [tensor for name in names for tensor in statistics[name]]
        if len(parts) == 1 or not self._needs_graph(relaxation):
            losses = [
                sample_loss(self._bounds(box[part], spec[part], relaxation, statistics).lower) for part in parts
            ]
            return torch.cat(losses).mean()
        leaves = [tensor.detach().requires_grad_() for tensor in shared]
        detached = {name: (leaves[2 * i], leaves[2 * i + 1]) for i, name in enumerate(names)}
        total = torch.zeros((), dtype=box.lower.dtype, device=box.lower.device)
        gradients: list[Tensor | None] = [None] * (len(weights) + len(leaves))
        for part in parts:
            bounds = self._bounds(box[part], spec[part], relaxation, detached)
            loss = sample_loss(bounds.lower).sum() / len(box)
            total += loss.detach()
            for i, gradient in enumerate(torch.autograd.grad(loss, [*weights, *leaves], allow_unused=True)):
                if gradient is not None:
                    gradients[i] = gradient if gradients[i] is None else gradients[i] + gradient
        return scalar_with_gradient(total, [*weights, *shared], gradients)

    # -- primitives the relaxations are made of ---------------------------------------------------

    def lirpa(self, box: Box, spec: Tensor, method: str, statistics: Statistics) -> Bounds:
        """One ``compute_bounds`` call of auto_LiRPA: IBP, CROWN-IBP or CROWN."""
        box = self.normalized_box(box)
        with self._module("plain", len(box), statistics) as bounded:
            lower = bounded.compute_bounds(x=(bounded_input(box),), C=spec, method=method, bound_upper=False)[0]
            return Bounds(lower, _intermediate(bounded))

    def hbox(self, box: Box, spec: Tensor, statistics: Statistics) -> Bounds:
        box = self.normalized_box(box)
        with self._module("plain", len(box), statistics) as bounded:
            key = len(box) if not self._any_batch else 0
            if key not in self._graphs:
                self._graphs[key] = read_graph(bounded)
            return hbox.hbox_bounds(self._graphs[key], box, spec)

    def alpha(self, box: Box, spec: Tensor, statistics: Statistics, *, iterations: int | None) -> Bounds:
        """α-CROWN: auto_LiRPA's optimisation, or the one-step form where ``iterations`` is None."""
        statistics = {name: (mean.detach(), var.detach()) for name, (mean, var) in statistics.items()}
        with torch.no_grad():
            crown = self.lirpa(box, spec, "CROWN", statistics)
        box = self.normalized_box(box)
        with self._module("alpha", len(box), statistics) as bounded:
            if iterations is None:
                return alpha.one_step(bounded, bounded_input(box), spec, crown)
            return alpha.optimised(bounded, bounded_input(box), spec, crown, iterations=iterations)

    def graph(self) -> list[Node]:
        """The network as affine maps and ReLUs, after the leading normalisation."""
        with self._module("plain", 1, {}) as bounded:
            return read_graph(bounded)

    # -- how -------------------------------------------------------------------------------------

    def _bounds(self, box: Box, spec: Tensor, relaxation: Relaxation, statistics: Statistics) -> Bounds:
        try:
            return relaxation.bound(self, box, spec, statistics)
        except torch.OutOfMemoryError:
            raise
        except _ENGINE_FAILURES as error:
            if self._conv_mode == "patches":
                self._use_matrix_mode()
                return self._bounds(box, spec, relaxation, statistics)
            message = " ".join(str(error).split()) or type(error).__name__
            raise UnsupportedLayerError(f"{relaxation.name} cannot bound this network: {message[:300]}") from error

    def _needs_graph(self, relaxation: Relaxation) -> bool:
        trained = any(parameter.requires_grad for parameter in self.model.parameters())
        return torch.is_grad_enabled() and relaxation.differentiable and trained

    def _statistics(self, box: Box, statistics: Statistics | None) -> Statistics:
        if statistics is None:
            return self.forward(box.center)[1] if in_train_mode(self.core) else {}
        return statistics

    def _normalized(self, x: Tensor) -> Tensor:
        return x if self.normalize is None else self.normalize(x)

    def normalized_box(self, box: Box) -> Box:
        return Box(self._normalized(box.lower), self._normalized(box.upper))

    def _chunks(
        self, size: int, relaxation: Relaxation, box: Box, spec: Tensor, statistics: Statistics
    ) -> list[slice]:
        count = self.chunk_size(relaxation, box, spec, statistics) if size > 1 else 1
        return [slice(start, min(start + count, size)) for start in range(0, size, count)]

    def chunk_size(self, relaxation: Relaxation, box: Box, spec: Tensor, statistics: Statistics) -> int:
        """How many samples' graphs fit the memory budget, from what autograd retains for one."""
        if relaxation.light:
            return len(box)
        if relaxation.name not in self._sample_bytes:
            self._sample_bytes[relaxation.name] = self._retained_bytes(relaxation, box[:1], spec[:1], statistics)
        return max(1, int(self._budget(box.lower.device) / max(self._sample_bytes[relaxation.name], 1.0)))

    def _budget(self, device: torch.device) -> float:
        if self._chunk_mib is not None:
            return self._chunk_mib * 2.0**20
        if device.type == "cuda":
            return 0.25 * torch.cuda.mem_get_info(device)[0]
        return CPU_CHUNK_MIB * 2.0**20

    def _retained_bytes(self, relaxation: Relaxation, box: Box, spec: Tensor, statistics: Statistics) -> float:
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with (
            preserved(self.model),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            # Without a graph nothing is retained, but the same tensors are alive at some time.
            for parameter in self.model.parameters():
                parameter.requires_grad = True
            kept = [self._bounds(box, spec, relaxation, statistics)]
            if not relaxation.differentiable:
                kept.append(self.lirpa(box, spec, "CROWN", statistics))
        del kept
        weights = sum(p.untyped_storage().nbytes() for p in self.model.parameters())
        return float(max(sum(seen.values()) - weights, 1))

    @contextlib.contextmanager
    def _module(self, kind: str, batch: int, statistics: Statistics) -> Iterator[Any]:
        """The BoundedModule of this kind, with the model's BatchNorm buffers and flags put in."""
        bounded = self._wrapped(kind, batch)
        with preserved(self.model):
            # In eval mode auto_LiRPA cuts the weights out of the graph, in train mode it keeps them.
            bounded.train(kind == "plain" and any(p.requires_grad for p in self.model.parameters()))
            self._synchronise(bounded, statistics)
            yield bounded

    def _wrapped(self, kind: str, batch: int) -> Any:
        key = (kind, 0 if self._any_batch else batch)
        if key not in self._modules:
            example = self._example.expand(batch, *self._example.shape[1:]).contiguous()
            self._modules[key] = wrap(self.core, example, conv_mode=self._conv_mode)
        return self._modules[key]

    def _synchronise(self, bounded: Any, statistics: Statistics) -> None:
        layers = batchnorms(self.core)
        for node in bounded._modules.values():
            if type(node).__name__ == "BoundBatchNormalization":
                name = node.inputs[3].ori_name.rpartition(".")[0]
                layer = layers[name]
                # The node stays in eval mode, where it takes its statistics from these two inputs.
                node.eval()
                mean, var = statistics.get(name, (layer.running_mean, layer.running_var))
                node.inputs[3].buffer, node.inputs[4].buffer = mean, var

    def _select_modes(self) -> None:
        """Take auto_LiRPA's fast convolution mode if it works on this network, and find out whether
        one traced module serves every batch size (a traced ``view`` may have fixed it)."""
        try:
            self._probe(1)
        except _ENGINE_FAILURES:
            self._use_matrix_mode()
            self._probe(1)
        traced = self._modules.pop(("plain", 1))
        try:
            self._modules[("plain", 0)] = traced
            self._any_batch = True
            self._probe(3)
        except (*_ENGINE_FAILURES, _WrongProbe):
            self._any_batch = False
            self._modules = {("plain", 1): traced}

    def _use_matrix_mode(self) -> None:
        """auto_LiRPA's patches are faster but do not know every operation on convolutions."""
        self._conv_mode = "matrix"
        self._modules.clear()
        self._graphs.clear()
        self._sample_bytes.clear()

    def _probe(self, batch: int) -> None:
        """At radius 0 CROWN's bound must be the forward pass."""
        x = torch.rand(batch, *self._example.shape[1:], device=self._example.device, dtype=self._example.dtype)
        with torch.no_grad(), preserved(self.core):
            self.core.eval()
            expected = self.core(x)
            spec = torch.eye(expected.shape[1], dtype=x.dtype, device=x.device).expand(batch, -1, -1)
            bounded = self._wrapped("plain", batch)
            self._synchronise(bounded, {})
            lower = bounded.compute_bounds(x=(bounded_input(Box(x, x)),), C=spec, method="CROWN", bound_upper=False)[0]
        scale = 1.0 + expected.abs().max()
        if lower.shape != expected.shape or not torch.all((lower - expected).abs() <= 1e-3 * scale):
            raise _WrongProbe("auto_LiRPA's bounds of this network do not contain its own output")


class _WrongProbe(EngineError):
    """The bound of a point is not the network's value there."""


def _split_normalization(model: nn.Module) -> tuple[Normalize | None, nn.Module]:
    if isinstance(model, nn.Sequential) and len(model) > 1 and isinstance(model[0], Normalize):
        return model[0], nn.Sequential(*list(model)[1:])
    return None, model


def _intermediate(bounded: Any) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        feeding.name: (feeding.lower, feeding.upper)
        for _, feeding in relu_inputs(bounded)
        if getattr(feeding, "lower", None) is not None
    }


def _concatenated(parts: list[Bounds]) -> Bounds:
    if len(parts) == 1:
        return parts[0]
    names = parts[0].intermediate
    return Bounds(
        torch.cat([part.lower for part in parts]),
        {
            name: (
                torch.cat([part.intermediate[name][0] for part in parts]),
                torch.cat([part.intermediate[name][1] for part in parts]),
            )
            for name in names
        },
    )

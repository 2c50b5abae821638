"""BoundEngine: the one place where bounds of a network are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gls_lirpa.base.autograd import scalar_with_gradient
from gls_lirpa.base.balls import Ball
from gls_lirpa.base.boxes import Bounds, Box, concatenated, margin_spec
from gls_lirpa.base.checks import require
from gls_lirpa.base.modes import preserved
from gls_lirpa.engine import populations
from gls_lirpa.engine.batchnorm import Statistics, captured_statistics, in_train_mode, unmoved_statistics
from gls_lirpa.engine.memory import budget, keep_freed_pages, retained_bytes
from gls_lirpa.engine.primitives import Primitives
from gls_lirpa.engine.relaxation import Relaxation, SampleFunction
from gls_lirpa.engine.row_members import copied
from gls_lirpa.engine.row_network import Tensors
from gls_lirpa.engine.wrap import LIRPA_FAILURES, check_dropout
from gls_lirpa.errors import DataError, EngineError

Chunked = Relaxation | SampleFunction
"""What is computed in chunks."""


class BoundEngine(Primitives):
    """Bounds of one network over input boxes, through auto_LiRPA and our HBox.

    Weights and buffers of ``model`` are those at the time of a call; only its layers must stay
    the same objects. ``example`` fixes the input shape and may have any batch size. A leading
    ``Normalize`` layer is applied to the box itself, which is exact. A bound that could not be
    computed in finite numbers is NaN. ``chunk_mib``: memory for the graphs of a chunk of samples, by default a fixed
    amount and on a GPU a quarter of what is free; 0: one sample at a time.

    Its methods take a ``box`` or ball with one row per sample, their ``labels``, a record of ``RELAXATIONS`` as
    ``relaxation``, and the ``statistics`` that BatchNorm in train mode uses, which ``forward`` returns.

    ``route="auto"`` bounds networks of affine layers and ReLUs by rows of unstable neurons alone, in our
    own code, and leaves others to auto_LiRPA; ``"lirpa"`` leaves everything to it, for the same bounds.

    >>> from gls_lirpa.base.boxes import linf_box
    >>> from gls_lirpa.relaxations import RELAXATIONS
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
    >>> engine = BoundEngine(model, x)
    >>> engine.margins(linf_box(x, 0.01), y, RELAXATIONS.get("crown")).shape
    torch.Size([2, 2])
    """

    def __init__(self, model: nn.Module, example: Tensor, *, chunk_mib: int | None = None, route: str = "auto") -> None:
        require(chunk_mib is None or chunk_mib >= 0, "chunk_mib >= 0 (0: one sample at a time)", chunk_mib)
        keep_freed_pages()
        super().__init__(model, example, route=route)
        self._layers = tuple(model.modules())
        self._chunk_mib = chunk_mib
        self._sample_bytes: dict[tuple[str, int], float] = {}

    # -- public ---------------------------------------------------------------------------------

    def fits(self, x: Tensor) -> bool:
        """Whether this engine was made for inputs of ``x``'s shape, type and device, and for the layers
        that the network has now."""
        example = self._example
        same_input = x.shape[1:] == example.shape[1:] and x.dtype == example.dtype and x.device == example.device
        return same_input and self._layers == tuple(self.model.modules())

    def forward(self, x: Tensor) -> tuple[Tensor, Statistics]:
        """Logits of the clean batch ``x`` and the batch statistics its train-mode BatchNorm layers used."""
        with captured_statistics(self.core) as statistics:
            logits: Tensor = self.core(self._normalized(x))
        return logits, statistics

    def margins(
        self, box: Box, labels: Tensor, relaxation: Relaxation, *, statistics: Statistics | None = None
    ) -> Tensor:
        """Lower bounds of f_y − f_j over the box for every j ≠ y, ascending: (batch, classes − 1)."""
        return self.bounds(box, self._margin_spec(box, labels), relaxation, statistics=statistics).lower

    def bounds(self, box: Box, spec: Tensor, relaxation: Relaxation, *, statistics: Statistics | None = None) -> Bounds:
        """Bounds of ``spec`` · f and of every pre-activation, in chunks where no graph is needed.

        Where BatchNorm is in train mode and no ``statistics`` are given, they are those of the boxes' centres.
        """
        self._check(box, spec)
        statistics = self._statistics(box, statistics)
        if self._needs_graph(relaxation, box):
            return self._bounds(box, spec, relaxation, statistics)
        return concatenated(
            [
                self._bounds(box[part], spec[part], relaxation, statistics)
                for part in self._chunks(box, spec, relaxation, statistics)
            ]
        )

    def layers(self, box: Box, relaxation: Relaxation) -> list[tuple[Tensor, Tensor]]:
        """Lower and upper bounds of every ReLU's input in network order, and last of the logits, in one call.

        >>> from gls_lirpa.base.boxes import linf_box
        >>> from gls_lirpa.relaxations import RELAXATIONS
        >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.rand(2, 4)
        >>> layers = BoundEngine(model, x).layers(linf_box(x, 0.1), RELAXATIONS.get("crown"))
        >>> [tuple(lower.shape) for lower, upper in layers]
        [(2, 8), (2, 3)]
        """
        eye = torch.eye(self.classes, dtype=box.lower.dtype, device=box.lower.device)
        rows = torch.cat([eye, -eye]).expand(len(box), -1, -1)
        bounds = self.bounds(box, rows, relaxation)
        lower, negative_upper = bounds.lower.split(self.classes, dim=1)
        return [*bounds.intermediate.values(), (lower, -negative_upper)]

    def mean_loss(
        self,
        box: Box,
        labels: Tensor,
        relaxation: Relaxation,
        sample_loss: Callable[..., Tensor],
        *,
        beside: Sequence[Tensor] = (),
        statistics: Statistics | None = None,
    ) -> Tensor:
        """The mean of ``sample_loss(margins, *beside)`` over the batch; see ``mean``."""

        def compute(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics, *beside: Tensor) -> Tensor:
            return sample_loss(relaxation.bound(engine, box, spec, statistics).lower, *beside)

        function = SampleFunction(relaxation.name, compute, relaxation.differentiable, relaxation.light)
        return self.mean(box, labels, function, beside=beside, statistics=statistics)

    def mean(
        self,
        box: Box,
        labels: Tensor,
        function: SampleFunction,
        *,
        beside: Sequence[Tensor] = (),
        statistics: Statistics | None = None,
    ) -> Tensor:
        """The mean of any ``function`` of one sample's box and margins over the batch, in bounded memory.

        Tensors in ``beside`` have one row per sample. Where the batch does not fit one chunk, each
        chunk's gradient is computed at once and the result carries the sum of them, so only one chunk's
        graph exists at a time. The gradient reaches the weights, the statistics, the box and ``beside``,
        and nothing else the function may use.
        """
        spec = self._margin_spec(box, labels)
        self._check(box, spec)
        statistics = self._statistics(box, statistics)
        parts = self._chunks(box, spec, function, statistics, beside)
        if len(parts) == 1 or not self._needs_graph(function, box):
            losses = [self._values(box[p], spec[p], function, statistics, [t[p] for t in beside]) for p in parts]
            return torch.cat(losses).mean()
        weights = [p for p in self.model.parameters() if p.requires_grad]
        shared = [box.lower, box.upper, *(tensor for pair in statistics.values() for tensor in pair), *beside]
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in shared]
        end = 2 + 2 * len(statistics)
        ends, pairs = replace(box, lower=leaves[0], upper=leaves[1]), zip(leaves[2:end:2], leaves[3:end:2], strict=True)
        detached = dict(zip(statistics, pairs, strict=True))
        wanted = [*weights, *(leaf for leaf in leaves if leaf.requires_grad)]
        total = torch.zeros((), dtype=box.lower.dtype, device=box.lower.device)
        gradients: list[Tensor | None] = [None] * len(wanted)
        for part in parts:
            own = [leaf[part] for leaf in leaves[end:]]
            loss = self._values(ends[part], spec[part], function, detached, own).sum() / len(box)
            total += loss.detach()
            for i, new in enumerate(torch.autograd.grad(loss, wanted, allow_unused=True)):
                old = gradients[i]
                gradients[i] = new if old is None else old if new is None else old + new
        return scalar_with_gradient(total, [*weights, *(t for t in shared if t.requires_grad)], gradients)

    def population_margins(
        self, box: Box, labels: Tensor, relaxation: Relaxation, members: Iterable[object]
    ) -> Tensor | None:
        """Margins of many weights of the network, several in one pass: (members, batch, classes − 1), no gradient.

        ``members`` puts the next weights in place whenever it is asked for the next item. None, with nothing asked
        for, where they must be bounded one at a time: BatchNorm in train mode, no row form, or too large for two.
        """
        spec = self._margin_spec(box, labels)
        self._check(box, spec)
        alone = bool(self._statistics(box, None)) or isinstance(box, Ball)
        bound = None if alone else populations.by_rows(self, relaxation)
        if bound is None:
            return None
        with torch.no_grad(), self._modules.use("plain", self._mode("rows"), 1, {}, gradients=True) as wrapped:
            network, inner = wrapped.rows(), self.normalized_box(box)
            size = populations.at_once(network, box, spec.shape[1], self._chunk_mib)
            if size < 2:
                return None

            def tensors() -> Iterator[Tensors]:
                for _ in members:
                    wrapped.synchronise({}, gradients=True)
                    yield copied(network.tensors(box.lower.dtype, box.lower.device))

            with _explained(relaxation.name):
                lower = populations.margins(network, bound, inner, spec, tensors(), size)
        return lower if self._modules.proven else torch.full_like(lower, torch.nan)

    # -- how -------------------------------------------------------------------------------------

    def _bounds(self, box: Box, spec: Tensor, relaxation: Relaxation, statistics: Statistics) -> Bounds:
        with _explained(relaxation.name):
            bounds = relaxation.bound(self, box, spec, statistics)
        if self._modules.proven:
            return bounds
        return Bounds(torch.full_like(bounds.lower, torch.nan), bounds.intermediate)

    def _values(
        self, box: Box, spec: Tensor, function: SampleFunction, statistics: Statistics, beside: Sequence[Tensor]
    ) -> Tensor:
        with _explained(function.name):
            values = function.compute(self, box, spec, statistics, *beside)
        return values if self._modules.proven else torch.full_like(values, torch.nan)

    def _check(self, box: Box, spec: Tensor) -> None:
        if not len(box):
            raise DataError("bounds need at least one sample, got an empty batch")
        if not isinstance(spec, Tensor):
            raise DataError(f"expected a specification, a tensor (batch, rows, classes), got {type(spec).__name__}")
        if spec.dim() != 3 or len(spec) != len(box) or spec.shape[2] != self.classes:
            raise DataError(
                f"expected a specification of shape ({len(box)}, rows, {self.classes}), got {tuple(spec.shape)}"
            )
        if not self.fits(box.lower):
            expected = f"{tuple(self._example.shape[1:])} of {self._example.dtype} on {self._example.device}"
            raise EngineError(
                f"this engine was made for inputs {expected} and the layers the network had then, "
                f"got {tuple(box.lower.shape[1:])} of {box.lower.dtype} on {box.lower.device}: make a new BoundEngine"
            )

    def _margin_spec(self, box: Box, labels: Tensor) -> Tensor:
        if labels.shape != (len(box),):
            raise DataError(f"expected {len(box)} labels for {len(box)} samples, got shape {tuple(labels.shape)}")
        return margin_spec(labels, self.classes, box.lower.dtype)

    def _needs_graph(self, function: Chunked, box: Box) -> bool:
        if not (torch.is_grad_enabled() and function.differentiable):
            return False
        return box.lower.requires_grad or any(parameter.requires_grad for parameter in self.model.parameters())

    def _statistics(self, box: Box, statistics: Statistics | None) -> Statistics:
        check_dropout(self.core)
        if statistics is not None:
            return statistics
        if not in_train_mode(self.core):
            return {}
        with unmoved_statistics(self.core):
            return self.forward(box.center)[1]

    def _chunks(
        self, box: Box, spec: Tensor, function: Chunked, statistics: Statistics, beside: Sequence[Tensor] = ()
    ) -> list[slice]:
        count = self.chunk_size(function, box, spec, statistics, beside) if len(box) > 1 else 1
        return [slice(start, min(start + count, len(box))) for start in range(0, len(box), count)]

    def chunk_size(
        self, function: Chunked, box: Box, spec: Tensor, statistics: Statistics, beside: Sequence[Tensor] = ()
    ) -> int:
        """How many samples' graphs fit the memory budget, from what autograd retains for one.

        ``function``: a relaxation, asked for the rows of ``spec``, or a function of samples and of what is ``beside``.
        """
        if function.light:
            return len(box)
        key = (function.name, spec.shape[1])
        if key not in self._sample_bytes:
            first = [tensor[:1] for tensor in beside]
            self._sample_bytes[key] = self._retained_bytes(function, box[:1], spec[:1], statistics, first)
        return max(1, int(budget(box.lower.device, self._chunk_mib) / self._sample_bytes[key]))

    def _retained_bytes(
        self, function: Chunked, box: Box, spec: Tensor, statistics: Statistics, beside: Sequence[Tensor]
    ) -> float:
        def compute() -> list[object]:
            if isinstance(function, SampleFunction):
                found: list[object] = [self._values(box, spec, function, statistics, beside)]
            else:
                found = [self._bounds(box, spec, function, statistics)]
            return found if function.differentiable else [*found, self.relaxed(box, spec, "CROWN", statistics)]

        with preserved(self.model):
            # Without a graph nothing is retained, but the same tensors are alive at some time.
            for parameter in self.model.parameters():
                parameter.requires_grad = True
            return retained_bytes(compute, self.model.parameters())


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """What auto_LiRPA raises inside becomes one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except LIRPA_FAILURES as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"{name} failed on this network: {message[:300]}") from error

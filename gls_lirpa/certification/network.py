"""The network under certification in its three forms, and how far its arithmetic can be trusted.

- ``plain``: the network as given, in eval mode. Predictions and counterexamples are judged on it.
- ``subject``: BatchNorm folded, in the given dtype. Bounds are computed on it.
- ``exact``: folded in float64. Bounds that rounding in the dtype could account for are computed again on it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, other_classes
from gls_lirpa.certification.narrow import Narrow
from gls_lirpa.certification.rounding import SINGLE_TO_DOUBLE, Rounding, rounding
from gls_lirpa.certification.stage import Subject
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.wrap import count_classes
from gls_lirpa.errors import ConfigError, DataError, EngineError, UnsupportedLayerError
from gls_lirpa.models.structure import fold_batchnorm

PLAUSIBLE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Usual rounding of a bound in units of 1 + max |f(x)|, by dtype. It proves nothing: it says when a bound in
float64 is worth its time, and below what a disagreement of bounds and values may be nothing but rounding."""

OBSERVED_ERROR = 16.0
"""How many times the observed rounding error of f(x) itself is added to that."""

SOLVER_MARGIN = 1e-6
"""A bound by branch and bound or a solver must exceed this times 1 + max |f(x)| as well: β and an LP's dual values
are not bounded by the weights, and HiGHS works to tolerances of 1e-9."""

FORWARD_BATCH = 256


@dataclass(frozen=True)
class Requirements:
    """What a bound must exceed to be a proof, per other class (b, K−1): one computed in the network's dtype, one in
    float64, and one by a stage that proves in float64 on the folded network. ``forward``: what the network's own
    margins may be off by; ``slack``: what a bound in the dtype may be. All are infinite where the network has an
    operation without a rounding bound, and ``reason`` says which.
    """

    forward: Tensor
    single: Tensor
    double: Tensor
    solver: Tensor
    slack: Tensor
    reason: str

    def put(self, index: Tensor, other: Requirements) -> None:
        """Replace those of some samples."""
        for name in ("forward", "single", "double", "solver", "slack"):
            getattr(self, name)[index] = getattr(other, name)


class Network:
    """Copies of ``model``, which is itself never modified.

    >>> net = Network(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), torch.rand(1, 1, 2, 2), seed=0)
    >>> net.classes, net.dtype
    (3, torch.float32)
    """

    def __init__(self, model: nn.Module, example: Tensor, *, seed: int) -> None:
        self.plain = _copied(model).eval().requires_grad_(False)
        weights = [*self.plain.parameters(), *(b for b in self.plain.buffers() if b.is_floating_point())]
        first = weights[0] if weights else example
        self.device, self.dtype = first.device, first.dtype
        if self.dtype not in PLAUSIBLE or any(w.dtype != self.dtype for w in weights):
            found = ", ".join(sorted({str(w.dtype) for w in weights}))
            raise ConfigError(f"expected a network in float32 or float64 throughout, got {found}")
        self.finite = all(bool(torch.isfinite(w).all()) for w in weights)
        self._seed = seed
        self._example = self.tensor(example[:1])
        self._folded = fold_batchnorm(self.plain).requires_grad_(False)
        self._is_folded = len(list(self._folded.modules())) < len(list(self.plain.modules()))
        self._exact = fold_batchnorm(copy.deepcopy(self.plain).double()).requires_grad_(False)
        count_classes(self.plain, self._example)
        self.classes = self.logits(self._example).shape[1]

    def tensor(self, x: Tensor) -> Tensor:
        """``x`` on the network's device, if it has the network's dtype."""
        if not isinstance(x, Tensor):
            raise DataError(f"expected inputs as a tensor, got {type(x).__name__}: torch.as_tensor(…) makes one")
        if x.dtype != self.dtype:
            raise DataError(f"expected images in {self.dtype}, the dtype of the network's weights, got {x.dtype}")
        return x.detach().to(self.device)

    def inputs(self, x: Tensor) -> Tensor:
        """``x`` on the network's device, if it holds images in [0, 1] of the network's dtype."""
        x = self.tensor(x)
        inside = (x >= 0) & (x <= 1)  # false for a NaN
        if not bool(inside.all()):
            sample = int((~inside.flatten(1).all(1)).nonzero()[0])
            raise DataError(f"expected images with pixels in [0, 1], got a value outside or NaN in sample {sample}")
        return x

    def box(self, x: Tensor, box: Box) -> Box:
        """``box`` on the network's device, if it is finite and each sample of ``x`` lies in its own."""
        lower, upper = self.tensor(box.lower), self.tensor(box.upper)
        if lower.shape != x.shape or upper.shape != x.shape:
            raise DataError(f"expected a box of shape {tuple(x.shape)}, got {tuple(lower.shape)}, {tuple(upper.shape)}")
        inside = (x >= lower) & (x <= upper) & torch.isfinite(lower) & torch.isfinite(upper)
        if not bool(inside.all()):
            sample = int((~inside.flatten(1).all(1)).nonzero()[0])
            raise DataError(f"expected finite boxes that hold their samples, got another one for sample {sample}")
        return box.map(self.tensor)

    @cached_property
    def subject(self) -> Subject:
        return Subject(self._folded, BoundEngine(self._folded, self._example), self._seed)

    @cached_property
    def exact_subject(self) -> Subject | None:
        """The float64 form; None where the network is float64 already."""
        if self.dtype == torch.float64:
            return None
        return Subject(self._exact, BoundEngine(self._exact, self._example.double()), self._seed)

    def logits(self, x: Tensor) -> Tensor:
        """The plain network's output."""
        logits = _forward(self.plain, x)
        if logits.dim() != 2 or logits.shape[1] < 2:
            raise ConfigError(f"expected a network with one logit per class, got outputs {tuple(logits.shape)}")
        return logits

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """f_y − f_j for every j ≠ y, ascending: (batch, classes − 1)."""
        others = other_classes(labels, self.classes)
        logits = logits.double()
        return logits.gather(1, labels.unsqueeze(1)) - logits.gather(1, others)

    def plausible(self, x: Tensor, logits: Tensor) -> Tensor:
        """Usual rounding at each sample (b,), as far as its own logits show it; NaN where the logits are."""
        reference = self._exact_logits(x.double())
        errors = [(logits - reference).abs().amax(1), (_forward(self._folded, x) - reference).abs().amax(1)]
        observed = torch.maximum(*errors)
        return PLAUSIBLE[self.dtype] * (1 + reference.abs().amax(1)) + OBSERVED_ERROR * observed

    def _exact_logits(self, x: Tensor) -> Tensor:
        try:
            return _forward(self._exact, x)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedLayerError(
                f"the network cannot be computed in float64, as bounds near zero must be: "
                f"{' '.join(str(error).split())[:200]}; write its forward pass without a dtype of its own"
            ) from error

    def requirements(self, box: Box, labels: Tensor, logits: Tensor) -> Requirements:
        """What bounds over boxes must exceed to prove something of the network as it runs."""
        return self._required(rounding(self.plain, box, labels, classes=self.classes), logits)

    @cached_property
    def narrow(self) -> Narrow:
        """The rounding of boxes whose inner values CROWN bounds in float64."""
        return Narrow(self.plain, (self.exact_subject or self.subject).engine, folded=self._is_folded)

    def narrow_requirements(self, box: Box, labels: Tensor, logits: Tensor) -> Requirements | None:
        """The same as ``requirements``, smaller and dearer; None where it cannot be had."""
        try:
            found = self.narrow.rounding(box, labels)
        except (EngineError, RuntimeError, MemoryError):  # then what intervals say has to do
            return None
        return None if found is None else self._required(found[1], logits)

    def image_requirements(self, labels: Tensor, logits: Tensor) -> Requirements:
        """The same for boxes of pixels, whatever they are: larger, but computed once for all."""
        found = self._image_rounding
        return self._required(Rounding(found.forward[labels], found.bound[labels], found.reason), logits)

    @cached_property
    def _image_rounding(self) -> Rounding:
        """Over the whole pixel range, for each label."""
        box = Box(torch.zeros_like(self._example), torch.ones_like(self._example))
        labels = torch.arange(self.classes, device=self.device)
        return rounding(self.plain, box, labels, classes=self.classes)

    def _required(self, found: Rounding, logits: Tensor) -> Requirements:
        double = SINGLE_TO_DOUBLE * found.bound if self.dtype == torch.float32 else found.bound
        # Weights folded and rounded to the dtype differ from the network's by less than its own rounding does.
        solver = found.forward * (2 if self._is_folded else 1) + double
        least = SOLVER_MARGIN * (1 + logits.double().abs().amax(1, keepdim=True))
        return Requirements(
            forward=found.forward,
            single=found.forward + found.bound,
            double=found.forward + double,
            solver=torch.maximum(solver, least),
            slack=found.bound,
            reason=found.reason,
        )

    def margins_at(self, point: Tensor, label: int) -> Tensor:
        """The plain network's margins at one point, evaluated by itself as anyone would replay it."""
        logits = self.logits(point.unsqueeze(0))
        return self.margins(logits, torch.tensor([label], device=logits.device))[0]

    def refutes(self, point: Tensor, label: int, box: Box) -> bool:
        """Whether a point proves that a sample is not robust: exactly inside its box (of one sample),
        and some other class reaches the true one."""
        if point.shape != box.lower.shape[1:] or point.dtype != self.dtype:
            return False
        inside = bool(((point >= box.lower[0]) & (point <= box.upper[0])).all())
        margins = self.margins_at(point, label)
        return inside and bool(torch.isfinite(margins).all()) and bool((margins <= 0).any())


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:  # a weight that another one was made of, a file, a lock
        message = " ".join(str(error).split())[:200]
        raise ConfigError(f"the network cannot be copied: {message}; remove weight_norm and the like first") from error


@torch.no_grad()
def _forward(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in torch.split(x, FORWARD_BATCH)])

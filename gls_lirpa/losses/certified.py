"""CertifiedLoss: natural and worst-case cross-entropy with regularisers, for any training loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.base.balls import check_norm
from gls_lirpa.base.boxes import check_eps, check_labels, linf_box, margin_spec
from gls_lirpa.engine.batchnorm import Statistics, in_train_mode
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import ConfigError
from gls_lirpa.losses.regularizers import l1_norm, warmup_penalty
from gls_lirpa.losses.terms import LOSSES, LossInput, check_l2_training, margin_cross_entropy, robust
from gls_lirpa.relaxations import RELAXATIONS, Relaxation, get_relaxation

_SMALLEST_RADIUS = 1e-4
"""Radius of the warm-up penalty's bounds while the training radius is still 0."""


@dataclass(frozen=True)
class CertifiedLossFactory:
    """Rebuilds a network and its loss in another process."""

    model: nn.Module
    options: dict[str, Any]

    def __call__(self) -> tuple[nn.Module, CertifiedLoss]:
        return self.model, CertifiedLoss(self.model, **self.options)


class CertifiedLoss:
    """κ · natural CE + (1 − κ) · worst-case CE + L1 + warm-up penalty, as ``loss(x, y) -> scalar``.

    ``model`` is the network, and ``eps`` the radius that is trained for.
    ``loss`` names the worst-case term (``robust`` over ``relaxation``, ``pgd``, …; see ``LOSSES``)
    and ``natural_weight`` is κ. ``l1`` weighs Σ|w|. ``warmup`` weighs the tightness and balance
    penalty on IBP bounds and fades linearly as a call's ``eps`` approaches the target. ``norm``: of the balls, ``linf``
    or ``l2``; the latter for loss ``robust`` over ``ibp``, ``crown-ibp`` or ``crown``. ``teacher`` is the
    network that a loss such as ``distill`` learns from. ``options`` are the loss's own, and ``chunk_mib`` is the
    engine's (see ``BoundEngine``). A call's ``generator`` is of what is random in its attack. The network's train/eval
    flag is obeyed; in train mode BatchNorm uses the clean batch's statistics.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> criterion = CertifiedLoss(model, "crown", eps=0.1)
    >>> criterion(torch.rand(2, 1, 2, 2), torch.tensor([0, 2])).backward()
    >>> model[1].weight.grad.shape
    torch.Size([8, 4])
    """

    def __init__(
        self,
        model: nn.Module,
        relaxation: str | Relaxation = "crown",
        *,
        eps: float,
        loss: str = "robust",
        natural_weight: float = 0.0,
        l1: float = 0.0,
        warmup: float = 0.0,
        chunk_mib: int | None = None,
        teacher: nn.Module | None = None,
        norm: str | float = "linf",
        **options: float,
    ) -> None:
        if not 0.0 <= natural_weight <= 1.0:
            raise ConfigError(f"natural_weight must lie in [0, 1], got {natural_weight}")
        if not (0.0 <= l1 < math.inf and 0.0 <= warmup < math.inf):
            raise ConfigError(f"l1 and warmup must be >= 0, got {l1} and {warmup}")
        self.model = model
        self.relaxation = get_relaxation(relaxation)
        self.norm = check_norm(norm)
        self.eps = check_eps(eps, self.norm)
        self.loss = LOSSES.get(loss)
        self._term = self.loss.configured(options)
        if (teacher is not None) != self.loss.teacher:
            raise ConfigError(
                f"loss {self.loss.name!r} needs a teacher: a trained network, e.g. --teacher RUN"
                if self.loss.teacher
                else f"loss {self.loss.name!r} learns from no teacher: remove it, or use loss 'distill'"
            )
        self.teacher = teacher
        check_l2_training(self.norm, self.loss, self.relaxation, warmup)
        self._weights = {"natural_weight": natural_weight, "l1": l1, "warmup": warmup}
        self._chunk_mib = chunk_mib
        self._options = options
        self._engine: BoundEngine | None = None

    @property
    def differentiable(self) -> bool:
        """Whether ``backward()`` of a call reaches the weights."""
        return self.relaxation.differentiable or not self.loss.bounds

    def engine(self, x: Tensor) -> BoundEngine:
        """The bound engine, made at the first call for the shape and device of ``x``."""
        if self._engine is None or not self._engine.fits(x):
            self._engine = BoundEngine(self.model, x, chunk_mib=self._chunk_mib)
        return self._engine

    def factory(self) -> CertifiedLossFactory:
        """A picklable recipe with a copy of the network, for actors in other processes."""
        options = {
            **self._weights,
            **self._options,
            "relaxation": self.relaxation,
            "eps": self.eps,
            "loss": self.loss.name,
            "chunk_mib": self._chunk_mib,
            "norm": self.norm,
            "teacher": copy.deepcopy(self.teacher).cpu() if self.teacher is not None else None,
        }
        return CertifiedLossFactory(copy.deepcopy(self.model).cpu(), options)

    def __call__(
        self, x: Tensor, y: Tensor, *, eps: float | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        radius = self.eps if eps is None else check_eps(eps, self.norm)
        worst = self._worst_weight(radius)
        engine = self.engine(x)
        check_labels(y, engine.classes)
        logits: Tensor | None = None
        statistics: Statistics = {}
        if worst < 1.0 or in_train_mode(self.model):
            logits, statistics = engine.forward(x)
        growing = radius < self.eps
        given = (radius, statistics, generator, growing, self.teacher, self.norm)
        batch = LossInput(engine, self.relaxation, x, y, *given)
        total = self._beside(batch, logits)
        return total + worst * self._term(batch) if worst > 0.0 else total

    def population(
        self,
        write: Callable[[Tensor], None],
        points: Iterable[Tensor],
        x: Tensor,
        y: Tensor,
        *,
        eps: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor | None:
        """The losses at many weights, (points,), several in one pass; each is put in place by ``write(point)``.

        What else it is given is a call's; ``generator`` is for losses that draw numbers.

        None, with nothing written, where this loss goes one at a time: for bounds see
        ``BoundEngine.population_margins``; other losses, and subclasses with a call of their own, have no such form.
        """
        radius = self.eps if eps is None else check_eps(eps, self.norm)
        worst = self._worst_weight(radius)
        own = type(self).__call__ is CertifiedLoss.__call__
        if not own or self.loss.term is not robust or worst == 0.0:
            return None
        engine = self.engine(x)
        check_labels(y, engine.classes)
        growing = radius < self.eps
        batch = LossInput(engine, self.relaxation, x, y, radius, {}, generator, growing, norm=self.norm)
        beside: list[Tensor] = []

        def members() -> Iterator[None]:
            for point in points:
                write(point)
                beside.append(self._beside(batch, engine.forward(x)[0] if worst < 1.0 else None))
                yield

        margins = engine.population_margins(batch.box, y, self.relaxation, members())
        if margins is None:
            return None
        losses = margin_cross_entropy(margins.flatten(0, 1)).view(margins.shape[:2])
        return torch.stack(beside) + worst * losses.mean(1)

    def _worst_weight(self, radius: float) -> float:
        """The weight of the worst case; at radius 0 that is the clean batch itself."""
        return 0.0 if radius == 0.0 or self.loss.name == "natural" else 1.0 - self._weights["natural_weight"]

    def _beside(self, batch: LossInput, logits: Tensor | None) -> Tensor:
        """All terms but the worst case."""
        total = torch.zeros((), dtype=batch.x.dtype, device=batch.x.device)
        natural = 1.0 - self._worst_weight(batch.eps)
        if natural > 0.0 and logits is not None:
            total = total + natural * F.cross_entropy(logits, batch.y)
        if self._weights["l1"] > 0:
            total = total + self._weights["l1"] * l1_norm(self.model)
        return total + self._warmup(batch) if self._fade(batch.eps) > 0 else total

    def _fade(self, radius: float) -> float:
        return self._weights["warmup"] * (1.0 - min(radius / self.eps, 1.0)) if self.eps > 0 else 0.0

    def _warmup(self, batch: LossInput) -> Tensor:
        # Ratios of radii have a limit as the radius goes to 0, but no value there.
        box = linf_box(batch.x, max(batch.eps, _SMALLEST_RADIUS))
        spec = margin_spec(batch.y, batch.engine.classes, batch.x.dtype)
        bounds = batch.engine.bounds(box, spec, RELAXATIONS.get("ibp"), statistics=batch.statistics)
        return self._fade(batch.eps) * warmup_penalty(bounds, batch.engine.normalized_box(box))

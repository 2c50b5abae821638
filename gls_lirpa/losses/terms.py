"""The worst-case part of a loss, by name: functions of one prepared batch.

A term sees the network through ``LossInput`` alone: the bound engine, the relaxation, and, where
BatchNorm is in train mode, the statistics of the clean batch, under which bounds and attacks alike
must see the network. A new loss is one such function and one ``LOSSES.register`` line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.attacks import pgd_points
from gls_lirpa.base.balls import region
from gls_lirpa.base.boxes import Box
from gls_lirpa.base.options import Option, Options, Value
from gls_lirpa.base.registry import Registry
from gls_lirpa.engine.batchnorm import Statistics, applied_statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import ConfigError
from gls_lirpa.losses.published import Setting, Training, at
from gls_lirpa.losses.refusal import with_gradient_or_refusal
from gls_lirpa.relaxations import Relaxation, ball_relaxations


@dataclass(frozen=True)
class LossInput:
    """One batch, ready for a term: inputs ``x``, labels ``y``, the ``engine`` of the network and the ``relaxation``.

    ``eps``: the radius of now, in the ``norm``; ``statistics``: empty unless BatchNorm is in train mode;
    ``generator``: of what is random in an attack; ``growing``: while the radius has not yet reached the one that is
    trained for; ``teacher``: for losses that learn from one.
    """

    engine: BoundEngine
    relaxation: Relaxation
    x: Tensor
    y: Tensor
    eps: float
    statistics: Statistics
    generator: torch.Generator | None = None
    growing: bool = False
    teacher: nn.Module | None = None
    norm: str = "linf"

    @property
    def box(self) -> Box:
        return region(self.x, self.eps, self.norm)

    def logits(self, x: Tensor) -> Tensor:
        """The network at ``x`` under the clean batch's statistics, running statistics untouched."""
        with applied_statistics(self.engine.core, self.statistics) if self.statistics else contextlib.nullcontext():
            return self.engine.forward(x)[0]

    def adversarial(self, box: Box, *, steps: int, restarts: int = 1) -> Tensor:
        """Points of ``box`` that make the cross-entropy large, found by so many ``steps`` of projected gradient ascent.

        Of several ``restarts`` the best point of each sample is kept.
        """
        return pgd_points(self.logits, self.x, self.y, box, steps=steps, restarts=restarts, generator=self.generator)


Term = Callable[[LossInput], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss by name: ``term(batch, **options)``.

    ``bounds``: whether it uses the relaxation, and so needs one with a gradient under backprop.
    ``relaxation``: the one it was published with, for configurations that name none. ``teacher``: whether it
    needs a trained network beside the one it trains. ``balls``: whether it is defined over ℓ2 balls too.
    ``published``: options of the literature by (dataset, ε), and ``training``: CTBench's beside them. ``mixes``:
    whether an option of its own weighs the worst case against another part, so that a search leaves the natural weight
    alone. ``help``: what the command line says of it.
    """

    name: str
    term: Callable[..., Tensor]
    bounds: bool
    options: Options = field(default_factory=Options)
    relaxation: str = "crown"
    teacher: bool = False
    help: str = ""
    published: Mapping[Setting, dict[str, Value]] = field(default_factory=dict)
    balls: bool = False
    training: Mapping[Setting, Training] = field(default_factory=dict)
    mixes: bool = False

    def configured(self, options: Mapping[str, Value]) -> Term:
        """The term with its options set, each of them checked."""
        chosen = {**self.options.defaults(), **self.options.checked(f"loss {self.name!r}", options)}
        return partial(self.term, **chosen)

    def published_options(self, dataset: str, eps: float, *, relaxation: str | None = None) -> dict[str, Value]:
        """The literature's options at radius ``eps`` that apply to a relaxation; none where nothing was published.

        >>> LOSSES.get("robust").published_options("mnist", 0.1)
        {}
        """
        used = self.relaxation if relaxation is None else relaxation
        options = at(self.published, dataset, eps) or {}
        return {key: value for key, value in options.items() if self.options[key].applies_to(used)}


def margin_cross_entropy(margins: Tensor) -> Tensor:
    """CE per sample from margins f_y − f_j: ln(1 + Σ_j exp(−m_j)).

    >>> round(margin_cross_entropy(torch.zeros(1, 1)).item(), 4)
    0.6931
    """
    return torch.logsumexp(F.pad(-margins, (1, 0)), dim=1)


def natural(batch: LossInput) -> Tensor:
    """Cross-entropy of the clean batch."""
    return F.cross_entropy(batch.logits(batch.x), batch.y)


def pgd(batch: LossInput, *, steps: int) -> Tensor:
    """Cross-entropy at adversarial points: a lower bound of the worst case."""
    return F.cross_entropy(batch.logits(batch.adversarial(batch.box, steps=steps)), batch.y)


def robust(batch: LossInput) -> Tensor:
    """Cross-entropy over the relaxation's margins: an upper bound of the worst case."""
    loss = batch.engine.mean_loss(
        batch.box, batch.y, batch.relaxation, margin_cross_entropy, statistics=batch.statistics
    )
    return with_gradient_or_refusal(batch, loss)


LOSSES: Registry[Loss] = Registry("loss")
ROBUST_TRAINING = {
    ("mnist", 0.1): Training(2e-6, 0.7, 2.0),
    ("mnist", 0.3): Training(2e-6, 0.7),
    ("cifar10", 2 / 255): Training(1e-6, 0.8),
    ("cifar10", 8 / 255): Training(),
    ("tinyimagenet", 1 / 255): Training(1e-5),
}
"""IBP's, for other relaxations as well."""
STEPS = Option("steps", int, "steps of the attack", default=8, least=1)
LOSSES.register(
    "natural",
    Loss("natural", natural, bounds=False, balls=True, help="cross-entropy of the clean batch"),
    aliases=("standard", "ce"),
)
LOSSES.register(
    "pgd",
    Loss("pgd", pgd, bounds=False, options=Options(STEPS), help="cross-entropy at adversarial points"),
    aliases=("adversarial",),
)
LOSSES.register(
    "robust",
    Loss(
        "robust",
        robust,
        bounds=True,
        balls=True,
        help="cross-entropy over the relaxation's margins",
        training=ROBUST_TRAINING,
    ),
    aliases=("certified",),
)


def check_l2_training(norm: str, loss: Loss, relaxation: Relaxation, warmup: float) -> None:
    """Refuse what does not know ℓ2 balls: attacks, the warm-up penalty, and other relaxations."""
    if norm == "linf" or (loss.balls and not loss.bounds):
        return
    if not loss.balls:
        expected = " or ".join(repr(name) for name in LOSSES if LOSSES.get(name).balls)
        raise ConfigError(f"loss {loss.name!r} works in linf boxes: expected loss {expected} with norm 'l2'")
    if warmup > 0:
        raise ConfigError(f"the warm-up penalty is for linf boxes: expected warmup 0 with norm 'l2', got {warmup}")
    if not relaxation.balls:
        expected = ", ".join(ball_relaxations())
        raise ConfigError(f"{relaxation.name} has no bounds over l2 balls: expected one of {expected}")

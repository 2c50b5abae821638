"""Expressive losses: from adversarial to certified training by one number (De Palma et al. 2024).

With the margins f_y − f_j, j ≠ y, at PGD points of B_{ρε}(x), a, and the relaxation's lower bounds of them
over B_ε(x), l, and ℓ(m) = ln(1 + Σ_j e^{−m_j}), for every sample

    mtl    (1 − α) · ℓ(a) + α · ℓ(l)
    cc     ℓ((1 − α) · a + α · l)
    exp    ℓ(a)^{1−α} · ℓ(l)^α

α = 0 is adversarial and α = 1 certified training. For ρ = 1, a ≥ l and ℓ falls in every margin, so all three lie
between ℓ(a) and ℓ(l) and grow with α; ℓ is convex, so cc ≤ mtl, and by the inequality of the means exp ≤ mtl.
ρ > 1 attacks in a larger box than is bounded. The published methods bound by IBP (mtl-ibp, cc-ibp, exp-ibp);
any relaxation can take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.losses.checks import number, whole, with_gradient_or_refusal
from gls_lirpa.losses.terms import LOSSES, Loss, LossInput, margin_cross_entropy, robust

_TINY = -15.0
"""Below it ln ln(1 + e^z) is z to 2e-7, while ln(1 + e^z) itself would lose its digits and then vanish."""

Mix = Callable[[Tensor, Tensor, float], Tensor]


def log_cross_entropy(margins: Tensor) -> Tensor:
    """ln ℓ(m) per sample, finite with a finite gradient however small ℓ is.

    >>> log_cross_entropy(torch.tensor([[200.0]])).item()
    -200.0
    """
    z = torch.logsumexp(-margins, dim=1)
    tiny = z < _TINY
    return torch.where(tiny, z, torch.log(F.softplus(torch.where(tiny, torch.zeros_like(z), z))))


def mix_losses(bounded: Tensor, attacked: Tensor, alpha: float) -> Tensor:
    """mtl: the losses, mixed."""
    return (1.0 - alpha) * margin_cross_entropy(attacked) + alpha * margin_cross_entropy(bounded)


def mix_margins(bounded: Tensor, attacked: Tensor, alpha: float) -> Tensor:
    """cc: the loss of mixed margins."""
    return margin_cross_entropy((1.0 - alpha) * attacked + alpha * bounded)


def mix_logarithms(bounded: Tensor, attacked: Tensor, alpha: float) -> Tensor:
    """exp: the geometric mean of the losses."""
    return torch.exp((1.0 - alpha) * log_cross_entropy(attacked) + alpha * log_cross_entropy(bounded))


def expressive(batch: LossInput, *, mix: Mix, alpha: float, radius: float, steps: int) -> Tensor:
    """The mean over the batch of ``mix(bounded, attacked, alpha)``; ``radius`` is the attack's, in units of ε.

    A part of weight 0 is not computed.

    >>> from gls_lirpa import CertifiedLoss
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
    >>> mixed = CertifiedLoss(model, "crown", eps=0.1, loss="exp", alpha=1.0)(x, y)
    >>> bool(mixed == CertifiedLoss(model, "crown", eps=0.1)(x, y))
    True
    """
    alpha = number("alpha", alpha, most=1.0)
    radius, steps = number("radius", radius), whole("steps", steps, least=1)
    if alpha == 1.0:
        return robust(batch)
    points = batch.adversarial(linf_box(batch.x, min(radius * batch.eps, 1.0)), steps=steps)
    logits = batch.logits(points)
    if alpha == 0.0:
        return F.cross_entropy(logits, batch.y)
    attacked = (margin_spec(batch.y, batch.engine.classes, logits.dtype) @ logits.unsqueeze(-1)).squeeze(-1)
    loss = batch.engine.mean_loss(
        batch.box,
        batch.y,
        batch.relaxation,
        lambda bounded, beside: mix(bounded, beside, alpha),
        beside=(attacked,),
        statistics=batch.statistics,
    )
    return with_gradient_or_refusal(batch, loss)


for _name, _mix in (("mtl", mix_losses), ("cc", mix_margins), ("exp", mix_logarithms)):
    LOSSES.register(
        _name,
        Loss(
            _name,
            partial(expressive, mix=_mix),
            bounds=True,
            options={"alpha": 0.5, "radius": 1.0, "steps": 8},
            relaxation="ibp",
        ),
        aliases=(f"{_name}-ibp",),
    )

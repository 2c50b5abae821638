"""Loss fusion: one bound per sample on the loss itself instead of one per class (Xu et al. 2020).

With the margins m_j(x) = f_y(x) − f_j(x), j ≠ y, the loss is ℓ(m) = ln(1 + Σ_j e^{−m_j}). IBP gives
cheap ranges l_j ≤ m_j(x) ≤ u_j over the box. Let w_j = u_j − l_j, φ(w) = (1 − e^{−w})/w (φ(0) = 1),
Z = 1 + Σ_j e^{−l_j}, and p_j = φ(w_j) · e^{−l_j} / Z. e^{−m} is convex, so it lies below its chord
over [l_j, u_j], whose slope is −φ(w_j) e^{−l_j}:

    e^{−m_j(x)} ≤ e^{−l_j} − φ(w_j) e^{−l_j} (m_j(x) − l_j)            for every x in the box.

Summed over j and divided by Z:

    (1 + Σ_j e^{−m_j(x)}) / Z ≤ 1 − Σ_j p_j (m_j(x) − l_j) ≤ 1 − g,
    g = max(0, R − Σ_j p_j l_j),

where R is the relaxation's lower bound of the one row Σ_j p_j (e_y − e_j) · f(x); the maximum with 0
is sound because every m_j − l_j ≥ 0 and p_j ≥ 0. The logarithm is monotone, hence

    max_x ℓ(m(x)) ≤ ℓ(l) + ln(1 − g) ≤ ℓ(l):

the fused loss bounds the worst case, and is never above the unfused loss of the same class bounds
l_j. Against the unfused loss of the relaxation itself (K − 1 rows) it may be looser, because of the
chord over IBP's ranges: that is the price for one row instead of K − 1. It is also at least
ℓ(u), which bounds ℓ from below on the box; this guards the logarithm against rounding. Gradients
flow through l, u and p as well as through R.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.base.boxes import Box
from gls_lirpa.engine.batchnorm import Statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.relaxation import SampleFunction
from gls_lirpa.losses.refusal import with_gradient_or_refusal
from gls_lirpa.losses.terms import LOSSES, ROBUST_TRAINING, Loss, LossInput, margin_cross_entropy
from gls_lirpa.relaxations import RELAXATIONS, Relaxation


def chord_weights(lower: Tensor, upper: Tensor) -> Tensor:
    """p_j = φ(u_j − l_j) · e^{−l_j} / (1 + Σ_k e^{−l_k}), without overflow.

    >>> chord_weights(torch.zeros(1, 1), torch.zeros(1, 1)).item()
    0.5
    """
    width = (upper - lower).clamp(min=0)
    narrow = width < 1e-4
    # Below, φ's expansion 1 − w/2 is exact to 2e-9, and the quotient would lose digits.
    divisor = torch.where(narrow, torch.ones_like(width), width)
    phi = torch.where(narrow, 1 - width / 2, -torch.expm1(-divisor) / divisor)
    return phi * torch.softmax(F.pad(-lower, (1, 0)), dim=1)[:, 1:]


def fused(relaxation: Relaxation) -> SampleFunction:
    """The bound of each sample's loss, one row of ``relaxation`` each.

    >>> fused(RELAXATIONS.get("crown-ibp")).name
    'crown-ibp-fused'
    """
    ranges = RELAXATIONS.get("ibp")

    def compute(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics) -> Tensor:
        both = ranges.bound(engine, box, torch.cat([spec, -spec], dim=1), statistics).lower
        lower, upper = both[:, : spec.shape[1]], -both[:, spec.shape[1] :]
        weights = chord_weights(lower, upper)
        row = weights.unsqueeze(1) @ spec
        single = relaxation.bound(engine, box, row if relaxation.differentiable else row.detach(), statistics)
        gain = (single.lower.squeeze(1) - (weights * lower).sum(1)).clamp(min=0)
        unfused = margin_cross_entropy(lower)
        resolution = torch.finfo(gain.dtype).eps
        loss = unfused + torch.log((1 - gain).clamp(min=resolution))
        return torch.maximum(loss, margin_cross_entropy(upper))

    return SampleFunction(
        f"{relaxation.name}-fused", compute, differentiable=relaxation.differentiable, light=relaxation.light
    )


def robust_fused(batch: LossInput) -> Tensor:
    """An upper bound of the worst-case cross-entropy from one specification row per sample."""
    loss = batch.engine.mean(batch.box, batch.y, fused(batch.relaxation), statistics=batch.statistics)
    return with_gradient_or_refusal(batch, loss)


LOSSES.register(
    "robust-fused",
    Loss(
        "robust-fused",
        robust_fused,
        bounds=True,
        relaxation="crown-ibp",
        help="one bound per sample, on the loss",
        training=ROBUST_TRAINING,
    ),
    aliases=("loss-fusion", "fused"),
)

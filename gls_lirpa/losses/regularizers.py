"""Regularisers: L1, and the tightness and balance terms that go with IBP initialisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Bounds, Box

TOLERANCE = 0.5
"""Ratios above this are not penalised, as in the IBP initialisation's literature."""


def l1_norm(model: nn.Module) -> Tensor:
    """Σ|w| over weight matrices and kernels (not biases, not BatchNorm).

    >>> l1_norm(nn.Linear(2, 1)).ndim
    0
    """
    terms = [p.abs().sum() for p in model.parameters() if p.dim() > 1]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def warmup_penalty(bounds: Bounds, box: Box) -> Tensor:
    """Penalise IBP bounds that explode with depth and ReLUs that are all active or all dead.

    Per layer with centre c, radius Δ and the input's radius Δ₀:
    tightness: relu(t − E[Δ₀]/E[Δ]) / t;
    balance: the same for the ratio, taken below 1, of the means and of the variances of c over
    always-active against never-active neurons. A layer without either kind has no balance term.
    """
    input_radius = ((box.upper - box.lower) / 2).mean()
    penalties = []
    for lower, upper in bounds.intermediate.values():
        center, radius = (upper + lower) / 2, (upper - lower) / 2
        penalties.append(_shortfall(input_radius / radius.mean().clamp(min=1e-12)))
        active, inactive = (lower > 0).to(center.dtype), (upper < 0).to(center.dtype)
        if bool(active.any()) and bool(inactive.any()):
            spread = (center - center.mean()) ** 2
            means = (center * active).mean() / -(center * inactive).mean()
            variances = (spread * active).sum() / (spread * inactive).sum().clamp(min=1e-12)
            penalties += [_shortfall(_below_one(means)), _shortfall(_below_one(variances))]
    if not penalties:
        return torch.zeros((), dtype=box.lower.dtype, device=box.lower.device)
    return torch.stack(penalties).sum() / len(bounds.intermediate)


def _below_one(ratio: Tensor) -> Tensor:
    return torch.minimum(ratio, 1 / ratio.clamp(min=1e-12))


def _shortfall(ratio: Tensor) -> Tensor:
    return torch.relu(TOLERANCE - ratio) / TOLERANCE

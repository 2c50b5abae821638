"""MTL-IBP: a convex combination of an adversarial and a certified loss (De Palma et al. 2024).

    L = (1 − α) · CE at PGD points of B_{ρε}(x) + α · robust CE over B_ε(x)

α ∈ [0, 1] moves from adversarial training to certified training; for ρ = 1 L lies between a lower
and an upper bound of the worst-case loss. ρ > 1 attacks in a larger box than is bounded. The
published method bounds by IBP; any relaxation can take its place.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.losses.checks import number, whole
from gls_lirpa.losses.terms import LOSSES, Loss, LossInput, robust


def mtl_ibp(batch: LossInput, *, alpha: float, radius: float, steps: int) -> Tensor:
    """(1 − alpha) · adversarial CE + alpha · robust CE; ``radius`` is the attack's, in units of ε.

    A part of weight 0 is not computed.

    >>> import torch
    >>> from gls_lirpa import CertifiedLoss
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
    >>> mixed = CertifiedLoss(model, "ibp", eps=0.1, loss="mtl-ibp", alpha=1.0)(x, y)
    >>> bool(mixed == CertifiedLoss(model, "ibp", eps=0.1)(x, y))
    True
    """
    alpha = number("alpha", alpha, most=1.0)
    radius, steps = number("radius", radius), whole("steps", steps, least=1)
    parts = []
    if alpha < 1.0:
        box = linf_box(batch.x, min(radius * batch.eps, 1.0))
        parts.append((1.0 - alpha) * F.cross_entropy(batch.logits(batch.adversarial(box, steps=steps)), batch.y))
    if alpha > 0.0:
        parts.append(alpha * robust(batch))
    return sum(parts[1:], parts[0])


LOSSES.register(
    "mtl-ibp",
    Loss("mtl-ibp", mtl_ibp, bounds=True, options={"alpha": 0.5, "radius": 1.0, "steps": 8}, relaxation="ibp"),
    aliases=("mtl",),
)

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
from gls_lirpa.base.options import Option, Options
from gls_lirpa.losses.terms import LOSSES, STEPS, Loss, LossInput, robust


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
    parts = []
    if alpha < 1.0:
        box = linf_box(batch.x, min(radius * batch.eps, 1.0))
        parts.append((1.0 - alpha) * F.cross_entropy(batch.logits(batch.adversarial(box, steps=steps)), batch.y))
    if alpha > 0.0:
        parts.append(alpha * robust(batch))
    return sum(parts[1:], parts[0])


# α, ρ and steps of CTBench (Mao et al. 2025); one step goes from any start to a corner of the box.
LOSSES.register(
    "mtl-ibp",
    Loss(
        "mtl-ibp",
        mtl_ibp,
        bounds=True,
        options=Options(
            Option("alpha", float, "weight of the certified part", default=0.5, most=1.0),
            Option("radius", float, "radius of the attack in units of eps", default=1.0),
            STEPS,
        ),
        relaxation="ibp",
        help="adversarial and certified loss in a convex combination",
        published={
            ("mnist", 0.1): {"alpha": 0.02, "radius": 1.0, "steps": 1},
            ("mnist", 0.3): {"alpha": 0.5, "radius": 1.0, "steps": 1},
            ("cifar10", 2 / 255): {"alpha": 0.01, "radius": 2.0, "steps": 8},
            ("cifar10", 8 / 255): {"alpha": 0.6, "radius": 1.0, "steps": 1},
            ("tinyimagenet", 1 / 255): {"alpha": 0.05, "radius": 1.5, "steps": 1},
        },
    ),
    aliases=("mtl",),
)

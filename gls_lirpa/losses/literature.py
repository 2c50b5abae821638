"""Published hyper-parameters of the baselines, per dataset and ε, as options of ``CertifiedLoss``.

They were tuned for networks of 10⁷ parameters (CNN7 with BatchNorm): a place to start from. λ, the scales and
all of mtl's options are CTBench's (Mao et al. 2025), other attacks' steps and all of cc's and exp's options those
of each method's authors, except exp at MNIST 0.1, which is CTBench's, and 0.3, which nobody published. What else
CTBench sets for a loss is in :mod:`gls_lirpa.training.published`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gls_lirpa.losses.terms import LOSSES

TOLERANCE = 1e-9


class Mixture(NamedTuple):
    """α of an expressive loss, its attack's radius in units of ε, and the attack's steps."""

    alpha: float
    radius: float
    steps: int


@dataclass(frozen=True)
class Setting:
    """One column of the literature's tables.

    ``lam`` and ``staps_lam`` are the small boxes of SABR and STAPS, ``shrinkage`` belongs to both and to TAPS;
    the scales are those of TAPS's gradient; ``relus`` is how many of CNN7's 6 ReLUs TAPS attacks (STAPS: 1), for
    that network alone; ``mtl``, ``cc`` and ``exp`` are the expressive losses.
    """

    dataset: str
    eps: float
    lam: float
    staps_lam: float
    shrinkage: float
    taps_scale: float
    staps_scale: float
    relus: int
    mtl: Mixture
    cc: Mixture
    exp: Mixture | None

    def options(self, loss: str) -> dict[str, float]:
        """The options of one loss; none where nothing was tuned."""
        table: dict[str, dict[str, float]] = {
            "sabr": {"lam": self.lam, "shrinkage": self.shrinkage},
            "taps": {"scale": self.taps_scale, "relus": self.relus, "shrinkage": self.shrinkage},
            "staps": {"scale": self.staps_scale, "lam": self.staps_lam, "shrinkage": self.shrinkage},
            "mtl": self.mtl._asdict(),
            "cc": self.cc._asdict(),
            "exp": {} if self.exp is None else self.exp._asdict(),
        }
        return table.get(LOSSES.canonical(loss), {})


LITERATURE = (
    # Shrinkage: the authors of SABR and STAPS, and CTBench for all three, have it at 2/255 alone.
    # An attack of one step goes from any start to a corner of the box.
    #        dataset      ε  λ  STAPS shrink TAPS STAPS relus  mtl: α, ρ, steps  cc  exp
    Setting("mnist", 0.1, 0.4, 0.4, 1.0, 4.0, 4.0, 3, Mixture(0.02, 1, 10), Mixture(0.1, 1, 1), Mixture(0.02, 1, 10)),
    Setting("mnist", 0.3, 0.9, 0.6, 1.0, 4.0, 4.0, 2, Mixture(0.5, 1, 1), Mixture(0.3, 1, 1), None),
    Setting(
        *("cifar10", 2 / 255, 0.1, 0.1, 0.8, 4.0, 2.0, 5),
        *(Mixture(0.01, 2, 1), Mixture(0.01, 2.1, 8), Mixture(0.095, 2.1, 8)),
    ),
    Setting("cifar10", 8 / 255, 0.9, 0.9, 1.0, 2.0, 2.0, 1, Mixture(0.6, 1, 1), Mixture(0.5, 1, 1), Mixture(0.5, 1, 1)),
    Setting(
        *("tinyimagenet", 1 / 255, 0.4, 0.6, 1.0, 8.0, 4.0, 1),
        *(Mixture(0.05, 1.5, 1), Mixture(0.01, 1, 1), Mixture(0.04, 1, 1)),
    ),
)


def literature_options(
    loss: str, dataset: str, eps: float, *, relaxation: str = "ibp", net: str = "cnn7-bn"
) -> dict[str, float]:
    """The published options of a loss; empty where there are none for this dataset and ε.

    ReLU shrinkage is left out for other relaxations than IBP, for which it is not defined, and the place of
    TAPS's cut for other networks than CNN7.

    >>> literature_options("mtl-ibp", "cifar10", 2 / 255)
    {'alpha': 0.01, 'radius': 2, 'steps': 1}
    >>> literature_options("sabr", "digits", 0.1)
    {}
    """
    for setting in LITERATURE:
        if setting.dataset == dataset and abs(setting.eps - eps) < TOLERANCE:
            left_out = {"shrinkage"} if relaxation != "ibp" else set()
            left_out |= set() if net.startswith("cnn7") else {"relus"}
            return {key: value for key, value in setting.options(loss).items() if key not in left_out}
    return {}

"""Published hyper-parameters of the baselines, per dataset and ε, as options of ``CertifiedLoss``.

They were tuned for networks of 10⁷ parameters (CNN7 with BatchNorm): a place to start from. λ, α, ρ and
the scales are CTBench's (Mao et al. 2025), the attacks' steps those of each method's authors. Not among
the options is the ε of training, where it was larger: CTBench trains all four for MNIST 0.1 at 0.2, TAPS
for MNIST 0.3 at 0.4, SABR for CIFAR-10 2/255 at 3/255.
"""

from __future__ import annotations

from dataclasses import dataclass

from gls_lirpa.losses.terms import LOSSES

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Setting:
    """One column of the literature's tables.

    ``lam`` and ``staps_lam`` are the small boxes of SABR and STAPS, ``shrinkage`` belongs to both;
    ``alpha``, the attack's ``radius`` in units of ε and its ``steps`` to MTL-IBP; the scales are those of
    TAPS's gradient. Where TAPS cuts depends on the network and is left to the user: its authors put 1 of
    CNN7's 6 ReLUs behind the cut, but 5 with TAPS on CIFAR-10 2/255.
    """

    dataset: str
    eps: float
    lam: float
    staps_lam: float
    shrinkage: float
    alpha: float
    radius: float
    steps: int
    taps_scale: float
    staps_scale: float

    def options(self, loss: str) -> dict[str, float]:
        """The options of one loss; none where nothing was tuned."""
        table: dict[str, dict[str, float]] = {
            "sabr": {"lam": self.lam, "shrinkage": self.shrinkage},
            "taps": {"scale": self.taps_scale},
            "staps": {"scale": self.staps_scale, "lam": self.staps_lam, "shrinkage": self.shrinkage},
            "mtl-ibp": {"alpha": self.alpha, "radius": self.radius, "steps": self.steps},
        }
        return table.get(LOSSES.canonical(loss), {})


LITERATURE = (
    # Shrinkage: the authors of SABR and STAPS, and CTBench, have it at 2/255 alone; TAPS's have none.
    # MTL-IBP's steps: one goes from any start to a corner of the box.
    #        dataset         ε        λ  STAPS shrink  α     ρ  steps TAPS STAPS
    Setting("mnist", 0.1, 0.4, 0.4, 1.0, 0.02, 1.0, 1, 4.0, 4.0),
    Setting("mnist", 0.3, 0.9, 0.6, 1.0, 0.5, 1.0, 1, 4.0, 4.0),
    Setting("cifar10", 2 / 255, 0.1, 0.1, 0.8, 0.01, 2.0, 8, 4.0, 2.0),
    Setting("cifar10", 8 / 255, 0.9, 0.9, 1.0, 0.6, 1.0, 1, 2.0, 2.0),
    Setting("tinyimagenet", 1 / 255, 0.4, 0.6, 1.0, 0.05, 1.5, 1, 8.0, 4.0),
)


def literature_options(loss: str, dataset: str, eps: float, *, relaxation: str = "ibp") -> dict[str, float]:
    """The published options of a loss; empty where there are none for this dataset and ε.

    ReLU shrinkage is left out for other relaxations than IBP, for which it is not defined.

    >>> literature_options("mtl-ibp", "cifar10", 2 / 255)
    {'alpha': 0.01, 'radius': 2.0, 'steps': 8}
    >>> literature_options("sabr", "digits", 0.1)
    {}
    """
    for setting in LITERATURE:
        if setting.dataset == dataset and abs(setting.eps - eps) < TOLERANCE:
            options = setting.options(loss)
            return options if relaxation == "ibp" else {k: v for k, v in options.items() if k != "shrinkage"}
    return {}

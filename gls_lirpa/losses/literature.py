"""Published hyper-parameters of the baselines, per dataset and ε, as options of ``CertifiedLoss``.

They were tuned for networks of 10⁷ parameters (CNN7 with BatchNorm): a place to start from.
"""

from __future__ import annotations

from dataclasses import dataclass

from gls_lirpa.losses.terms import LOSSES

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Setting:
    """One column of the literature's tables.

    ``lam`` and ``shrinkage`` belong to SABR and, as its small box, to STAPS; ``alpha`` and the
    attack's ``radius`` in units of ε to MTL-IBP; the scales are those of TAPS's gradient. With 199
    rows per sample TinyImageNet takes one attack for all classes.
    """

    dataset: str
    eps: float
    lam: float
    shrinkage: float
    alpha: float
    radius: float
    taps_scale: float
    staps_scale: float
    multi: int = 1

    def options(self, loss: str) -> dict[str, float]:
        """The options of one loss; none where nothing was tuned."""
        box: dict[str, float] = {"lam": self.lam, "shrinkage": self.shrinkage}
        table: dict[str, dict[str, float]] = {
            "sabr": box,
            "taps": {"scale": self.taps_scale, "multi": self.multi},
            "staps": {"scale": self.staps_scale, "multi": self.multi, **box},
            "mtl-ibp": {"alpha": self.alpha, "radius": self.radius},
        }
        return table.get(LOSSES.canonical(loss), {})


LITERATURE = (
    #        dataset         ε        λ    shrink  α     ρ    TAPS STAPS
    Setting("mnist", 0.1, 0.4, 1.0, 0.02, 1.0, 4.0, 4.0),
    Setting("mnist", 0.3, 0.9, 1.0, 0.5, 1.0, 4.0, 4.0),
    Setting("cifar10", 2 / 255, 0.1, 0.8, 0.01, 2.0, 4.0, 2.0),
    Setting("cifar10", 8 / 255, 0.9, 1.0, 0.6, 1.0, 2.0, 2.0),
    Setting("tinyimagenet", 1 / 255, 0.4, 1.0, 0.05, 1.5, 8.0, 4.0, multi=0),
)


def literature_options(loss: str, dataset: str, eps: float, *, relaxation: str = "ibp") -> dict[str, float]:
    """The published options of a loss; empty where there are none for this dataset and ε.

    ReLU shrinkage is left out for other relaxations than IBP, for which it is not defined.

    >>> literature_options("mtl-ibp", "cifar10", 2 / 255)
    {'alpha': 0.01, 'radius': 2.0}
    >>> literature_options("sabr", "digits", 0.1)
    {}
    """
    for setting in LITERATURE:
        if setting.dataset == dataset and abs(setting.eps - eps) < TOLERANCE:
            options = setting.options(loss)
            return options if relaxation == "ibp" else {k: v for k, v in options.items() if k != "shrinkage"}
    return {}

"""CTBench's training of CNN7 with BatchNorm (Mao et al. 2025), per dataset, ε and loss: the ``literature`` recipes.

Everything but the network: learning rate 5e-4, schedules, IBP initialisation with its penalty, and for each loss
L1, the share of the natural loss, how much larger than the certified ε the trained one is, and from which epoch on
weights are averaged. The options of the losses themselves are in their records, but for the place of TAPS's cut,
which is for this network alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gls_lirpa.losses.terms import LOSSES, SAME_RADIUS

Fields = dict[str, Any]


class Training(NamedTuple):
    """What CTBench sets for a loss: weight of L1, weight of the worst case, trained over certified ε."""

    l1: float
    robust_weight: float
    eps_factor: float


EXPRESSIVE = ("mtl", "cc", "exp")
_PLAIN = Training(0.0, 1.0, 1.0)
# cc and exp stand beside mtl, which is what CTBench does where it trained them; so does the robust loss over
# other relaxations than IBP beside IBP.
_TABLE: dict[tuple[str, float], dict[str, Training]] = {
    ("mnist", 0.1): {
        "robust": Training(2e-6, 0.7, 2.0),
        "sabr": Training(1e-6, 0.7, 2.0),
        "taps": Training(2e-6, 0.7, 2.0),
        "staps": Training(5e-6, 0.7, 2.0),
        "mtl": Training(1e-5, 0.7, 2.0),
    },
    ("mnist", 0.3): {
        "robust": Training(2e-6, 0.7, 1.0),
        "sabr": Training(2e-6, 1.0, 1.0),
        "taps": Training(0.0, 1.0, 4 / 3),
        "staps": Training(1e-5, 1.0, 1.0),
        "mtl": Training(1e-6, 1.0, 1.0),
    },
    ("cifar10", 2 / 255): {
        "robust": Training(1e-6, 0.8, 1.0),
        "sabr": Training(1e-6, 1.0, 1.5),
        "taps": Training(2e-6, 1.0, 1.0),
        "staps": Training(1e-6, 1.0, 1.0),
        "mtl": Training(3e-6, 0.9, 1.0),
    },
    ("cifar10", 8 / 255): dict.fromkeys(("robust", "sabr", "taps", "staps", "mtl"), _PLAIN),
    ("tinyimagenet", 1 / 255): {
        "robust": Training(1e-5, 1.0, 1.0),
        "sabr": Training(5e-5, 1.0, 1.0),
        "taps": Training(5e-5, 0.7, 1.0),
        "staps": Training(5e-5, 1.0, 1.0),
        "mtl": Training(5e-5, 0.7, 1.0),
    },
}
_AVERAGE_FROM = {("mnist", 0.1): 65, ("mnist", 0.3): 65, ("cifar10", 8 / 255): 225}
_AVERAGE_FROM_ELSEWHERE = 150
_TAPS_CUT = {
    ("mnist", 0.1): 3,
    ("mnist", 0.3): 2,
    ("cifar10", 2 / 255): 5,
    ("cifar10", 8 / 255): 1,
    ("tinyimagenet", 1 / 255): 1,
}


def published_training(loss: str, dataset: str, eps: float) -> Fields:
    """The fields of a run that CTBench sets for a loss; none where it trained nothing like it.

    >>> published_training("mtl-ibp", "mnist", 0.1)
    {'l1': 1e-05, 'natural_weight': 0.3, 'eps_factor': 2.0, 'average_from': 65}
    """
    name = LOSSES.canonical(loss)
    key = _setting(dataset, eps)
    row = _TABLE.get(key, {}).get("mtl" if name in EXPRESSIVE else "robust" if name == "robust-fused" else name)
    if row is None:
        return {}
    natural = round(1.0 - row.robust_weight, 6)
    fields: Fields = {"l1": row.l1, "natural_weight": natural, "eps_factor": row.eps_factor}
    if name in EXPRESSIVE:
        fields["average_from"] = _AVERAGE_FROM.get(key, _AVERAGE_FROM_ELSEWHERE)
    return fields


def published_cut(loss: str, dataset: str, eps: float, *, net: str) -> dict[str, int]:
    """How many of CNN7's six ReLUs CTBench's TAPS attacks; nothing for other networks and losses.

    >>> published_cut("taps", "mnist", 0.1, net="cnn7-bn"), published_cut("taps", "mnist", 0.1, net="cnn3")
    ({'relus': 3}, {})
    """
    if LOSSES.canonical(loss) != "taps" or not net.startswith("cnn7"):
        return {}
    relus = _TAPS_CUT.get(_setting(dataset, eps))
    return {} if relus is None else {"relus": relus}


def _setting(dataset: str, eps: float) -> tuple[str, float]:
    """The key of the tables, or one that is in none of them."""
    return next((key for key in _TABLE if key[0] == dataset and abs(key[1] - eps) < SAME_RADIUS), (dataset, eps))

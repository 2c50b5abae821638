"""mtl, cc and exp against their formulas, in value and gradient, over every relaxation and in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa import CertifiedLoss
from gls_lirpa.attacks import pgd_points
from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.losses import LOSSES
from gls_lirpa.losses.expressive import log_cross_entropy, mix_logarithms
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.job import make_config
from tests.helpers.baseline_reference import EXACT, batch_of, gradients, mlp, seeded

ALPHA, STEPS = 0.3, 5


def sample_loss(margins: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-margins).sum(1))


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mtl": lambda attacked, bounded: (1 - ALPHA) * sample_loss(attacked) + ALPHA * sample_loss(bounded),
    "cc": lambda attacked, bounded: sample_loss((1 - ALPHA) * attacked + ALPHA * bounded),
    "exp": lambda attacked, bounded: sample_loss(attacked) ** (1 - ALPHA) * sample_loss(bounded) ** ALPHA,
}


@pytest.mark.parametrize("chunk_mib", [None, 0])
@pytest.mark.parametrize("radius", [1.0, 2.5])
@pytest.mark.parametrize("relaxation", [name for name in RELAXATIONS if RELAXATIONS.get(name).differentiable])
@pytest.mark.parametrize("loss", FORMULAS)
def test_formula(loss: str, relaxation: str, radius: float, chunk_mib: int | None) -> None:
    """``chunk_mib=0`` makes a chunk of every sample: the gradient must reach the attacked margins there too."""
    model, (x, y) = mlp(4, 6, 5, 3), batch_of(4, 3)
    options = {"alpha": ALPHA, "radius": radius, "steps": STEPS}
    found = CertifiedLoss(model, relaxation, eps=0.1, loss=loss, chunk_mib=chunk_mib, **options)(
        x, y, generator=seeded()
    )
    slopes = gradients(model, found)
    engine = BoundEngine(model, x)
    points = pgd_points(model, x, y, linf_box(x, radius * 0.1), steps=STEPS, generator=seeded())
    attacked = (margin_spec(y, 3, x.dtype) @ model(points).unsqueeze(-1)).squeeze(-1)
    bounded = engine.margins(linf_box(x, 0.1), y, RELAXATIONS.get(relaxation))
    expected = FORMULAS[loss](attacked, bounded).mean()
    assert found.item() == pytest.approx(expected.item(), abs=EXACT)
    assert torch.allclose(slopes, gradients(model, expected), atol=EXACT)


@pytest.mark.parametrize("loss", FORMULAS)
def test_ends_and_order(loss: str) -> None:
    model, (x, y) = mlp(4, 6, 5, 3), batch_of(4, 3)

    def value(name: str, **options: float) -> float:
        return CertifiedLoss(model, "ibp", eps=0.1, loss=name, **options)(x, y, generator=seeded()).item()

    pgd, bound = value("pgd", steps=8), value("robust")
    assert bound > pgd + 0.03
    assert value(loss, alpha=0.0) == pytest.approx(pgd, abs=EXACT)
    assert value(loss, alpha=1.0) == pytest.approx(bound, abs=EXACT)
    between = [value(loss, alpha=share) for share in (0.2, 0.5, 0.8)]
    assert pgd < between[0] < between[1] < between[2] < bound
    if loss != "mtl":
        assert all(own < value("mtl", alpha=share) for own, share in zip(between, (0.2, 0.5, 0.8), strict=True))
    assert math.isfinite(value(loss, alpha=0.5, radius=20.0)), "the attack keeps to the pixel range"


@pytest.mark.parametrize("margin", [-200.0, -1.0, 0.0, 5.0, 14.999, 15.001, 40.0, 1000.0])
def test_logarithm_of_the_loss_is_exact_where_the_loss_vanishes(margin: float) -> None:
    """ℓ(40) = 4e-18 and ℓ(1000) = 0 in double precision; ln ℓ tends to −m, and its gradient to −1."""
    single = torch.tensor([[margin]], dtype=torch.float32, requires_grad=True)
    value = log_cross_entropy(single)
    (slope,) = torch.autograd.grad(value.sum(), single)
    exact = torch.tensor([[margin]], dtype=torch.float64, requires_grad=True)
    expected = torch.log(F.softplus(-exact)) if margin < 700 else -exact
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert slope.item() == pytest.approx(expected_slope.item(), rel=1e-5)


def test_exp_of_a_perfectly_classified_sample_has_a_gradient() -> None:
    attacked = torch.tensor([[90.0, 120.0]], requires_grad=True)
    bounded = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    value = mix_logarithms(bounded, attacked, 0.5)
    found = torch.autograd.grad(value.sum(), [attacked, bounded])
    assert all(bool(torch.isfinite(g).all()) for g in (value, *found))
    assert value.item() == pytest.approx(math.exp(-45) * sample_loss(bounded).item() ** 0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["mtl", "cc", "exp"])
def test_names(name: str) -> None:
    """``mtl-ibp`` is the name of mtl over ibp, the published relaxation, and of nothing else."""
    assert LOSSES.canonical(f"{name}-ibp") == name
    given = {"dataset": "mnist", "eps": 0.1, "estimator": "grad"}
    published = make_config({**given, "loss": f"{name}-ibp"})
    assert (published.loss, published.relaxation, published.method) == (name, "ibp", f"{name}·ibp·grad")
    assert make_config({**given, "loss": name, "relaxation": "crown"}).method == f"{name}·crown·grad"
    assert make_config({**given, "loss": name, "relaxation": "crown"}).loss_options == published.loss_options
    assert TrainConfig(loss=name, relaxation="alpha-crown", estimator="pgpe").relaxation == "alpha-crown"

"""Loss fusion against hand-computed values and the exact worst case."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gls_lirpa import CertifiedLoss, linf_box
from gls_lirpa.base.boxes import margin_spec
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.losses.fusion import chord_weights, fused
from gls_lirpa.relaxations import RELAXATIONS, get_relaxation
from tests.helpers.baseline_reference import (
    DIFFERENTIABLE,
    EXACT,
    FLOAT32,
    batch_of,
    gradients,
    interval,
    mlp,
    seeded,
    worst_case,
)


def test_fusion_by_hand() -> None:
    """f = (0, t, −t), t ∈ [−1, 1], y = 0: both margins range over [−1, 1] and their sum is 0.

    Unfused ln(1 + 2e). The chords' slopes are equal, so the row is 0·t, and the fused loss is
    ln(1 + e + 1/e), which is also the exact worst case, at t = ±1.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 3)).double()
    model[1].weight.data.copy_(torch.tensor([[0.0], [2.0], [-2.0]]))
    model[1].bias.data.copy_(torch.tensor([0.0, -1.0, 1.0]))
    x, y = torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([0])
    unfused = CertifiedLoss(model, "ibp", eps=0.5)(x, y)
    assert unfused.item() == pytest.approx(math.log(1 + 2 * math.e), abs=EXACT)
    for relaxation in RELAXATIONS:
        loss = CertifiedLoss(model, relaxation, eps=0.5, loss="robust-fused")(x, y)
        assert loss.item() == pytest.approx(math.log(1 + math.e + 1 / math.e), abs=EXACT)


@pytest.mark.parametrize("relaxation", RELAXATIONS)
@pytest.mark.parametrize("eps", [0.02, 0.1, 0.4])
def test_fused_and_unfused_losses_bound_the_exact_worst_case(relaxation: str, eps: float) -> None:
    # auto_LiRPA's slope optimisation fills float32 tensors, and so takes no others.
    optimised = relaxation == "alpha-crown"
    dtype, tolerance = (torch.float32, FLOAT32) if optimised else (torch.float64, EXACT)
    for seed in range(4):
        reference, (x, y) = mlp(2, 4, 4, 4, seed=seed, scale=1.5), batch_of(2, 4, size=3, seed=seed)
        model, x = copy.deepcopy(reference).to(dtype), x.to(dtype)
        spec, box, engine = margin_spec(y, 4, x.dtype), linf_box(x, eps), BoundEngine(model, x)
        fusion = fused(get_relaxation(relaxation)).compute(engine, box, spec, {})
        unfused = torch.log1p(torch.exp(-engine.margins(box, y, get_relaxation(relaxation))).sum(1))
        same_bounds = torch.log1p(torch.exp(-interval(model, box, spec)).sum(1))
        for i in range(len(x)):
            label = y[i].repeat(1)
            exact = worst_case(
                list(reference[1:]),
                box.lower[i].double(),
                box.upper[i].double(),
                lambda out, label=label: F.cross_entropy(out, label.expand(len(out)), reduction="none"),
            )
            assert exact >= F.cross_entropy(model(x[i : i + 1]), label).item() - tolerance
            assert unfused[i].item() >= exact - tolerance
            assert fusion[i].item() >= exact - tolerance
            assert fusion[i].item() <= same_bounds[i].item() + tolerance
        if relaxation != "ibp":
            assert (fusion < same_bounds - 1e-4).any(), "one row of a tighter relaxation helps"


@pytest.mark.parametrize("relaxation", DIFFERENTIABLE)
def test_fused_gradient_against_differences(relaxation: str) -> None:
    model, (x, y) = mlp(3, 5, 4, 4, seed=5), batch_of(3, 4)
    criterion = CertifiedLoss(model, relaxation, eps=0.1, loss="robust-fused")
    slope = gradients(model, criterion(x, y))
    direction = torch.randn(len(slope), generator=seeded(), dtype=slope.dtype)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    values = []
    for sign in (1, -1):
        nn.utils.vector_to_parameters(start + sign * 1e-6 * direction, model.parameters())
        values.append(criterion(x, y).item())
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(slope @ direction), rel=1e-5, abs=1e-7)


def test_chord_weights_are_the_slopes_of_chords() -> None:
    lower = torch.tensor([[-1.0, 0.5, 2.0, -3.0, 0.1]], dtype=torch.float64)
    upper = lower + torch.tensor([[2.0, 0.0, 30.0, 0.9e-4, 1.1e-4]], dtype=torch.float64)
    exact = [
        (math.exp(-low) - math.exp(-high)) / (high - low) if high > low else math.exp(-low)
        for low, high in zip(lower[0].tolist(), upper[0].tolist(), strict=True)
    ]
    total = 1 + sum(math.exp(-low) for low in lower[0].tolist())
    assert chord_weights(lower, upper)[0].tolist() == pytest.approx([e / total for e in exact], rel=1e-8)


def test_chord_weights_of_points_have_a_gradient() -> None:
    """One margin: p = φ(w)·s(l) with the logistic s(l) = 1/(1 + e^l); at w = 0, ∂p/∂u = −s/2 and ∂p/∂l = s/2 + s′."""
    lower, upper = (torch.zeros(1, 1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    by_lower, by_upper = torch.autograd.grad(chord_weights(lower, upper).sum(), [lower, upper])
    assert (by_lower.item(), by_upper.item()) == pytest.approx((0.25 - 0.25, -0.25), abs=EXACT)


@pytest.mark.parametrize("factor", [1e2, 1e4])
def test_fusion_does_not_overflow(factor: float) -> None:
    model, (x, y) = mlp(4, 6, 5, 3).float(), batch_of(4, 3)
    with torch.no_grad():
        for parameter in model[-1].parameters():
            parameter.mul_(factor)
    x = x.float()
    for relaxation in DIFFERENTIABLE:
        loss = CertifiedLoss(model, relaxation, eps=0.1, loss="robust-fused")(x, y)
        assert torch.isfinite(gradients(model, loss)).all()
        pgd = CertifiedLoss(model, relaxation, eps=0.1, loss="pgd")(x, y)
        assert pgd.item() <= loss.item() <= CertifiedLoss(model, "ibp", eps=0.1)(x, y).item() * (1 + 1e-5)

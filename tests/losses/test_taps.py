"""TAPS and STAPS against hand-computed values, IBP and the exact minimum in the latent box."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gls_lirpa import CertifiedLoss, linf_box
from gls_lirpa.attacks import pgd_points
from gls_lirpa.base.boxes import Box, margin_spec
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import ConfigError
from gls_lirpa.losses.sabr import small_box
from gls_lirpa.losses.taps import LatentAttack, attacked_margins, connect, product, second_block
from gls_lirpa.models import build_model
from tests.helpers.baseline_reference import (
    EXACT,
    IBP,
    batch_of,
    gradients,
    interval,
    mlp,
    prepared,
    seeded,
    worst_case,
)


def latent_attack(**changes: object) -> LatentAttack:
    settings: dict[str, object] = {
        "relus": 1, "threshold": 0.5, "steps": 20, "restarts": 1, "multi": True, "shrinkage": 1.0, "seed": 0,
    }  # fmt: skip
    return LatentAttack(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("lam", [1.0, 0.3], ids=["taps", "staps"])
@pytest.mark.parametrize("shrinkage", [1.0, 0.7])
def test_taps_with_a_linear_second_block_is_ibp_and_staps_is_sabr(lam: float, shrinkage: float) -> None:
    model, (x, y) = mlp(4, 6, 5, 4, seed=2), batch_of(4, 4)
    batch = prepared(model, x, y, 0.1)
    box = small_box(batch, lam=lam, steps=4)
    margins = attacked_margins(IBP, latent_attack(relus=0, steps=3, shrinkage=shrinkage))
    estimate, bound = margins(batch.engine, box, margin_spec(y, 4, x.dtype), {})
    reference = interval(model, box, margin_spec(y, 4, x.dtype), shrinkage)
    assert torch.allclose(estimate, reference, atol=EXACT), "the attack's"
    assert torch.allclose(bound, reference, atol=EXACT), "the relaxation's"


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_taps_loss_and_gradient_with_a_linear_second_block(scale: float) -> None:
    """There L_T = L_I = ℓ, so L = ℓ² and its gradient is (2a + 2(1 − a)) ℓ∇ℓ, whatever the scale."""
    model, (x, y) = mlp(4, 6, 5, 4, seed=2), batch_of(4, 4)
    loss = CertifiedLoss(model, "ibp", eps=0.1, loss="taps", relus=0, latent_steps=3, scale=scale)(x, y)
    margins = interval(model, linf_box(x, 0.1), margin_spec(y, 4, x.dtype))
    expected = torch.log1p(torch.exp(-margins).sum(1)).square().mean()
    assert loss.item() == pytest.approx(expected.item(), abs=EXACT)
    assert torch.allclose(gradients(model, loss), gradients(model, expected), atol=EXACT)


def test_staps_loss_with_a_linear_second_block_is_the_square_of_sabr_s() -> None:
    model, (x, y) = mlp(4, 6, 5, 4, seed=2), batch_of(4, 4, size=1)
    options = {"lam": 0.3, "steps": 4, "shrinkage": 0.8}
    sabr = CertifiedLoss(model, "ibp", eps=0.1, loss="sabr", **options)(x, y, generator=seeded())
    staps = CertifiedLoss(model, "ibp", eps=0.1, loss="staps", relus=0, **options)(x, y, generator=seeded())
    assert staps.item() == pytest.approx(sabr.item() ** 2, abs=EXACT)


def test_while_eps_grows_taps_is_ibp_and_staps_is_sabr() -> None:
    model, (x, y) = mlp(4, 6, 5, 4, seed=2), batch_of(4, 4)
    small = {"lam": 0.3, "steps": 4, "shrinkage": 0.8}

    def value(loss: str, eps: float, **options: float) -> float:
        return CertifiedLoss(model, "ibp", eps=0.1, loss=loss, **options)(x, y, eps=eps, generator=seeded()).item()

    assert value("taps", 0.05) == value("robust", 0.05)
    assert value("staps", 0.05, **small) == value("sabr", 0.05, **small)
    assert value("taps", 0.05, bounds_first=False) != value("robust", 0.05)
    assert value("taps", 0.1) == value("taps", 0.1, bounds_first=False) != value("robust", 0.1)


def test_a_network_taps_cannot_cut_is_refused_while_eps_grows() -> None:
    model, (x, y) = mlp(4, 6, 4), batch_of(4, 4)
    with pytest.raises(ConfigError, match="TAPS cannot cut"):
        CertifiedLoss(model, "ibp", eps=0.1, loss="taps", relus=1)(x, y, eps=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_taps_margins_against_the_exact_minimum_in_the_latent_box(seed: int) -> None:
    model, (x, y) = mlp(3, 2, 5, 3, seed=seed, scale=2.0), batch_of(3, 3)
    model[1].bias.data.add_(1.5)  # most latent boxes are not flat
    engine, spec, box = BoundEngine(model, x), margin_spec(y, 3, x.dtype), linf_box(x, 0.3)
    with torch.no_grad():
        found, bound = attacked_margins(IBP, latent_attack(steps=60, restarts=12))(engine, box, spec, {})
        first = model[1]
        low = box.lower @ first.weight.clamp(min=0).T + box.upper @ first.weight.clamp(max=0).T + first.bias
        high = box.upper @ first.weight.clamp(min=0).T + box.lower @ first.weight.clamp(max=0).T + first.bias
        low, high = low.clamp(min=0), high.clamp(min=0)
    checked = 0
    for i in range(len(x)):
        if not (high[i] - low[i] > 1e-6).all():
            continue  # a flat box is not a piece of the plane
        for j in range(2):
            row = spec[i, j]
            exact = -worst_case(list(model[3:]), low[i], high[i], lambda out, row=row: -(out @ row))
            assert found[i, j] >= exact - EXACT, "an attack cannot beat the minimum"
            assert found[i, j] <= exact + 0.02 * (1 + abs(exact)), "it nearly reaches it"
            assert bound[i, j] <= exact + EXACT, "IBP is below"
            checked += 1
    assert checked >= 4


def test_taps_lies_between_pgd_and_ibp_on_a_convolutional_network() -> None:
    model = build_model("cnn3-tiny", in_shape=(1, 8, 8), classes=4, init="kaiming-uniform").double()
    x = torch.rand(5, 1, 8, 8, generator=seeded(), dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 0])
    engine = BoundEngine(model, x)
    spec, box = margin_spec(y, 4, x.dtype), linf_box(x, 0.1)
    for relus in (0, 1):
        estimate, bound = attacked_margins(IBP, latent_attack(relus=relus))(engine, box, spec, {})
        assert (estimate >= bound - EXACT).all()
        assert torch.allclose(estimate, bound, atol=EXACT) == (relus == 0), "behind a ReLU IBP is not exact"
    pgd = F.cross_entropy(model(pgd_points(model, x, y, box, steps=20, generator=seeded())), y)
    taps, ibp = (torch.log1p(torch.exp(-margins).sum(1)).mean() for margins in (estimate, bound))
    assert pgd + 0.01 < taps < ibp - 0.01


def test_single_estimator() -> None:
    """Of two classes it is the same as one attack per class; of more it cannot be below."""
    for classes in (2, 4):
        model, (x, y) = mlp(4, 6, 5, classes, seed=2), batch_of(4, classes)
        engine, spec = BoundEngine(model, x), margin_spec(y, classes, x.dtype)
        one, each = (
            attacked_margins(IBP, latent_attack(relus=0, multi=multi))(engine, linf_box(x, 0.1), spec, {})[0]
            for multi in (False, True)
        )
        assert (one >= each - EXACT).all()
        assert torch.allclose(one, each, atol=EXACT) == (classes == 2)


@pytest.mark.parametrize(
    ("threshold", "point", "expected"),
    [
        # On [1, 3], width 2: the rule reaches c·2 from each face.
        (0.5, 1.0, (1.0, 0.0)),
        (0.5, 1.5, (0.5, 0.0)),
        (0.5, 2.0, (0.0, 0.0)),
        (0.5, 2.75, (0.0, 0.75)),
        (0.5, 3.0, (0.0, 1.0)),
        (1.0, 1.5, (0.75, 0.25)),
        (0.25, 1.25, (0.5, 0.0)),
    ],
)
def test_connector_by_hand(threshold: float, point: float, expected: tuple[float, float]) -> None:
    lower, upper = torch.tensor([1.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    connected = connect(torch.tensor([point]), Box(lower, upper), threshold=threshold)
    assert connected.item() == point
    (2.0 * connected).backward()
    assert lower.grad is not None and upper.grad is not None
    assert (lower.grad.item(), upper.grad.item()) == pytest.approx((2 * expected[0], 2 * expected[1]), abs=1e-6)


def test_connector_of_a_flat_box_gives_each_face_one_half() -> None:
    lower, upper = torch.tensor([2.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    connect(torch.tensor([2.0]), Box(lower, upper)).backward()
    assert lower.grad is not None and upper.grad is not None
    assert (lower.grad.item(), upper.grad.item()) == (0.5, 0.5)


def test_product_by_hand() -> None:
    """a = 4/5: ∂first = 1.6 · 5 = 8, ∂second = 0.4 · 3 = 1.2."""
    first, second = torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    value = product(first, second, scale=4.0)
    value.backward()
    assert first.grad is not None and second.grad is not None
    assert value.item() == 15.0
    assert (first.grad.item(), second.grad.item()) == pytest.approx((8.0, 1.2), abs=1e-6)


def test_second_block_of_the_paper_s_networks_begins_before_the_last_hidden_layer() -> None:
    kinds = [type(layer).__name__ for block in second_block(build_model("cnn5"), 1) for layer in block]
    assert kinds == ["Flatten", "Linear", "ReLU", "Linear"]
    kinds = [type(layer).__name__ for block in second_block(build_model("cnn7-bn"), 1) for layer in block]
    assert kinds == ["Flatten", "Linear", "BatchNorm1d", "ReLU", "Linear"]

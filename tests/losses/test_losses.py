"""Losses against independent references, and CertifiedLoss as an ordinary training loss."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.base.boxes import Bounds, Box, linf_box
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import ConfigError, DataError
from gls_lirpa.losses import LOSSES, CertifiedLoss
from gls_lirpa.losses.regularizers import l1_norm, warmup_penalty
from gls_lirpa.losses.terms import margin_cross_entropy
from tests.helpers import networks
from tests.helpers.bounding import SMOOTH, margins_at, points, relaxation


def test_margin_cross_entropy_is_cross_entropy() -> None:
    logits = 5 * torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    margins = margins_at(nn.Identity(), logits, y)
    assert torch.allclose(margin_cross_entropy(margins), F.cross_entropy(logits, y, reduction="none"), atol=1e-5)
    assert margin_cross_entropy(torch.tensor([[-500.0, 3.0]])).item() == pytest.approx(500.0)


def test_natural_loss_is_cross_entropy() -> None:
    model = networks.build("normalize")
    x, y = networks.batch("normalize", 4)
    assert torch.equal(CertifiedLoss(model, eps=0.1, loss="natural")(x, y), F.cross_entropy(model(x), y))


def test_pgd_loss_against_a_reference() -> None:
    """Sign steps of 2.5 ε' / steps from a uniform start, ε' the radius of each pixel's clamped range."""
    model = networks.build("conv")
    x, y = networks.batch("conv", 4)
    found = CertifiedLoss(model, eps=0.1, loss="pgd", steps=4)(x, y, generator=torch.Generator().manual_seed(3))
    low, high = (x - 0.1).clamp(0, 1), (x + 0.1).clamp(0, 1)
    point = low + torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) * (high - low)
    for _ in range(4):
        point = point.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(point), y, reduction="sum"), point)
        point = torch.min(torch.max(point + 2.5 / 4 * (high - low) / 2 * gradient.sign(), low), high)
    assert found.item() == pytest.approx(F.cross_entropy(model(point), y).item(), rel=1e-5)
    assert found.item() > F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize("method", ["ibp", "hbox", "crown-ibp", "crown", "alpha-crown-step"])
def test_robust_loss_is_cross_entropy_of_the_margins_and_bounds_the_worst_case(method: str) -> None:
    model = networks.build("normalize")
    x, y = networks.batch("normalize", 4)
    box = linf_box(x, 0.1)
    criterion = CertifiedLoss(model, method, eps=0.1)
    margins = BoundEngine(model, x).margins(box, y, relaxation(method))
    padded = torch.cat([torch.zeros(4, 1), -margins], dim=1)  # the true class first
    expected = F.cross_entropy(padded, torch.zeros(4, dtype=torch.long))
    assert criterion(x, y).item() == pytest.approx(expected.item(), rel=1e-5)
    with torch.no_grad():
        losses = torch.stack([F.cross_entropy(model(p), y, reduction="none") for p in points(model, x, y, box)])
    assert criterion(x, y).item() >= losses.amax(0).mean().item()


@pytest.mark.parametrize("method", SMOOTH)
def test_robust_loss_is_above_the_exact_worst_case(method: str) -> None:
    """One input, so that a fine grid is the exact worst case up to its spacing."""
    torch.manual_seed(4)
    model = networks.mlp((1, 6, 3))
    x, y = torch.tensor([[0.4]]), torch.tensor([1])
    grid = torch.linspace(0.1, 0.7, 2001).unsqueeze(1)
    with torch.no_grad():
        worst = F.cross_entropy(model(grid), y.expand(2001), reduction="none").max().item()
    assert CertifiedLoss(model, method, eps=0.3)(x, y).item() >= worst - 1e-6


@pytest.mark.parametrize("loss", ["robust", "pgd"])
def test_natural_weight_mixes_convexly(loss: str) -> None:
    model = networks.build("conv")
    x, y = networks.batch("conv", 4)

    def value(weight: float) -> float:
        criterion = CertifiedLoss(model, "ibp", eps=0.1, loss=loss, natural_weight=weight)
        return criterion(x, y, generator=torch.Generator().manual_seed(0)).item()

    assert value(1.0) == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)
    assert value(0.3) == pytest.approx(0.3 * value(1.0) + 0.7 * value(0.0), rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES.names())
def test_radius_zero_is_natural_training(loss: str) -> None:
    model = networks.build("batchnorm").train()
    x, y = networks.batch("batchnorm", 5)
    expected = F.cross_entropy(model(x), y)
    teacher = networks.build("batchnorm") if LOSSES.get(loss).teacher else None
    found = CertifiedLoss(model, "ibp", eps=0.1, loss=loss, teacher=teacher)(x, y, eps=0.0)
    assert torch.allclose(found, expected, atol=1e-6)


def test_eps_of_a_call_overrides_the_target() -> None:
    model = networks.build("conv")
    x, y = networks.batch("conv", 3)
    criterion = CertifiedLoss(model, "crown", eps=0.3)
    assert torch.allclose(criterion(x, y, eps=0.05), CertifiedLoss(model, "crown", eps=0.05)(x, y), atol=1e-6)
    assert criterion.eps == 0.3
    with pytest.raises(ConfigError, match="eps must be"):
        criterion(x, y, eps=float("nan"))


def test_generator_decides_the_attack() -> None:
    model = networks.build("conv")
    x, y = networks.batch("conv", 3)
    criterion = CertifiedLoss(model, eps=0.2, loss="pgd", steps=1)

    def value(seed: int) -> float:
        return criterion(x, y, generator=torch.Generator().manual_seed(seed)).item()

    state = torch.get_rng_state()
    assert value(1) == value(1) != value(2)
    assert torch.equal(state, torch.get_rng_state())


def test_l1_counts_matrices_and_kernels_only() -> None:
    model = networks.build("batchnorm")
    x, y = networks.batch("batchnorm", 3)
    expected = sum(p.abs().sum().item() for name, p in model.named_parameters() if p.dim() > 1)
    assert l1_norm(model).item() == pytest.approx(expected, rel=1e-6)
    plain, weighted = (CertifiedLoss(model, "ibp", eps=0.1, l1=weight)(x, y).item() for weight in (0.0, 0.01))
    assert weighted - plain == pytest.approx(0.01 * expected, rel=1e-4)


def test_warmup_penalty_by_hand() -> None:
    """Tightness: input radius 0.1 against 0.5 and 0.15; balance where both kinds of neuron occur."""
    lower, upper = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[2.0, -1.0, 1.5]])
    box = Box(torch.zeros(1, 2), torch.full((1, 2), 0.2))
    centers = [1.5, -1.5, 1.0]
    mean = sum(centers) / 3
    means = (1.5 + 1.0) / 1.5
    variances = ((1.5 - mean) ** 2 + (1.0 - mean) ** 2) / (-1.5 - mean) ** 2

    def shortfall(ratio: float) -> float:
        return max(0.0, 0.5 - ratio) / 0.5

    expected = shortfall(0.1 / 0.5) + shortfall(min(means, 1 / means)) + shortfall(min(variances, 1 / variances))
    assert warmup_penalty(Bounds(lower, {"a": (lower, upper)}), box).item() == pytest.approx(expected, rel=1e-5)
    unbalanced = torch.tensor([[0.1, 0.2]]), torch.tensor([[0.4, 0.5]])  # no dead neuron: no balance term
    both = Bounds(lower, {"a": (lower, upper), "b": unbalanced})
    assert warmup_penalty(both, box).item() == pytest.approx((expected + shortfall(0.1 / 0.15)) / 2, rel=1e-5)
    assert warmup_penalty(Bounds(lower, {}), box).item() == 0.0


def test_warmup_fades_with_the_radius() -> None:
    model = networks.build("conv")
    x, y = networks.batch("conv", 4)
    engine = BoundEngine(model, x)

    def penalty(eps: float) -> float:
        with_it, without = (CertifiedLoss(model, "ibp", eps=0.2, warmup=w)(x, y, eps=eps).item() for w in (0.5, 0.0))
        return with_it - without

    for eps in (0.05, 0.1):
        box = linf_box(x, eps)
        bounds = engine.bounds(box, torch.eye(3).expand(4, -1, -1), relaxation("ibp"))
        expected = 0.5 * (1 - eps / 0.2) * warmup_penalty(bounds, box).item()
        assert penalty(eps) == pytest.approx(expected, abs=1e-4)
        assert expected > 0.05
    assert penalty(0.2) == pytest.approx(0.0, abs=1e-6)
    # Ratios of radii have a limit at 0, which the penalty takes there.
    assert penalty(0.0) == pytest.approx(penalty(1e-4), rel=1e-2)
    criterion = CertifiedLoss(model, "ibp", eps=0.2, warmup=0.5)
    criterion(x, y, eps=0.0).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("loss, method", [("robust", "crown"), ("robust", "ibp"), ("pgd", "ibp"), ("natural", "ibp")])
def test_running_statistics_move_once_per_call(loss: str, method: str) -> None:
    model, reference = networks.build("batchnorm").train(), networks.build("batchnorm").train()
    x, y = networks.batch("batchnorm", 6)
    for mix in (0.0, 0.5):
        criterion = CertifiedLoss(model, method, eps=0.1, loss=loss, natural_weight=mix, warmup=0.5, chunk_mib=0)
        criterion(x, y, eps=0.05).backward()
        reference(x)
    for (name, found), expected in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.allclose(found.float(), expected.float(), atol=1e-6), name
    model.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    criterion(x, y)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(module.training for module in model.modules())


def test_attacks_see_the_clean_batch_statistics() -> None:
    model = networks.build("batchnorm").train()
    x, y = networks.batch("batchnorm", 6)
    # With no radius to move in, the attacked network is the clean one.
    found = CertifiedLoss(model, eps=1e-7, loss="pgd")(x, y)
    assert found.item() == pytest.approx(F.cross_entropy(model(x), y).item(), abs=1e-4)


def test_factory_rebuilds_an_equal_loss() -> None:
    model = networks.build("batchnorm").train()
    x, y = networks.batch("batchnorm", 5)
    criterion = CertifiedLoss(
        model, "crown-ibp", eps=0.1, loss="robust", natural_weight=0.25, l1=1e-3, warmup=0.5, chunk_mib=7
    )
    copied, rebuilt = pickle.loads(pickle.dumps(criterion.factory()))()
    assert copied is not model and copied is rebuilt.model
    assert rebuilt(x, y, eps=0.05).item() == pytest.approx(criterion(x, y, eps=0.05).item(), rel=1e-6)
    attack = CertifiedLoss(model, eps=0.1, loss="pgd", steps=3).factory()
    assert attack.options["steps"] == 3 and attack.options["loss"] == "pgd"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss": "pgd", "step": 3}, "has no option 'step': expected steps"),
        ({"loss": "natural", "steps": 3}, "has no option 'steps': expected none"),
        ({"loss": "rbust"}, "unknown loss 'rbust'.*did you mean 'robust'"),
        ({"natural_weight": 1.5}, "natural_weight must lie"),
        ({"natural_weight": math.nan}, "natural_weight must lie"),
        ({"l1": -1.0}, "l1 and warmup"),
        ({"l1": math.nan}, "l1 and warmup"),
        ({"eps": -0.1}, "eps must be"),
    ],
)
def test_unusable_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CertifiedLoss(networks.build("mlp"), "ibp", **{"eps": 0.1, **options})


@pytest.mark.parametrize("loss", LOSSES.names())
def test_labels_outside_the_classes(loss: str) -> None:
    teacher = networks.build("mlp") if LOSSES.get(loss).teacher else None
    criterion = CertifiedLoss(networks.build("mlp"), "ibp", eps=0.1, loss=loss, teacher=teacher)
    with pytest.raises(DataError, match="labels must lie in 0…2"):
        criterion(torch.rand(2, 4), torch.tensor([0, 3]))


def test_differentiable_says_whether_backward_reaches_the_weights() -> None:
    model = networks.build("mlp")
    assert CertifiedLoss(model, "crown", eps=0.1).differentiable
    assert CertifiedLoss(model, "alpha-crown", eps=0.1, loss="pgd").differentiable
    assert not CertifiedLoss(model, "alpha-crown", eps=0.1).differentiable
    assert not CertifiedLoss(model, "alpha-crown-step", eps=0.1, natural_weight=0.5).differentiable


def test_another_input_shape_or_layer_gets_a_new_engine() -> None:
    model = nn.Sequential(networks.conv(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    criterion = CertifiedLoss(model, "crown", eps=0.1)
    y = torch.tensor([0, 1])
    for size in (6, 8):
        x = torch.rand(2, 2, size, size)
        assert torch.allclose(criterion(x, y, eps=0.0), F.cross_entropy(model(x), y))
        assert criterion(x, y).item() > F.cross_entropy(model(x), y).item()
    model[4] = nn.Linear(4, 3)
    found = criterion(x, y, eps=1e-6)
    assert found.item() == pytest.approx(F.cross_entropy(model(x), y).item(), abs=1e-4)


def test_training_reduces_the_certified_loss() -> None:
    torch.manual_seed(0)
    model = networks.mlp((4, 16, 3))
    x = torch.rand(64, 4)
    y = (x.sum(1) * 0.75).long().clamp(0, 2)
    criterion = CertifiedLoss(model, "crown", eps=0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses: list[float] = []
    for _ in range(40):
        optimizer.zero_grad()
        loss: Tensor = criterion(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]

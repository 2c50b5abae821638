"""SABR, and what all baselines keep, against hand-computed values and few-line references."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa import CertifiedLoss, linf_box
from gls_lirpa.attacks import pgd_points
from gls_lirpa.base.boxes import Box, margin_spec
from gls_lirpa.engine.batchnorm import captured_statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import GLSError
from gls_lirpa.losses import LOSSES
from gls_lirpa.losses.sabr import shrinking, small_box
from gls_lirpa.relaxations import RELAXATIONS
from tests.helpers.baseline_reference import (
    EXACT,
    FLOAT32,
    IBP,
    batch_of,
    batchnorm_net,
    gradients,
    interval,
    mlp,
    prepared,
    seeded,
)

BASELINES = ("sabr", "taps", "staps", "mtl", "cc", "exp", "robust-fused")


# -- SABR ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relaxation", RELAXATIONS)
def test_sabr_of_the_full_box_is_the_robust_loss(relaxation: str) -> None:
    model, (x, y) = mlp(4, 6, 5, 3).float(), batch_of(4, 3)
    full = CertifiedLoss(model, relaxation, eps=0.1)(x.float(), y)
    small = CertifiedLoss(model, relaxation, eps=0.1, loss="sabr", lam=1.0)(x.float(), y)
    assert small.item() == pytest.approx(full.item(), abs=FLOAT32)


def test_sabr_of_a_point_is_adversarial_training() -> None:
    model, (x, y) = mlp(4, 6, 5, 3), batch_of(4, 3)
    point = CertifiedLoss(model, "ibp", eps=0.1, loss="sabr", lam=0.0, steps=5)(x, y, generator=seeded())
    pgd = CertifiedLoss(model, "ibp", eps=0.1, loss="pgd", steps=5)(x, y, generator=seeded())
    assert point.item() == pytest.approx(pgd.item(), abs=EXACT)
    natural = F.cross_entropy(model(x), y).item()
    assert pgd.item() > natural + 0.01


@pytest.mark.parametrize("shrinkage", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("lam", [0.2, 0.7])
def test_sabr_against_its_definition(lam: float, shrinkage: float) -> None:
    model, (x, y) = mlp(4, 6, 5, 3, seed=1), batch_of(4, 3)
    eps = 0.2
    options = {"lam": lam, "steps": 4, "shrinkage": shrinkage}
    loss = CertifiedLoss(model, "ibp", eps=eps, loss="sabr", **options)(x, y, generator=seeded())
    low, high = (x - eps).clamp(0, 1), (x + eps).clamp(0, 1)
    point = pgd_points(model, x, y, Box(low, high), steps=4, generator=seeded())
    tau = lam * (high - low) / 2
    center = point.clamp(low + tau, high - tau)
    box = Box(center - tau, center + tau)
    margins = interval(model, box, margin_spec(y, 3, x.dtype), shrinkage)
    expected = torch.log1p(torch.exp(-margins).sum(1)).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=EXACT)
    assert torch.allclose(gradients(model, loss), gradients(model, expected), atol=EXACT)


def test_sabr_box_lies_in_the_whole_box() -> None:
    model, (x, y) = mlp(4, 6, 3), batch_of(4, 3, size=40)
    x[:10], x[10:20] = 0.0, 1.0
    box = small_box(prepared(model, x, y, 0.1), lam=0.4, steps=3)
    whole = linf_box(x, 0.1)
    assert (box.lower >= whole.lower).all() and (box.upper <= whole.upper).all()
    inside = (x - 0.1 > 0) & (x + 0.1 < 1)
    assert torch.allclose((box.upper - box.lower)[inside], torch.tensor(0.08, dtype=x.dtype), atol=1e-12)
    # Where the pixel range cuts the box, what is left shrinks by the same share.
    assert torch.allclose(box.upper - box.lower, 0.4 * (whole.upper - whole.lower), atol=1e-12)
    # The centre is the attack's: it moved as far as it may in almost all coordinates.
    assert ((box.center - x).abs()[inside] > 0.059).double().mean() > 0.9
    point = pgd_points(model, x, y, whole, steps=3, generator=seeded())
    assert (box.lower <= point + 1e-12).all() and (point <= box.upper + 1e-12).all()


def test_shrinkage_by_hand() -> None:
    """z = (2p − 1, 2p, −p) over p ∈ [¼, ¾]: an unstable ReLU's image [0, ½] becomes [0, ¼], those of the active
    and the dead one stay [½, 1½] and 0; f = (h₁ + h₂ + h₃ + 1, 0)."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    weights = ([[2.0], [2.0], [-1.0]], [-1.0, 0.0, 0.0], [[1.0] * 3, [0.0] * 3], [1.0, 0.0])
    for parameter, values in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(torch.tensor(values))
    x = torch.tensor([[0.5]], dtype=torch.float64)
    for label, margin in ((0, 1 + 1 / 2), (1, -1 - 1 / 4 - 3 / 2)):
        criterion = CertifiedLoss(model, "ibp", eps=0.25, loss="sabr", lam=1.0, shrinkage=0.5)
        assert criterion(x, torch.tensor([label])).item() == pytest.approx(math.log1p(math.exp(-margin)), abs=EXACT)


def test_shrinkage_sees_batchnorm_as_the_bounds_do() -> None:
    """Close to 1, the pass with shrinkage is auto_LiRPA's IBP, in value and gradient."""
    model, x, y = batchnorm_net()
    engine = BoundEngine(model, x)
    spec = margin_spec(y, 3, x.dtype)
    found = []
    for relaxation in (IBP, shrinking(IBP, 1 - 1e-12)):
        _, statistics = engine.forward(x)
        margins = engine.bounds(linf_box(x, 0.05), spec, relaxation, statistics=statistics).lower
        found.append((margins, gradients(model, margins.square().sum())))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-8)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)


def test_shrinkage_leaves_frozen_weights_frozen() -> None:
    model, (x, y) = mlp(4, 6, 3), batch_of(4, 3)
    model[1].weight.requires_grad_(False)
    CertifiedLoss(model, "ibp", eps=0.1, loss="sabr", shrinkage=0.8)(x, y).backward()
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


# -- what all of them keep -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "options"),
    [*((loss, {}) for loss in BASELINES), ("sabr", {"shrinkage": 0.8}), ("staps", {"shrinkage": 0.8})],
)
def test_batchnorm_in_train_mode(loss: str, options: dict[str, float]) -> None:
    """Bounds and attacks see the clean batch's statistics; the running ones move once, as in a forward pass."""
    model, x, y = batchnorm_net()
    once, fixed = copy.deepcopy(model), copy.deepcopy(model).eval()
    once(x)
    probe = copy.deepcopy(model)
    with captured_statistics(probe) as statistics, torch.no_grad():
        probe(x)
    for name, (mean, var) in statistics.items():
        layer = fixed.get_submodule(name)
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(var)
    value = CertifiedLoss(model, "ibp", eps=0.05, loss=loss, **options)(x, y, generator=seeded())
    frozen = CertifiedLoss(fixed, "ibp", eps=0.05, loss=loss, **options)(x, y, generator=seeded())
    assert value.item() == pytest.approx(frozen.item(), abs=1e-8)
    for name, buffer in model.named_buffers():
        assert torch.allclose(buffer, once.get_buffer(name), atol=1e-12), name
    assert all(module.training for module in model.modules())
    value.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("loss", BASELINES)
def test_randomness_comes_from_the_generator_alone(loss: str) -> None:
    model, (x, y) = mlp(4, 6, 5, 3), batch_of(4, 3)
    criterion = CertifiedLoss(model, "crown", eps=0.2, loss=loss)
    criterion(x, y)  # makes the engine
    state = torch.get_rng_state()
    values = [criterion(x, y, generator=seeded()).item() for _ in range(3)]
    assert values[0] == values[1] == values[2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("loss", "options"), [("robust-fused", {}), ("taps", {"relus": 0}), ("sabr", {"lam": 0.5})])
def test_chunks_change_nothing(loss: str, options: dict[str, float]) -> None:
    model, (x, y) = mlp(8, 64, 64, 10), batch_of(8, 10, size=64)
    found = []
    for mib in (None, 1):
        criterion = CertifiedLoss(model, "crown", eps=0.02, loss=loss, chunk_mib=mib, **options)
        value = criterion(x, y, generator=seeded())
        found.append((value.item(), gradients(model, value)))
    crown, box, spec = RELAXATIONS.get("crown"), linf_box(x, 0.02), margin_spec(y, 10, x.dtype)[:, :1]
    assert criterion.engine(x).chunk_size(crown, box, spec, {}) < len(x), "there are several chunks even of one row"
    assert found[1][0] == pytest.approx(found[0][0], abs=EXACT)
    assert torch.allclose(found[1][1], found[0][1], atol=EXACT)


class Opaque(nn.Module):
    """A network that is no chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Blocks(Opaque):
    """Its blocks() show a ReLU layer which forward() does not use."""

    def blocks(self) -> list[nn.Module]:
        return [nn.Sequential(self.first, nn.ReLU()), nn.Sequential(self.second)]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (mlp(4, 5, 3), {"loss": "taps", "relus": 1}, "relus=1 in the second block: possible is 0"),
        (mlp(4, 5, 5, 3), {"loss": "staps", "relus": 2}, "relus=2 in the second block: possible is 0 or 1"),
        (mlp(4, 3), {"loss": "taps", "relus": 0}, "no ReLU to cut behind"),
        (Opaque().double(), {"loss": "taps"}, "cannot be split into blocks"),
        (Blocks().double(), {"loss": "taps", "relus": 0}, "graph has 1 ReLUs, its layers show 0"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "relus": 0.5}, "relus >= 0, a whole number"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "threshold": 0.0}, "threshold"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "scale": -1.0}, "scale >= 0"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "latent_steps": 0}, "latent_steps >= 1"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "lam": 0.5}, "no option 'lam'"),
        (mlp(4, 5, 5, 3), {"loss": "staps", "multi": 2}, "multi true or false"),
        (mlp(4, 5, 5, 3), {"loss": "sabr", "lam": 1.5}, "lam >= 0 and <= 1, got 1.5"),
        (mlp(4, 5, 5, 3), {"loss": "sabr", "lam": float("nan")}, "lam >= 0"),
        (mlp(4, 5, 5, 3), {"loss": "sabr", "steps": 0}, "steps >= 1"),
        (mlp(4, 5, 5, 3), {"loss": "sabr", "shrinkage": 0.8, "relaxation": "crown"}, "shrinkage is defined for boxes"),
        (mlp(4, 5, 5, 3), {"loss": "staps", "shrinkage": 0.8, "relaxation": "hbox"}, "shrinkage is defined for boxes"),
        (mlp(4, 5, 5, 3), {"loss": "mtl", "alpha": -0.1}, "alpha >= 0 and <= 1"),
        (mlp(4, 5, 5, 3), {"loss": "cc", "radius": math.inf}, "radius >= 0, got inf"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(model: nn.Module, options: dict[str, object], message: str) -> None:
    x, y = batch_of(4, 3)
    with pytest.raises(GLSError) as caught:
        CertifiedLoss(model, **{"relaxation": "ibp", "eps": 0.1, **options})(x, y)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_literature() -> None:
    keys = [("mnist", 0.1), ("mnist", 0.3), ("cifar10", 2 / 255), ("cifar10", 8 / 255), ("tinyimagenet", 1 / 255)]
    table = {
        ("sabr", "lam"): [0.4, 0.9, 0.1, 0.9, 0.4],
        ("mtl-ibp", "alpha"): [0.02, 0.5, 0.01, 0.6, 0.05],
        ("mtl-ibp", "radius"): [1, 1, 2, 1, 1.5],
        ("mtl", "steps"): [10, 1, 1, 1, 1],
        ("cc", "alpha"): [0.1, 0.3, 0.01, 0.5, 0.01],
        ("cc", "radius"): [1, 1, 2.1, 1, 1],
        ("sabr", "shrinkage"): [1, 1, 0.8, 1, 1],
        ("staps", "shrinkage"): [1, 1, 0.8, 1, 1],
        ("taps", "shrinkage"): [1, 1, 0.8, 1, 1],
        ("taps", "scale"): [4, 4, 4, 2, 8],
        ("staps", "scale"): [4, 4, 2, 2, 4],
        ("staps", "lam"): [0.4, 0.6, 0.1, 0.9, 0.6],
    }
    for (loss, option), values in table.items():
        assert [LOSSES.get(loss).published_options(*key)[option] for key in keys] == values
    alphas = [LOSSES.get("exp").published_options(*key).get("alpha") for key in keys]
    assert alphas == [0.02, None, 0.095, 0.5, 0.04]
    for loss in LOSSES:
        for key in keys:
            LOSSES.get(loss).configured(LOSSES.get(loss).published_options(*key))
            assert "multi" not in LOSSES.get(loss).published_options(*key), "one attack per class, of 200 too"
    assert all(LOSSES.get(loss).options["multi"].default is True for loss in ("taps", "staps"))
    assert "shrinkage" not in LOSSES.get("sabr").published_options("cifar10", 2 / 255, relaxation="crown")
    assert LOSSES.get("sabr").published_options("mnist", 0.2) == {}

"""SABR, TAPS, STAPS, MTL-IBP and loss fusion against hand-computed values and few-line references."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa import CertifiedLoss, linf_box
from gls_lirpa.attacks import pgd_points
from gls_lirpa.engine.batchnorm import captured_statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.boxes import Box, margin_spec
from gls_lirpa.errors import ConfigError, GLSError
from gls_lirpa.losses import LOSSES, LossInput
from gls_lirpa.losses.fusion import chord_weights, fused
from gls_lirpa.losses.literature import LITERATURE, literature_options
from gls_lirpa.losses.sabr import shrinking, small_box
from gls_lirpa.losses.taps import LatentAttack, attacked, connect, product, second_block
from gls_lirpa.models import build_model
from gls_lirpa.relaxations import RELAXATIONS, get_relaxation

IBP = RELAXATIONS.get("ibp")
BASELINES = ("sabr", "taps", "staps", "mtl-ibp", "robust-fused")
DIFFERENTIABLE = [name for name in RELAXATIONS if RELAXATIONS.get(name).differentiable]
EXACT = 1e-9  # both sides in float64, the same operations in another order
FLOAT32 = 1e-5


def mlp(*sizes: int, seed: int = 0, scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.ReLU()] if i else []
        layers.append(nn.Linear(n, m))
        nn.init.normal_(layers[-1].weight, std=scale / math.sqrt(n))
    return nn.Sequential(*layers).double()


def batch_of(pixels: int, classes: int, size: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(size, pixels, generator=g, dtype=torch.float64), torch.randint(classes, (size,), generator=g)


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prepared(model: nn.Module, x: Tensor, y: Tensor, eps: float, relaxation: str = "ibp") -> LossInput:
    return LossInput(BoundEngine(model, x), get_relaxation(relaxation), x, y, eps, {}, seeded())


def interval(model: nn.Sequential, box: Box, spec: Tensor, shrinkage: float = 1.0) -> Tensor:
    """The reference: IBP in a few lines, the specification merged into the last layer."""
    low, high = box.lower.flatten(1), box.upper.flatten(1)
    layers = [layer for layer in model if not isinstance(layer, nn.Flatten)]
    for layer in layers[:-1]:
        if isinstance(layer, nn.ReLU):
            low, high = low.clamp(min=0), high.clamp(min=0)
            middle, radius = (low + high) / 2, shrinkage * (high - low) / 2
            low, high = middle - radius, middle + radius
        else:
            plus, minus = layer.weight.clamp(min=0), layer.weight.clamp(max=0)
            low, high = low @ plus.T + high @ minus.T + layer.bias, high @ plus.T + low @ minus.T + layer.bias
    matrix = spec @ layers[-1].weight
    worst = torch.where(matrix > 0, low.unsqueeze(1), high.unsqueeze(1))
    return (matrix * worst).sum(-1) + spec @ layers[-1].bias


def worst_case(
    layers: list[nn.Module], low: Tensor, high: Tensor, value: Callable[[Tensor], Tensor]
) -> float:
    """The exact maximum of a convex ``value`` of a ReLU network's output over a box in the plane.

    The box is cut along every neuron's zero line. On each piece the network is affine, so the value
    is convex there and takes its maximum at a corner of the piece.
    """
    corners = [(low[0], low[1]), (high[0], low[1]), (high[0], high[1]), (low[0], high[1])]
    start = torch.stack([torch.stack(c) for c in corners])
    pieces = [(start, torch.eye(2, dtype=low.dtype), torch.zeros(2, dtype=low.dtype))]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.detach(), layer.bias.detach()
            pieces = [(p, weight @ a, weight @ b + bias) for p, a, b in pieces]
            continue
        for neuron in range(len(pieces[0][2])):
            pieces = [
                (part, a, b) for p, a, b in pieces for part in _halves(p, a[neuron], b[neuron]) if len(part) > 2
            ]
        pieces = [(p, a * on[:, None], b * on) for p, a, b in pieces for on in [(p.mean(0) @ a.T + b > 0).to(b)]]
    return max(float(value(p @ a.T + b).max()) for p, a, b in pieces)


def _halves(polygon: Tensor, normal: Tensor, offset: Tensor) -> list[Tensor]:
    sides = polygon @ normal + offset
    halves = []
    for sign in (1.0, -1.0):
        kept = []
        for i in range(len(polygon)):
            j = (i + 1) % len(polygon)
            here, there = sign * sides[i], sign * sides[j]
            if here >= 0:
                kept.append(polygon[i])
            if here * there < 0:
                kept.append(polygon[i] + here / (here - there) * (polygon[j] - polygon[i]))
        halves.append(torch.stack(kept) if kept else polygon[:0])
    return halves


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return torch.cat([g.flatten() for g in found])


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
    outer = (1 - lam) * eps
    region = Box((x - outer).clamp(0, 1), (x + outer).clamp(0, 1))
    center = pgd_points(model, x, y, region, steps=4, generator=seeded())
    box = Box((center - lam * eps).clamp(0, 1), (center + lam * eps).clamp(0, 1))
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
    # The centre is the attack's: it moved as far as it may in almost all coordinates.
    assert ((box.center - x).abs()[inside] > 0.059).double().mean() > 0.9


def test_shrinkage_by_hand() -> None:
    """z = 2p − 1 over p ∈ [0.25, 0.75] is [−½, ½], its ReLU [0, ½], shrunk by ½ [⅛, ⅜]; f = (h + 1, 0)."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2)).double()
    for parameter, values in zip(model.parameters(), ([[2.0]], [-1.0], [[1.0], [0.0]], [1.0, 0.0]), strict=True):
        parameter.data.copy_(torch.tensor(values))
    x = torch.tensor([[0.5]], dtype=torch.float64)
    for label, margin in ((0, 1 + 1 / 8), (1, -1 - 3 / 8)):
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
    assert all(p.requires_grad for p in model.parameters())


# -- MTL-IBP ---------------------------------------------------------------------------------------


def test_mtl_ibp_mixes_attack_and_bound() -> None:
    model, (x, y) = mlp(4, 6, 5, 3), batch_of(4, 3)

    def value(eps: float = 0.1, **options: float) -> float:
        return CertifiedLoss(model, "ibp", eps=eps, **options)(x, y, generator=seeded()).item()

    pgd, bound = value(loss="pgd", steps=8), value(loss="robust")
    assert bound > pgd + 0.03
    assert value(loss="mtl-ibp", alpha=0.0) == pytest.approx(pgd, abs=EXACT)
    assert value(loss="mtl-ibp", alpha=1.0) == pytest.approx(bound, abs=EXACT)
    assert value(loss="mtl-ibp", alpha=0.3) == pytest.approx(0.7 * pgd + 0.3 * bound, abs=EXACT)
    wide = value(eps=0.25, loss="pgd", steps=8)
    assert wide > pgd + 0.01
    assert value(loss="mtl-ibp", alpha=0.3, radius=2.5) == pytest.approx(0.7 * wide + 0.3 * bound, abs=EXACT)
    assert math.isfinite(value(eps=0.9, loss="mtl-ibp", alpha=0.5, radius=2.0)), "the attack keeps to the pixel range"


# -- TAPS and STAPS --------------------------------------------------------------------------------


def latent_attack(**changes: object) -> LatentAttack:
    settings: dict[str, object] = {
        "relus": 1, "threshold": 0.5, "steps": 20, "restarts": 1, "multi": True, "shrinkage": 1.0, "seed": 0,
    }  # fmt: skip
    return LatentAttack(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("loss", "lam"), [("taps", 1.0), ("staps", 0.3)])
@pytest.mark.parametrize("shrinkage", [1.0, 0.7])
def test_taps_with_a_linear_second_block_is_ibp_and_staps_is_sabr(loss: str, lam: float, shrinkage: float) -> None:
    model, (x, y) = mlp(4, 6, 5, 4, seed=2), batch_of(4, 4)
    batch = prepared(model, x, y, 0.1)
    box = small_box(batch, lam=lam, steps=4)
    relaxation = attacked(IBP, latent_attack(relus=0, steps=3, shrinkage=shrinkage))
    margins = batch.engine.bounds(box, margin_spec(y, 4, x.dtype), relaxation).lower
    reference = interval(model, box, margin_spec(y, 4, x.dtype), shrinkage)
    assert torch.allclose(margins[:, :3], reference, atol=EXACT), "the attack's"
    assert torch.allclose(margins[:, 3:], reference, atol=EXACT), "the relaxation's"


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_taps_loss_and_gradient_with_a_linear_second_block(scale: float) -> None:
    """There L_T = L_I = ℓ, so L = ℓ² and its gradient is (2a + 2(1 − a)) ℓ∇ℓ, whatever the scale."""
    model, (x, y) = mlp(4, 6, 5, 4, seed=2), batch_of(4, 4)
    loss = CertifiedLoss(model, "ibp", eps=0.1, loss="taps", relus=0, latent_steps=3, scale=scale)(x, y)
    margins = interval(model, linf_box(x, 0.1), margin_spec(y, 4, x.dtype))
    expected = torch.log1p(torch.exp(-margins).sum(1)).square().mean()
    assert loss.item() == pytest.approx(expected.item(), abs=EXACT)
    assert torch.allclose(gradients(model, loss), gradients(model, expected), atol=EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_taps_margins_against_the_exact_minimum_in_the_latent_box(seed: int) -> None:
    model, (x, y) = mlp(3, 2, 5, 3, seed=seed, scale=2.0), batch_of(3, 3)
    model[1].bias.data.add_(1.5)  # most latent boxes are not flat
    engine, spec, box = BoundEngine(model, x), margin_spec(y, 3, x.dtype), linf_box(x, 0.3)
    with torch.no_grad():
        found = engine.bounds(box, spec, attacked(IBP, latent_attack(steps=60, restarts=12))).lower
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
            assert found[i, 2 + j] <= exact + EXACT, "IBP is below"
            checked += 1
    assert checked >= 4


def test_taps_lies_between_pgd_and_ibp_on_a_convolutional_network() -> None:
    model = build_model("cnn3-tiny", in_shape=(1, 8, 8), classes=4, init="kaiming-uniform").double()
    x = torch.rand(5, 1, 8, 8, generator=seeded(), dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 0])
    engine = BoundEngine(model, x)
    spec, box = margin_spec(y, 4, x.dtype), linf_box(x, 0.1)
    for relus in (0, 1):
        both = engine.bounds(box, spec, attacked(IBP, latent_attack(relus=relus))).lower
        estimate, bound = both.chunk(2, dim=1)
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
            engine.bounds(linf_box(x, 0.1), spec, attacked(IBP, latent_attack(relus=0, multi=multi))).lower
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


# -- loss fusion -----------------------------------------------------------------------------------


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
    for relaxation in DIFFERENTIABLE:
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
        fusion = -engine.bounds(box, spec, fused(get_relaxation(relaxation))).lower.squeeze(1)
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


# -- what all of them keep -------------------------------------------------------------------------


def batchnorm_net() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(4)
    layers = [nn.Conv2d(1, 3, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(6, 3)).double()
    for layer in model:
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    return model.train(), torch.rand(7, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])


@pytest.mark.parametrize("options", [{}, {"shrinkage": 0.8}], ids=["plain", "shrinkage"])
@pytest.mark.parametrize("loss", BASELINES)
def test_batchnorm_in_train_mode(loss: str, options: dict[str, float]) -> None:
    """Bounds and attacks see the clean batch's statistics; the running ones move once, as in a forward pass."""
    if not set(options) <= set(LOSSES.get(loss).options):
        pytest.skip("has no shrinkage")
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
    model, (x, y) = mlp(4, 6, 5, 3), batch_of(4, 3)
    found = []
    for mib in (None, 0):
        value = CertifiedLoss(model, "crown", eps=0.1, loss=loss, chunk_mib=mib, **options)(x, y, generator=seeded())
        found.append((value.item(), gradients(model, value)))
    assert found[1][0] == pytest.approx(found[0][0], abs=EXACT)
    assert torch.allclose(found[1][1], found[0][1], atol=EXACT)


class Opaque(nn.Module):
    """A network that is no chain of layers."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.first, self.second, self.functional = nn.Linear(4, 5), nn.Linear(5, 3), functional

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
        (Opaque(True).double(), {"loss": "taps"}, "cannot be split into blocks"),
        (Blocks(True).double(), {"loss": "taps", "relus": 0}, "graph has 1 ReLUs, its layers show 0"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "relus": 0.5}, "whole number for relus"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "threshold": 0.0}, "threshold"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "scale": -1.0}, "scale >= 0"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "latent_steps": 0}, "latent_steps >= 1"),
        (mlp(4, 5, 5, 3), {"loss": "taps", "lam": 0.5}, "no option 'lam'"),
        (mlp(4, 5, 5, 3), {"loss": "staps", "multi": 2}, "multi >= 0 and <= 1"),
        (mlp(4, 5, 5, 3), {"loss": "sabr", "lam": 1.5}, "lam >= 0 and <= 1, got 1.5"),
        (mlp(4, 5, 5, 3), {"loss": "sabr", "lam": float("nan")}, "lam >= 0"),
        (mlp(4, 5, 5, 3), {"loss": "sabr", "steps": 0}, "steps >= 1"),
        (mlp(4, 5, 5, 3), {"loss": "sabr", "shrinkage": 0.8, "relaxation": "crown"}, "shrinkage is defined for boxes"),
        (mlp(4, 5, 5, 3), {"loss": "staps", "shrinkage": 0.8, "relaxation": "hbox"}, "shrinkage is defined for boxes"),
        (mlp(4, 5, 5, 3), {"loss": "mtl-ibp", "alpha": -0.1}, "alpha >= 0 and <= 1"),
        (mlp(4, 5, 5, 3), {"loss": "mtl-ibp", "radius": math.inf}, "radius >= 0, got inf"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(model: nn.Module, options: dict[str, object], message: str) -> None:
    x, y = batch_of(4, 3)
    with pytest.raises(GLSError) as caught:
        CertifiedLoss(model, **{"relaxation": "ibp", "eps": 0.1, **options})(x, y)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_second_block_of_the_paper_s_networks_begins_before_the_last_hidden_layer() -> None:
    kinds = [type(layer).__name__ for block in second_block(build_model("cnn5"), 1) for layer in block]
    assert kinds == ["Flatten", "Linear", "ReLU", "Linear"]
    kinds = [type(layer).__name__ for block in second_block(build_model("cnn7-bn"), 1) for layer in block]
    assert kinds == ["Flatten", "Linear", "BatchNorm1d", "ReLU", "Linear"]


def test_literature() -> None:
    keys = [("mnist", 0.1), ("mnist", 0.3), ("cifar10", 2 / 255), ("cifar10", 8 / 255), ("tinyimagenet", 1 / 255)]
    assert [(s.dataset, s.eps) for s in LITERATURE] == keys
    table = {
        ("sabr", "lam"): [0.4, 0.9, 0.1, 0.9, 0.4],
        ("mtl-ibp", "alpha"): [0.02, 0.5, 0.01, 0.6, 0.05],
        ("mtl-ibp", "radius"): [1, 1, 2, 1, 1.5],
        ("taps", "scale"): [4, 4, 4, 2, 8],
        ("staps", "scale"): [4, 4, 2, 2, 4],
        ("staps", "lam"): [0.4, 0.9, 0.1, 0.9, 0.4],
    }
    for (loss, option), values in table.items():
        assert [literature_options(loss, *key)[option] for key in keys] == values
    for loss in LOSSES:
        for key in keys:
            LOSSES.get(loss).configured(literature_options(loss, *key))
    assert "shrinkage" not in literature_options("sabr", "cifar10", 2 / 255, relaxation="crown")
    assert literature_options("sabr", "mnist", 0.2) == {}
    with pytest.raises(ConfigError, match="unknown loss"):
        literature_options("saber", "mnist", 0.1)

"""Landscapes and tightness of small networks: against direct evaluation, exact accuracies and attacks."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.analysis import Landscape, Tightness, area_under, loss_landscape, tightness_curves
from gls_lirpa.base.boxes import Bounds
from gls_lirpa.data import load_dataset
from gls_lirpa.errors import ConfigError, DataError
from gls_lirpa.losses import CertifiedLoss
from gls_lirpa.relaxations import Relaxation
from tests.helpers.networks import mlp


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network trained on digits with noise, and 60 held-out samples."""
    torch.manual_seed(0)
    dataset = load_dataset("digits")
    x, y = dataset.train.batch(range(400))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        noisy = (x + 0.1 * torch.randn_like(x)).clamp(0, 1)
        nn.functional.cross_entropy(model(noisy), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return (model.eval(), *dataset.test.batch(range(60)))


def _state(model: nn.Module) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]


# -- landscape -------------------------------------------------------------------------------------


def test_landscape_is_the_loss_along_the_gradient(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained
    x, y, lr = x[:4], y[:4], 0.05
    before = _state(model)
    found = loss_landscape(model, x, y, eps=0.03, sigmas=(0.0,), step=0.5, steps=(1, 3), lr=lr)
    assert _state(model) == before
    assert found.positions == [-0.5, 0.0, 0.5, 1.0, 1.5]
    assert [curve.relaxation for curve in found.curves] == ["ibp", "hbox", "crown-ibp", "crown"]

    parameters = list(model.parameters())
    gradient = torch.autograd.grad(CertifiedLoss(model, "crown", eps=0.03)(x, y), parameters)
    assert found.gradient_norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in gradient)), rel=1e-5)
    with torch.no_grad():
        for p, g in zip(parameters, gradient, strict=True):
            p.sub_(1.0 * lr * g)
        try:
            for curve in found.curves:
                expected = float(CertifiedLoss(model, curve.relaxation, eps=0.03)(x, y))
                assert curve.losses[3] == pytest.approx(expected, rel=1e-4)
                assert curve.values == pytest.approx([v / curve.losses[1] for v in curve.losses], rel=1e-12)
                assert curve.errors == [0.0] * 5
        finally:
            for p, g in zip(parameters, gradient, strict=True):
                p.add_(1.0 * lr * g)
    assert found.curve("deeppoly", 0.0).losses[2] < found.curve("crown", 0.0).losses[1]


def test_smoothed_landscape_is_the_mean_over_common_perturbations() -> None:
    model = mlp((4, 6, 3))
    x, y = torch.rand(3, 4), torch.tensor([0, 1, 2])
    calls: list[tuple[int, int]] = []
    found = loss_landscape(
        model, x, y, eps=0.1, relaxations=("ibp", "crown"), sigmas=(0.0, 0.1), samples=5, step=0.5, steps=2, lr=0.1,
        seed=3, progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    assert calls[-1] == (2 * 5 * (1 + 1 * 5), 2 * 5 * (1 + 1 * 5))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})

    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    loss = CertifiedLoss(model, "crown", eps=0.1)
    parts = torch.autograd.grad(loss(x, y), list(model.parameters()))
    gradient = torch.cat([part.flatten() for part in parts])
    generator = torch.Generator().manual_seed(3)
    table = np.empty((5, 5))
    for i in range(5):
        noise = torch.randn(len(theta), generator=generator)
        for k, t in enumerate(found.positions):
            with torch.no_grad():
                nn.utils.vector_to_parameters(theta - t * 0.1 * gradient + 0.1 * noise, model.parameters())
                table[i, k] = float(loss(x, y))
    curve = found.curve("crown", 0.1)
    assert curve.losses == pytest.approx(table.mean(0).tolist(), rel=1e-5)
    assert curve.values[2] == 1.0
    assert curve.errors[2] == pytest.approx(0.0, abs=1e-12)
    ratio = table.mean(0) / table.mean(0)[2]
    residual = (table - ratio * table[:, 2:3]).std(0, ddof=1) / (table.mean(0)[2] * math.sqrt(5))
    assert curve.errors == pytest.approx(residual.tolist(), rel=1e-3, abs=1e-6)


def test_landscape_depends_on_its_seed_alone(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained

    def measured(seed: int) -> Landscape:
        return loss_landscape(
            model, x[:2], y[:2], eps=0.02, relaxations=("ibp",), sigmas=(0.01,), samples=2, steps=1, seed=seed
        )

    state = torch.get_rng_state()
    first = measured(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(17)
    assert measured(1) == first
    assert measured(2).curves[0].losses != first.curves[0].losses


def test_smoothing_lessens_the_jumps_of_crown() -> None:
    """One unstable neuron whose lower slope changes along the line: the jump is gone after smoothing."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(-0.45)
        model[2].weight.copy_(torch.tensor([[1.0], [0.0]]))
        model[2].bias.zero_()
    options = {"eps": 0.5, "relaxations": ("crown",), "step": 0.1, "steps": 10, "lr": 0.5}
    x, y = torch.tensor([[0.5]]), torch.tensor([0])
    found = loss_landscape(model, x, y, sigmas=(0.0, 0.1), samples=24, **options)  # type: ignore[arg-type]
    original, smoothed = found.curve("crown", 0.0).scores, found.curve("crown", 0.1).scores
    assert original.max_slope > 2.5
    assert smoothed.max_slope < 0.5 * original.max_slope
    assert smoothed.curvature < 0.6 * original.curvature
    assert smoothed.nonconvexity < original.nonconvexity


def test_everything_is_put_back_even_after_an_exception() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    model[3].weight.grad = torch.ones_like(model[3].weight)
    before, flags = _state(model), [p.requires_grad for p in model.parameters()]

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    x, y = torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(KeyboardInterrupt):
        loss_landscape(
            model, x, y, eps=0.1, sigmas=(0.0, 0.5), samples=3, steps=1, relaxations=("crown",), progress=stop
        )
    assert _state(model) == before
    assert [p.requires_grad for p in model.parameters()] == flags
    assert model.training
    assert torch.equal(model[3].weight.grad, torch.ones(3, 6))
    assert all(p.grad is None for p in model.parameters() if p is not model[3].weight)


def test_a_network_without_trainable_weights_is_moved_all_the_same() -> None:
    model = mlp((4, 6, 3)).requires_grad_(False)
    x, y = torch.rand(3, 4), torch.tensor([0, 1, 2])
    found = loss_landscape(model, x, y, eps=0.1, sigmas=(0.0,), steps=1, relaxations=("crown",), lr=0.1)
    assert found.curves[0].losses[2] < found.curves[0].losses[0]
    assert not any(p.requires_grad for p in model.parameters())


def test_landscape_round_trip_through_json() -> None:
    model = mlp((4, 6, 3))
    x, y = torch.rand(2, 4), torch.tensor([0, 2])
    found = loss_landscape(model, x, y, eps=0.1, sigmas=(0.0, 1e-3), samples=2, steps=1)
    assert Landscape.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    single = loss_landscape(model, x, y, eps=0.1, sigmas=(1e-3,), samples=1, steps=1, relaxations=("ibp",))
    again = Landscape.from_dict(json.loads(json.dumps(single.to_dict(), allow_nan=False)))
    assert all(math.isnan(error) for error in again.curves[0].errors)  # one draw has no spread
    assert again.curves[0].losses == single.curves[0].losses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigmas": ()}, "at least one"),
        ({"sigmas": (-1.0,)}, "sigmas >= 0"),
        ({"samples": 0}, "samples >= 1"),
        ({"step": 0.0}, "step > 0"),
        ({"lr": math.nan}, "lr > 0"),
        ({"steps": 0}, "at least 3 points"),
        ({"relaxations": ("bix",)}, "bix"),
    ],
)
def test_landscape_refuses_unusable_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_landscape(mlp((4, 3)), torch.rand(1, 4), torch.tensor([0]), eps=0.1, **options)  # type: ignore[arg-type]


# -- tightness -------------------------------------------------------------------------------------


def test_area_of_known_curves() -> None:
    assert area_under([0.0, 0.1, 0.2], [1.0, 0.5, 0.0]) == pytest.approx(0.5, abs=1e-12)
    assert area_under([0.0, 0.1, 0.4], [1.0, 1.0, 0.0]) == pytest.approx(0.1 / 0.4 + 0.5 * 0.3 / 0.4, abs=1e-12)
    assert area_under([0.2, 0.6], [0.7, 0.7]) == pytest.approx(0.7, abs=1e-12)
    with pytest.raises(DataError, match="as many values"):
        area_under([0.0, 0.1], [1.0])
    with pytest.raises(ConfigError, match="increasing"):
        area_under([0.1, 0.1], [1.0, 1.0])


def test_curves_are_ordered_and_below_what_an_attack_leaves(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained
    before = _state(model)
    names = ["ibp", "hbox", "crown-ibp", "crown", "alpha-crown"]
    radii = [0.0, 0.01, 0.02, 0.04, 0.08]
    found = tightness_curves(model, x, y, radii=radii, relaxations=names, attack_steps=20)
    assert _state(model) == before
    natural = float((model(x).argmax(1) == y).double().mean())
    assert natural > 0.8
    assert found.natural == pytest.approx(natural, abs=1e-12)
    sample = 1 / len(x)  # rounding may decide one sample
    for curve in found.certified.values():
        assert curve[0] == found.natural
        assert all(c <= a + 1e-12 for c, a in zip(curve, found.adversarial, strict=True))
    for looser, tighter in (("ibp", "hbox"), ("crown", "alpha-crown")):
        pairs = zip(found.certified[looser], found.certified[tighter], strict=True)
        assert all(a <= b + sample + 1e-12 for a, b in pairs)
        assert found.areas[looser] <= found.areas[tighter] + 1e-12
    assert found.areas["ibp"] < found.areas["crown"]
    assert found.certified["crown"][1] > found.certified["crown"][-1]
    assert found.areas["crown"] == pytest.approx(area_under(radii, found.certified["crown"]), abs=1e-12)
    assert Tightness.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    alone = tightness_curves(model, x, y, radii=radii, relaxations=["alpha-crown"]).certified["alpha-crown"]
    assert all(abs(a - b) <= sample + 1e-12 for a, b in zip(alone, found.certified["alpha-crown"], strict=True))


def test_every_relaxation_of_a_linear_network_is_exact() -> None:
    """Margins of a linear network fall by ε·‖w_y − w_j‖₁, inside the pixel range."""
    model = nn.Linear(6, 3)
    x = 0.3 + 0.4 * torch.rand(40, 6)
    y = model(x).argmax(1)
    y[:5] = (y[:5] + 1) % 3  # these are misclassified
    radii = [0.0, 0.05, 0.1, 0.2]
    names = ["ibp", "hbox", "crown-ibp", "crown"]
    found = tightness_curves(model, x, y, radii=radii, relaxations=names)
    assert found.natural == pytest.approx(35 / 40)
    weight = model.weight.detach()
    margins = model(x).detach().gather(1, y[:, None]) - model(x).detach()
    reach = (weight[y].unsqueeze(1) - weight).abs().sum(2)
    others = torch.arange(3) != y[:, None]
    for i, radius in enumerate(radii):
        exact = ((margins - radius * reach > 0) | ~others).all(1).double().mean()
        for name in names:
            assert found.certified[name][i] == pytest.approx(float(exact), abs=1e-9), (name, radius)


def test_nan_and_crossed_bounds_do_not_certify() -> None:
    def constant(value: float, low: float, high: float) -> Relaxation:
        def bound(engine: object, box: object, spec: Tensor, statistics: object) -> Bounds:
            lower = torch.full(spec.shape[:2], value)
            ends = (torch.full((len(spec), 4), low), torch.full((len(spec), 4), high))
            return Bounds(lower, {"node": ends})

        return Relaxation("made-up", bound, light=True)

    model = mlp((4, 3))
    x = torch.rand(6, 4)
    y = model(x).argmax(1)
    for relaxation, expected in (
        (constant(1.0, -1.0, 1.0), 1.0),
        (constant(0.0, -1.0, 1.0), 0.0),
        (constant(math.nan, -1.0, 1.0), 0.0),
        (constant(1.0, 1.0, -1.0), 0.0),
        (constant(1.0, math.nan, 1.0), 0.0),
    ):
        found = tightness_curves(model, x, y, radii=[0.1], relaxations=[relaxation])
        assert found.certified["made-up"] == [expected]
        assert found.areas == {}


def test_a_sample_lost_at_one_radius_can_come_back() -> None:
    """Every radius is bounded anew: a relaxation that fails at 0.1 alone loses nothing at 0.2."""

    def bound(engine: object, box: object, spec: Tensor, statistics: object) -> Bounds:
        radius = float((box.upper - box.lower).max() / 2)  # type: ignore[attr-defined]
        return Bounds(torch.full(spec.shape[:2], -1.0 if abs(radius - 0.1) < 1e-3 else 1.0))

    model = mlp((4, 3))
    x = torch.full((3, 4), 0.5)
    y = model(x).argmax(1)
    found = tightness_curves(model, x, y, radii=[0.05, 0.1, 0.2], relaxations=[Relaxation("odd", bound, light=True)])
    assert found.certified["odd"] == [1.0, 0.0, 1.0]


def test_tightness_does_not_depend_on_batches_or_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.rand(300, 4)
    y = model.eval()(x).argmax(1)
    options = {"radii": [0.0, 0.02, 0.05], "relaxations": ["ibp", "crown"]}
    whole = tightness_curves(model.train(), x, y, **options)  # type: ignore[arg-type]
    assert model.training
    halves = [tightness_curves(model, x[part], y[part], **options) for part in (slice(0, 150), slice(150, 300))]  # type: ignore[arg-type]
    for name, curve in whole.certified.items():
        means = [(a + b) / 2 for a, b in zip(*(half.certified[name] for half in halves), strict=True)]
        assert curve == pytest.approx(means, abs=1e-12)
    assert all(a >= b for a, b in itertools.pairwise(whole.certified["ibp"]))


def test_tightness_refuses_unusable_settings() -> None:
    model, x, y = mlp((4, 3)), torch.rand(2, 4), torch.tensor([0, 1])
    with pytest.raises(ConfigError, match="increasing"):
        tightness_curves(model, x, y, radii=[0.2, 0.1])
    with pytest.raises(ConfigError, match="increasing"):
        tightness_curves(model, x, y, radii=[])
    with pytest.raises(ConfigError, match="eps must be"):
        tightness_curves(model, x, y, radii=[-0.1])
    with pytest.raises(DataError, match="at least one sample"):
        tightness_curves(model, x[:0], y[:0], radii=[0.1])
    with pytest.raises(DataError, match="labels"):
        tightness_curves(model, x, torch.tensor([0, 7]), radii=[0.1])

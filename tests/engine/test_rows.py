"""The row route against auto_LiRPA, exact derivatives, and itself cut into other pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.engine import row_compiled, row_neurons, row_patches, row_places, row_relaxation
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.rows import _distinct_rows
from gls_lirpa.losses import CertifiedLoss
from gls_lirpa.losses.terms import margin_cross_entropy
from gls_lirpa.models import build_model
from gls_lirpa.relaxations import get_relaxation
from tests.helpers import networks
from tests.helpers.bounding import relaxation

BOTH = ("ibp", "crown-ibp", "crown")


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows by compiled kernels where they can, and as without numba."""
    way: str = request.param
    if way == "torch":
        monkeypatch.setattr(row_compiled, "kernels", lambda: None)
    return way


def on_rows(name: str) -> bool:
    return BoundEngine(networks.build(name), networks.batch(name, 2)[0]).route()[0] == "rows"


def outcome(
    model: nn.Module, box: Box, y: Tensor, method: str, *, route: str = "auto"
) -> tuple[Tensor, list[Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Margins, the gradient of a loss of them in every weight, and intermediate bounds."""
    engine = BoundEngine(model, box.lower, route=route)
    bounds = engine.bounds(box, margin_spec(y, engine.classes, box.lower.dtype), relaxation(method))
    weights = list(model.parameters())
    found = torch.autograd.grad(margin_cross_entropy(bounds.lower).sum(), weights, allow_unused=True)
    gradients = [torch.zeros_like(w) if g is None else g for g, w in zip(found, weights, strict=True)]
    return bounds.lower.detach(), gradients, {k: (a.detach(), b.detach()) for k, (a, b) in bounds.intermediate.items()}


def assert_same(first: tuple[Tensor, list[Tensor], object], second: tuple[Tensor, list[Tensor], object]) -> None:
    assert torch.allclose(first[0], second[0], rtol=1e-10, atol=1e-12)
    for a, b in zip(first[1], second[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10 * (1 + float(b.abs().max())))


def random_network(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Convolutions of random kernels, strides, paddings, dilations and groups, then dense layers."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*options: int) -> int:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    shape = (pick(1, 2), pick(7, 9), pick(6, 8))
    channels, value = shape[0], torch.zeros(1, *shape)
    layers: list[nn.Module] = []
    for _ in range(pick(1, 2, 3)):
        out = pick(2, 4)
        groups = pick(1, channels) if out % channels == 0 else 1
        kernel = (pick(1, 2, 3), pick(1, 3))
        stride, padding = (pick(1, 2), pick(1, 2)), (pick(0, 1, 2), pick(0, 1))
        layer = nn.Conv2d(channels, out, kernel, stride, padding, pick(1, 1, 2), groups, bool(pick(0, 1)))
        try:
            value = layer(value)
        except RuntimeError:  # nothing left of the map
            continue
        layers += [layer, *([nn.BatchNorm2d(out)] if pick(0, 1) else []), *([nn.ReLU()] if pick(0, 1, 1) else [])]
        channels = out
    features = value[0].numel()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, networks.CLASSES))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
        for module in model:
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.abs_().add_(0.5)
    return model.double().eval(), shape


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("name", networks.NETWORKS)
@pytest.mark.parametrize("eps", [0.0, 0.05, 0.4])
def test_routes_agree_in_bounds_and_gradients(name: str, method: str, eps: float) -> None:
    if not on_rows(name) or name == "avgpool-padded":
        pytest.skip("auto_LiRPA alone, or not at all, bounds this one")
    model = networks.build(name).double()
    x, y = networks.batch(name, 4, seed=1)
    box = linf_box(x.double(), eps)
    ours, theirs = outcome(model, box, y, method), outcome(model, box, y, method, route="lirpa")
    assert torch.allclose(ours[0], theirs[0], rtol=1e-9, atol=1e-10)
    if eps > 0:  # at radius 0 bounds have kinks everywhere, and each side of one is a derivative
        for a, b in zip(ours[1], theirs[1], strict=True):
            assert torch.allclose(a, b, rtol=1e-7, atol=1e-8 * (1 + float(b.abs().max())))


def test_which_networks_take_the_row_route() -> None:
    taken = {name for name in networks.NETWORKS if on_rows(name)}
    assert {"mlp", "conv", "batchnorm", "residual", "residual-bn", "avgpool", "global-pool", "conv-grouped"} <= taken
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 3))
    route, reason = BoundEngine(model, torch.rand(1, 1, 2, 2)).route()
    assert route == "lirpa" and "Sigmoid" in reason


@pytest.mark.parametrize("seed", range(12))
def test_random_networks_agree_with_auto_lirpa_and_are_sound(seed: int) -> None:
    model, shape = random_network(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(networks.CLASSES, (3,), generator=generator)
    box = linf_box(x, 0.1)
    assert BoundEngine(model, x).route()[0] == "rows"
    for method in BOTH:
        ours, theirs = outcome(model, box, y, method), outcome(model, box, y, method, route="lirpa")
        assert torch.allclose(ours[0], theirs[0], rtol=1e-9, atol=1e-9)
        for a, b in zip(ours[1], theirs[1], strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-7 * (1 + float(b.abs().max())))
    lower = BoundEngine(model, x).margins(box, y, get_relaxation("crown")).detach()
    spec = margin_spec(y, networks.CLASSES, torch.float64)
    for _ in range(50):
        share = torch.rand(x.shape, generator=generator, dtype=torch.float64).round()
        point = box.lower + share * (box.upper - box.lower)
        assert ((spec @ model(point).unsqueeze(-1)).squeeze(-1) >= lower - 1e-9).all()


@pytest.mark.parametrize("name", ["mlp", "conv", "residual", "batchnorm"])
@pytest.mark.parametrize("route", ["auto", "lirpa"])
def test_crown_is_never_looser_than_ibp_at_any_neuron(name: str, route: str) -> None:
    model = networks.build(name).double()
    x, y = networks.batch(name, 4, seed=2)
    box = linf_box(x.double(), 0.3)
    crown = outcome(model, box, y, "crown", route=route)[2]
    ibp = outcome(model, box, y, "ibp", route=route)[2]
    plain = outcome(model, box, y, "crown-plain", route=route)[2]
    looser = 0
    for key, (lower, upper) in ibp.items():
        assert (crown[key][0] >= lower - 1e-12).all() and (crown[key][1] <= upper + 1e-12).all()
        looser += int((plain[key][0] < lower - 1e-9).sum())
    if name == "residual":
        assert looser > 0  # or intersecting would change nothing


@pytest.mark.parametrize("name", ["mlp", "conv", "residual"])
@pytest.mark.parametrize("bias", [-6.0, 6.0])
def test_layers_without_unstable_neurons(name: str, bias: float) -> None:
    model = networks.build(name).double()
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if n.endswith("bias")).fill_(bias)
    x, y = networks.batch(name, 3)
    box = linf_box(x.double(), 0.01)
    for method in ("crown-ibp", "crown"):
        assert_same(outcome(model, box, y, method), outcome(model, box, y, method, route="lirpa"))


SETTINGS = [
    (row_neurons, "PART_VALUES", 1),
    (row_neurons, "BEGUN_VALUES", 1),
    (row_compiled, "LEAST_ROWS", 1),
    (row_patches, "MATRIX_WASTE", 0.0),
    (row_patches, "MATRIX_WASTE", 1e9),
    (row_relaxation, "SPARSE_SHARE", -1.0),
    (row_relaxation, "SPARSE_SHARE", 1.0),
    (row_places, "UNSTABLE_SHARE", 0.0),
    (row_places, "UNSTABLE_SHARE", 2.0),
    (row_places, "PART_VALUES", 1),
]


@pytest.mark.parametrize(("module", "setting", "value"), SETTINGS)
@pytest.mark.parametrize("name", ["conv", "residual-bn", "conv-then-conv", "mlp"])
def test_how_rows_are_computed_changes_nothing(
    name: str, module: object, setting: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = networks.build(name).double()
    x, y = networks.batch(name, 6, seed=3)
    box = linf_box(x.double(), 0.1)
    usual = outcome(model, box, y, "crown")
    monkeypatch.setattr(module, setting, value)
    assert_same(outcome(model, box, y, "crown"), usual)


@pytest.mark.parametrize("name", ["mlp", "conv", "residual-bn"])
def test_gradients_are_finite_differences(name: str) -> None:
    model = networks.build(name).double()
    x, y = networks.batch(name, 2, seed=5)
    box = linf_box(x.double(), 0.05)
    _, gradients, _ = outcome(model, box, y, "crown")
    generator = torch.Generator().manual_seed(0)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        direction = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight.add_(direction, alpha=step)
                lower = BoundEngine(model, x.double()).margins(box, y, relaxation("crown"))
                values.append(float(margin_cross_entropy(lower).sum()))
                weight.add_(direction, alpha=-step)
        numeric = (values[0] - values[1]) / 2e-6
        assert numeric == pytest.approx(float((gradient * direction).sum()), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["batchnorm", "residual-bn"])
def test_gradients_through_batch_statistics(name: str) -> None:
    x, y = networks.batch(name, 6)
    found = []
    for route in ("auto", "lirpa"):
        model = networks.build(name).double().train()
        engine = BoundEngine(model, x.double(), route=route)
        _, statistics = engine.forward(x.double())
        margins = engine.margins(linf_box(x.double(), 0.05), y, relaxation("crown"), statistics=statistics)
        margin_cross_entropy(margins).mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


def test_twenty_steps_of_training_are_those_of_auto_lirpa() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(32, 1, 12, 12, generator=generator)
    y = torch.randint(10, (32,), generator=generator)
    losses = []
    for route in ("auto", "lirpa"):
        model = build_model("cnn3", in_shape=(1, 12, 12), seed=1)
        criterion = CertifiedLoss(model, "crown", eps=0.05)
        criterion._engine = BoundEngine(model, x, route=route)
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        history = []
        for step in range(20):
            part = slice(8 * (step % 4), 8 * (step % 4) + 8)
            optimizer.zero_grad()
            loss = criterion(x[part], y[part])
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_interval_bounds_are_the_same_with_rows_in_common_and_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few distinct rows are one matrix product, many are rows of each sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 5)).double()
    x, labels = torch.rand(6, 1, 3, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 4, 2, 1])
    engine, box, relaxation = BoundEngine(model, x), linf_box(x, 0.1), get_relaxation("ibp")
    shared = engine.margins(box, labels, relaxation)
    (by_shared,) = torch.autograd.grad(shared.square().sum(), model[1].weight)
    monkeypatch.setattr("gls_lirpa.engine.rows.DISTINCT", 0)
    own = engine.margins(box, labels, relaxation)
    (by_own,) = torch.autograd.grad(own.square().sum(), model[1].weight)
    torch.testing.assert_close(shared, own, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_shared, by_own, rtol=1e-12, atol=1e-12)


def test_rows_whose_sums_collide_are_not_taken_for_one_another() -> None:
    """Rows are told apart by a sum of their entries, which here is the same for two different rows."""
    mix = torch.linspace(1, 2, 2, dtype=torch.float64).exp()
    first = torch.tensor([1.0, 0.0], dtype=torch.float64)
    second = torch.tensor([0.0, float(mix[0] / mix[1])], dtype=torch.float64)
    assert float(first @ mix) == float(second @ mix)
    assert _distinct_rows(torch.stack([first, second]).unsqueeze(1)) is None

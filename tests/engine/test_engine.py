"""Soundness of every relaxation on every layer type, and bounds that depend on nothing else."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.engine.batchnorm import applied_statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.engine.graph import evaluate
from gls_lirpa.engine.wrap import bounded_input
from gls_lirpa.errors import DataError
from gls_lirpa.relaxations import RELAXATIONS
from tests.helpers import networks
from tests.helpers.bounding import SMOOTH, assert_below, engine, margins_at, points, relaxation

METHODS = RELAXATIONS.names()
BATCHNORM = ["batchnorm", "residual-bn"]


@functools.cache
def values_in(name: str, eps: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Margins (points, 3, 2), and inputs of the ReLUs by node, at many points of three boxes."""
    x, y = networks.batch(name, 3)
    model, nodes = engine(name).model, engine(name).graph()
    with torch.no_grad():
        found = points(model, x, y, linf_box(x, eps))
        margins = [margins_at(model, point, y) for point in found]
        inner = [evaluate(nodes, engine(name)._normalized(point)) for point in found]
        assert all(torch.allclose(v[nodes[-1].name], model(p), atol=1e-5) for v, p in zip(inner, found, strict=True))
    fed = [node.inputs[0] for node in nodes if node.kind == "relu"]
    return torch.stack(margins), {node: torch.stack([v[node] for v in inner]) for node in fed}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_bounds_hold_at_every_point(name: str, method: str) -> None:
    x, y = networks.batch(name, 3)
    for eps in (0.03, 0.3):
        with torch.no_grad():
            bounds = engine(name).bounds(linf_box(x, eps), margin_spec(y, 3), relaxation(method))
        margins, inner = values_in(name, eps)
        assert_below(bounds.lower, margins)
        assert list(bounds.intermediate) == list(inner)
        for node, (low, high) in bounds.intermediate.items():
            assert_below(low, inner[node])
            assert_below(-high, -inner[node])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_radius_zero_is_the_forward_pass(name: str, method: str) -> None:
    x, y = networks.batch(name, 3, seed=1)
    expected = margins_at(engine(name).model, x, y)
    for box in (linf_box(x, 0.0), Box(x, x)):
        assert torch.allclose(engine(name).margins(box, y, relaxation(method)), expected, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mlp", "conv", "view", "standardized", "batchnorm", "avgpool"])
def test_a_bound_does_not_depend_on_the_batch(name: str, method: str) -> None:
    x, y = networks.batch(name, 5, seed=2)
    box = linf_box(x, 0.1)
    together = engine(name).margins(box, y, relaxation(method)).detach()
    for i in range(5):
        alone = engine(name).margins(box[i : i + 1], y[i : i + 1], relaxation(method)).detach()
        assert torch.allclose(alone[0], together[i], rtol=1e-5, atol=1e-5)


def test_clamped_pixels_are_not_perturbed_beyond_the_range() -> None:
    x = torch.tensor([[0.0, 1.0, 0.5, 0.02]])
    box = linf_box(x, 0.1)
    assert torch.allclose(box.lower, torch.tensor([[0.0, 0.9, 0.4, 0.0]]))
    assert torch.allclose(box.upper, torch.tensor([[0.1, 1.0, 0.6, 0.12]]))
    y = torch.tensor([1])
    clamped = engine("mlp").margins(box, y, relaxation("crown"))
    whole = engine("mlp").margins(Box(x - 0.1, x + 0.1), y, relaxation("crown"))
    assert (clamped >= whole - 1e-6).all() and (clamped > whole + 1e-3).any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shift", [5.0, -5.0])
def test_dead_and_always_active_relus(method: str, shift: float) -> None:
    model = networks.build("mlp")
    with torch.no_grad():
        model[0].bias.add_(shift)
    x, y = networks.batch("mlp", 3)
    box = linf_box(x, 0.1)
    lower = BoundEngine(model, x).margins(box, y, relaxation(method)).detach()
    with torch.no_grad():
        for point in points(model, x, y, box):
            assert_below(lower, margins_at(model, point, y))
    if shift < 0:  # nothing passes the first layer, so the network is constant
        assert torch.allclose(lower, margins_at(model, x, y), atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", BATCHNORM)
def test_train_mode_batchnorm_uses_the_clean_batch(name: str, method: str) -> None:
    model = networks.build(name).train()
    x, y = networks.batch(name, 6)
    bound_engine = BoundEngine(model, x)
    logits, statistics = bound_engine.forward(x)
    box = linf_box(x, 0.05)
    lower = bound_engine.margins(box, y, relaxation(method), statistics=statistics).detach()
    with torch.no_grad(), applied_statistics(model, statistics):
        assert torch.allclose(model(x), logits, atol=1e-5)
        for point in points(model, x, y, box):
            assert_below(lower, margins_at(model, point, y))
    half = bound_engine.margins(box[:3], y[:3], relaxation(method), statistics=statistics).detach()
    assert torch.allclose(half, lower[:3], atol=1e-5)
    model.eval()
    running = bound_engine.margins(linf_box(x, 0.0), y, relaxation(method))
    assert torch.allclose(running, margins_at(model, x, y), atol=1e-5)


def test_train_mode_without_statistics_takes_the_centres_and_moves_nothing() -> None:
    model = networks.build("batchnorm").train()
    x, y = networks.batch("batchnorm", 6)
    bound_engine = BoundEngine(model, x)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    box = linf_box(x, 0.1)
    lower = bound_engine.margins(box, y, relaxation("crown"))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    _, statistics = bound_engine.forward(box.center)
    assert torch.allclose(lower, bound_engine.margins(box, y, relaxation("crown"), statistics=statistics), atol=1e-6)


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown-plain"])
@pytest.mark.parametrize("name", ["mlp", "conv", "batchnorm", "avgpool", "normalize", "residual", "sum-out"])
def test_agreement_with_a_plain_call(name: str, method: str) -> None:
    lirpa = load_lirpa()
    model = networks.build(name)
    x, y = networks.batch(name, 4, seed=3)
    box = linf_box(x, 0.1)
    mode = "matrix" if name == "avgpool" else "patches"
    plain = lirpa.bounded_module(model, x, bound_opts={**lirpa.bound_options(), "conv_mode": mode})
    name_there = method.removesuffix("-plain")
    call = {"C": margin_spec(y, 3), "method": name_there, "bound_upper": False}
    expected = plain.compute_bounds(x=(bounded_input(box),), **call)[0]
    found = engine(name).margins(box, y, relaxation(method))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["conv", "batchnorm", "standardized"])
def test_results_do_not_depend_on_earlier_calls(name: str) -> None:
    """Every method first on an engine of its own, then in several orders on one engine."""
    x, y = networks.batch(name, 4, seed=4)
    fresh = {}
    for method in METHODS:
        model = networks.build(name)
        fresh[method] = BoundEngine(model, x).margins(linf_box(x, 0.1), y, relaxation(method)).detach()
    model = networks.build(name)
    shared = BoundEngine(model, x)
    for method in [*reversed(METHODS), *METHODS]:
        model.train()
        shared.margins(linf_box(x[:2], 0.3), y[:2], relaxation(method))
        model.eval()
        found = shared.margins(linf_box(x, 0.1), y, relaxation(method)).detach()
        assert torch.allclose(found, fresh[method], rtol=1e-5, atol=1e-5), method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["standardized", "batchnorm", "normalize"])
def test_changed_tensors_are_seen(name: str, method: str) -> None:
    """In place, by load_state_dict, and as new Parameter objects; buffers too."""
    model = networks.build(name)
    x, y = networks.batch(name, 3)
    bound_engine = BoundEngine(model, x)
    bound_engine.margins(linf_box(x, 0.1), y, relaxation(method))

    def assert_current() -> None:
        found = bound_engine.margins(linf_box(x, 0.0), y, relaxation(method))
        assert torch.allclose(found, margins_at(model, x, y), atol=1e-4)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    assert_current()
    state = {k: v * 0.8 + 0.01 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    assert_current()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach() * 1.1)
    assert_current()
    model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    assert_current()


def test_engine_of_a_normalized_subclass_bounds_what_forward_does() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * super().forward(x)

    model = Doubled(*networks.build("normalize"))
    x, y = networks.batch("normalize", 2)
    bound_engine = BoundEngine(model, x)
    assert bound_engine.normalize is None
    for method in SMOOTH:
        found = bound_engine.margins(linf_box(x, 0.0), y, relaxation(method))
        assert torch.allclose(found, margins_at(model, x, y), atol=1e-5)


@pytest.mark.parametrize("layer", [nn.MaxPool2d(2), nn.LeakyReLU(0.1), nn.Sigmoid(), nn.Tanh()])
@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown"])
def test_other_activations_that_auto_lirpa_bounds(layer: nn.Module, method: str) -> None:
    torch.manual_seed(0)
    size = 36 if isinstance(layer, nn.MaxPool2d) else 144
    model = nn.Sequential(networks.conv(), layer, nn.Flatten(), nn.Linear(size, 3)).eval()
    x, y = networks.batch("conv", 3)
    bound_engine = BoundEngine(model, x)
    for eps in (0.02, 0.4):
        box = linf_box(x, eps)
        lower = bound_engine.margins(box, y, relaxation(method)).detach()
        with torch.no_grad():
            for point in points(model, x, y, box):
                assert_below(lower, margins_at(model, point, y))


@pytest.mark.parametrize("eps", [0.7, 0.1, 8 / 255])
def test_the_box_holds_every_point_of_the_ball(eps: float) -> None:
    """Also where x − eps cancels: there eps rounded to float32 would be visibly another radius."""
    x = torch.tensor([[0.0]]) + torch.tensor(eps).nextafter(torch.ones(()))
    for _ in range(20):
        box, exact = linf_box(x, eps), float(x) - eps
        inside = torch.tensor(max(exact, 0.0), dtype=torch.float64).float()
        inside = inside if float(inside) >= exact else inside.nextafter(torch.ones(()))
        assert float(box.lower) <= float(inside)
        x = x.nextafter(torch.ones(()))


def test_boxes_around_what_is_no_pixel_are_refused() -> None:
    """Cut at the pixels' range they would not contain the point."""
    with pytest.raises(DataError, match=r"expected pixels in \[0, 1\], got -2…3"):
        linf_box(torch.tensor([[3.0, -2.0]]), 0.1)
    box = linf_box(torch.tensor([[3.0, -2.0]]), 0.1, low=-10.0, high=10.0)
    assert box.lower.tolist()[0] == pytest.approx([2.9, -2.1]) and box.upper.tolist()[0] == pytest.approx([3.1, -1.9])

"""The table of operations: every row bounded soundly, everything else refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from gls_lirpa.base.boxes import Box, linf_box
from gls_lirpa.base.normalize import Normalize
from gls_lirpa.certification import certify
from gls_lirpa.doctor.operator_cases import CASES, Function, random_network
from gls_lirpa.doctor.selftest import Comparison, check_network
from gls_lirpa.engine import operators
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.engine.graph import perturbed_nodes
from gls_lirpa.engine.operators import OPERATORS, check_operations
from gls_lirpa.engine.wrap import bounded_input
from gls_lirpa.errors import EngineError, UnsupportedLayerError
from gls_lirpa.relaxations import RELAXATIONS
from tests.helpers.bounding import margins_at, relaxation

METHODS = RELAXATIONS.names()
SEEDS = {"AvgPool2d": range(8), "LeakyReLU": range(8), "MaxPool2d": range(8)}


def run_case(name: str, method: str, seed: int, dtype: torch.dtype = torch.float32) -> Comparison:
    """One random network of a case, bounded over boxes of three radii."""
    case = CASES[name]
    return check_network(case.layer, case.image, [method], seed, samples=32, dtype=dtype)[method]


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_bounded_soundly_or_refused_where_it_says_so(name: str) -> None:
    case = CASES[name]
    for method in METHODS:
        outcomes = [run_case(name, method, seed) for seed in SEEDS.get(name, range(2))]
        assert sum(outcome.violations for outcome in outcomes) == 0, method
        refusals = [outcome.refusal for outcome in outcomes]
        if method in case.bounded:
            assert not any(refusals), (method, refusals)
        elif method in case.optional:
            assert not all(refusals) and any(refusals), (method, refusals)
        else:
            assert all(refusals), method


@pytest.mark.parametrize("name", ["Conv2d", "AvgPool2d", "MaxPool2d", "clamp, abs, max", "Sigmoid", "residual"])
def test_float64_networks_in_every_relaxation(name: str) -> None:
    case = CASES[name]
    for method in (*case.bounded, *case.optional):
        outcomes = [run_case(name, method, seed, dtype=torch.float64) for seed in (1, 3)]
        assert any(outcome.points for outcome in outcomes), method
        assert not any(outcome.violations for outcome in outcomes), method
    assert torch.get_default_dtype() == torch.float32


def test_the_cases_meet_every_row_of_the_table_and_nothing_else() -> None:
    met = set()
    for name, case in CASES.items():
        for seed in range(2):
            model, shape = random_network(case.layer, seed, image=case.image)
            try:
                engine = BoundEngine(model, torch.rand(1, *shape))
            except UnsupportedLayerError:
                continue
            bounded = engine._modules._table.bounded
            met |= {type(node).__name__ for node, _ in perturbed_nodes(bounded) if node.name != bounded.input_name[0]}
        assert met <= set(OPERATORS), name
    # Later versions of auto_LiRPA make products of quotients by constants.
    assert set(OPERATORS) - met <= ({"BoundDiv"} if load_lirpa().split_nodes else set())


def pooled() -> nn.Sequential:
    """At 0.75 everywhere class 0; at 0.875 everywhere class 1."""
    first, last = nn.Linear(16, 1), nn.Linear(1, 2)
    with torch.no_grad():
        first.weight.fill_(1.0)
        first.bias.fill_(-13.75)
        last.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        last.bias.copy_(torch.tensor([0.1, 0.0]))
    return nn.Sequential(nn.AvgPool2d(2, stride=1), nn.Flatten(), first, nn.ReLU(), last)


def test_overlapping_average_pooling_is_never_verified_wrongly() -> None:
    model, x, y = pooled(), torch.full((1, 1, 5, 5), 0.75), torch.tensor([0])
    assert model(x).argmax() == 0 and model(x + 0.125).argmax() == 1
    # 16 · 0.875 − 13.75 = 0.25, so the lowest margin is 0.1 − 2 · 0.25.
    engine = BoundEngine(model, x)
    for method in METHODS:
        assert engine.margins(linf_box(x, 0.125), y, relaxation(method)).item() <= -0.4 + 1e-5, method
    (record,) = certify(model, x, y, eps=0.125)
    assert record.verdict == "falsified"


@pytest.mark.parametrize("method", METHODS)
def test_bounds_of_affine_operations_alone_are_exact_where_nothing_is_relaxed(method: str) -> None:
    """min over a box of w · pool(x) + b is at a corner: enumerated over all 2⁹ of them."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 9).reshape(-1, 1, 3, 3)
    for layer in (
        nn.AvgPool2d(2, 1),
        nn.AvgPool2d(2, 2, 1, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d(3, 1, 1, divisor_override=4),
        nn.AdaptiveAvgPool2d(2),
        nn.ReflectionPad2d((1, 0, 2, 1)),
    ):
        features = layer(corners[:1]).numel()
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(features, 3)).eval()
        with torch.no_grad():
            model[2].weight.copy_(torch.randn(3, features, generator=generator))
            exact = model(corners).amin(0)
            box = Box(torch.zeros(1, 1, 3, 3), torch.ones(1, 1, 3, 3))
            found = BoundEngine(model, box.lower).bounds(box, torch.eye(3).unsqueeze(0), relaxation(method)).lower[0]
        assert (found <= exact + 1e-5).all(), layer
        if method != "ibp":  # intervals forget that pooled values share pixels
            assert torch.allclose(found, exact, atol=1e-5), layer


def after(layer: nn.Module) -> nn.Module:
    size = nn.Sequential(layer, nn.Flatten())(torch.zeros(1, 2, 6, 6)).shape[1]
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(size, 3)).eval()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.MaxPool2d(2, dilation=2), r"layer '0' \(MaxPool2d\): max_pool2d with dilation 2"),
        (nn.MaxPool2d(4, ceil_mode=True), r"layer '0' \(MaxPool2d\): max_pool2d.*ceil_mode=True"),
        (nn.ConvTranspose2d(2, 2, 2, groups=2), r"layer '0' \(ConvTranspose2d\): conv_transpose2d with groups 2"),
        (nn.GELU(), r"'0' \(GELU\)"),
        (nn.LPPool2d(2, 2), r"'0' \(LPPool2d\)"),
    ],
)
def test_what_has_no_row_is_refused_by_name(layer: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=message) as caught:
        BoundEngine(after(layer), torch.rand(1, 2, 6, 6))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layer", [nn.MaxPool2d(2, 1), nn.MaxPool2d(2, 2, 1), nn.MaxPool2d(2, 2, (0, 1))])
def test_attributes_are_refused_where_a_relaxation_cannot_have_them(layer: nn.Module) -> None:
    x, y = torch.rand(1, 2, 6, 6), torch.tensor([0])
    engine = BoundEngine(after(layer), x)
    assert engine.margins(linf_box(x, 0.1), y, relaxation("ibp")).isfinite().all()
    for method in ("crown-ibp", "crown"):
        with pytest.raises(UnsupportedLayerError, match=r"MaxPool with (stride|padding) .* \(accepted: "):
            engine.margins(linf_box(x, 0.1), y, relaxation(method))


@pytest.mark.skipif(load_lirpa().split_nodes, reason="this auto_LiRPA makes products of quotients by constants")
def test_divisors_below_zero_are_refused_by_intervals() -> None:
    class Divided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / -2.0

    x, y = torch.rand(1, 2, 6, 6), torch.tensor([0])
    model = after(Divided())
    engine = BoundEngine(model, x, route="lirpa")
    with pytest.raises(UnsupportedLayerError, match=r"smallest divisor -2.0 \(accepted: above 0"):
        engine.margins(linf_box(x, 0.1), y, relaxation("ibp"))
    lower = BoundEngine(model, x).margins(linf_box(x, 0.0), y, relaxation("ibp"))
    assert torch.allclose(lower, margins_at(model, x, y), atol=1e-5)


def test_tracing_warns_of_nothing() -> None:
    model, shape = random_network(CASES["AvgPool2d"].layer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        BoundEngine(model, torch.rand(1, *shape))


@pytest.mark.parametrize("change", ["sign", "mixed"])
def test_a_normalisation_that_turns_boxes_around_is_a_layer_like_others(change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Normalize((0.5, 0.4), (0.2, 0.3)), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        if change == "sign":
            model[0].weight.neg_()
        else:
            model[0].weight[0, 1] = -3.0
    x, y = torch.rand(2, 2, 2, 2), torch.tensor([0, 1])
    box, engine = linf_box(x, 0.3), BoundEngine(model, x)
    points = box.lower + (box.upper - box.lower) * torch.rand(500, *x.shape).round()
    for method in METHODS:
        lower = engine.margins(box, y, relaxation(method))
        assert all(bool((lower <= margins_at(model, point, y) + 1e-4).all()) for point in points), method


def test_the_table_alone_refuses_what_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only because other code does not know the operation either."""
    model, shape = random_network(CASES["Linear"].layer, 0, image=False)
    bounded = BoundEngine(model, torch.rand(1, *shape))._modules._table.bounded
    check_operations(bounded)
    monkeypatch.setattr(operators, "OPERATORS", {k: v for k, v in OPERATORS.items() if k != "BoundRelu"})
    with pytest.raises(UnsupportedLayerError, match="operation onnx::Relu is not supported"):
        check_operations(bounded)


def test_one_tensor_as_both_ends_of_a_box_is_no_constant() -> None:
    x = torch.rand(2, 4)
    bounded = bounded_input(Box(x, x))
    assert bounded.ptb.x_L is not bounded.ptb.x_U and torch.equal(bounded.ptb.x_L, bounded.ptb.x_U)


@pytest.mark.parametrize("seed", [12, 13, 14])
def test_strips_of_images_in_plain_crown(seed: int) -> None:
    """auto_LiRPA 0.7 excluded points of these networks where it bounded by patches."""
    layer = Function(lambda x: (x[:, :1] + torch.relu(x[:, :, :1] - 0.4)).flatten(1))
    assert check_network(lambda r, s: layer, True, ["crown-plain"], seed)["crown-plain"].violations == 0


@pytest.mark.parametrize("size", [2, 30])
def test_a_network_that_looks_at_the_size_of_its_batch_is_refused(size: int) -> None:
    linear = nn.Linear(4, 3)
    model = Function(lambda x: linear(x) if len(x) != size and len(x) < 30 else -linear(x))
    x, y = torch.rand(1, 4), torch.tensor([0])
    with pytest.raises(EngineError, match=f"batch of {2 if size == 2 else 65} differs"):
        BoundEngine(model, x).margins(linf_box(x, 0.1), y, relaxation("ibp"))

"""Rewritten networks are the same function with the same weights; frozen values are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.doctor.operator_cases import Function
from gls_lirpa.engine import modules, rewrite
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.proof import Proof, UnprovenError, proof_points
from gls_lirpa.engine.rewrite import Rewriting, rewritten
from gls_lirpa.errors import UnsupportedLayerError
from tests.helpers.bounding import SMOOTH, margins_at, relaxation

IMAGE = (2, 5, 6)


def same(apply: Callable[[Tensor], Tensor], x: Tensor) -> None:
    expected = apply(x)
    with Rewriting(x):
        found = apply(x)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)


def test_average_pooling_with_every_option() -> None:
    x = torch.randn(3, *IMAGE, dtype=torch.float64)
    options = itertools.product([2, 3, (2, 3)], [None, 1, 2, (1, 3)], [0, 1], [False, True], [False, True], [None, 5])
    for kernel, stride, padding, ceil_mode, counted, divisor in options:
        same(lambda z, o=(kernel, stride, padding, ceil_mode, counted, divisor): F.avg_pool2d(z, *o), x)


@pytest.mark.parametrize("size", [1, 2, 3, 5, (None, 3), (5, 6), (2, 4)])
def test_adaptive_average_pooling(size: object) -> None:
    same(lambda z: F.adaptive_avg_pool2d(z, size), torch.randn(3, *IMAGE, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", "valid", 1, (2, 1)])
@pytest.mark.parametrize("kernel", [2, 3, (3, 2)])
def test_padding_of_convolutions(mode: str, padding: object, kernel: object) -> None:
    layer = nn.Conv2d(2, 3, kernel, padding=padding, padding_mode=mode).double()
    same(layer, torch.randn(3, *IMAGE, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"stride": 2, "padding": 1, "output_padding": 1}])
def test_transposed_convolutions(options: dict[str, int]) -> None:
    same(nn.ConvTranspose2d(2, 3, 3, **options).double(), torch.randn(3, *IMAGE, dtype=torch.float64))


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: F.pad(x, (1, 2, 0, 3)),
    lambda x: F.pad(x, (-1, 2, 1, -2), value=0.7),
    lambda x: F.pad(x, (1, 0, 0, 0, 1, 1)),
    lambda x: x.permute(0, 3, 1, 2),
    lambda x: x.transpose(-1, -2),
    lambda x: x[:, 1],
    lambda x: x[:, [1, 0, 1]],
    lambda x: x[:, :, 1:4:2, 2:],
    lambda x: x[..., None, 2],
    lambda x: x.flip(1),
    lambda x: torch.cat([x, 2 * x, torch.ones(3, 1, 5, 6, dtype=x.dtype)], 1),
    lambda x: torch.cat([x.flatten(1), x.mean((2, 3))], dim=1),
    lambda x: torch.stack([x, -x], dim=2),
    lambda x: torch.cat(x.split([1, 1], 1)[::-1], 1),
    lambda x: x.mean((2, 3)),
    lambda x: x.mean(dim=(2, 3), keepdim=True),
    lambda x: x.mean(1),
    lambda x: x.sum((1, 3)),
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: x.view(x.size(0), -1).unsqueeze(1),
    lambda x: F.leaky_relu(x, -1.7),
    lambda x: F.leaky_relu(x, 2.5),
    lambda x: F.relu6(4 * x),
    lambda x: F.hardtanh(x, -0.3, 0.9),
    lambda x: x.clamp(min=-0.1),
    lambda x: torch.clamp(x, max=0.2),
    lambda x: x.clip(0.3, -0.3),
    lambda x: x.abs(),
    lambda x: torch.maximum(x, 0.5 - x),
    lambda x: torch.min(x, x * x.new_tensor(0.5)),
    lambda x: F.hardsigmoid(5 * x),
    lambda x: F.dropout(x, 0.5, False),
)


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_functions_of_a_custom_forward(number: int) -> None:
    torch.manual_seed(number)
    same(FUNCTIONS[number], torch.randn(3, *IMAGE, dtype=torch.float64))


class Mixed(nn.Module):
    """A forward pass with much that needs rewriting, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect")
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(4 + 4 * 4 * 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm(self.conv(x)), 0.2)
        assert int(y.shape[1]) == 4
        pooled = F.avg_pool2d(y, 2, stride=1) * self.scale
        return self.last(torch.cat([y.mean((2, 3)), pooled.flatten(1)], 1))


def test_gradients_reach_the_networks_own_weights() -> None:
    torch.manual_seed(0)
    model, x, y = Mixed().eval(), torch.rand(3, *IMAGE), torch.tensor([0, 1, 2])
    engine = BoundEngine(model, x)
    for method in SMOOTH:
        found = torch.autograd.grad(engine.margins(linf_box(x, 0.0), y, relaxation(method)).sum(), model.parameters())
        expected = torch.autograd.grad(margins_at(model, x, y).sum(), model.parameters())
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4), method


@pytest.mark.parametrize("method", SMOOTH)
def test_changed_weights_and_statistics_are_seen(method: str) -> None:
    torch.manual_seed(0)
    model, x, y = Mixed().eval(), torch.rand(3, *IMAGE), torch.tensor([0, 1, 2])
    engine = BoundEngine(model, x)
    engine.margins(linf_box(x, 0.1), y, relaxation(method))
    model.scale = nn.Parameter(torch.tensor(-0.5))
    with torch.no_grad():
        model.conv.weight.mul_(1.3)
        model.norm.running_mean.add_(0.2)
    assert torch.allclose(engine.margins(linf_box(x, 0.0), y, relaxation(method)), margins_at(model, x, y), atol=1e-4)
    model.train()
    logits, statistics = engine.forward(x)
    found = engine.margins(linf_box(x, 0.0), y, relaxation(method), statistics=statistics)
    assert torch.allclose(found, (margin_spec(y, 3) @ logits.unsqueeze(-1)).squeeze(-1), atol=1e-4)


def test_the_network_is_not_modified() -> None:
    model, x = Mixed(), torch.rand(2, *IMAGE)
    before, state = set(model.__dict__), {k: v.clone() for k, v in model.state_dict().items()}
    BoundEngine(model, x)
    assert set(model.__dict__) == before and model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert rewritten(model).conv is model.conv


FROZEN: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x * x.mean().item(),
    "float": lambda x: x * float(x[0, 0]),
    "bool": lambda x: x if x.sum() > 2 else -x,
    "tolist": lambda x: x * x.flatten().tolist()[0],
    "numpy": lambda x: x + torch.from_numpy(x.detach().numpy()),
    ".data": lambda x: x + 2 * x.data,
}


@pytest.mark.parametrize("name", FROZEN)
def test_values_read_in_python_are_refused_by_layer(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), Function(FROZEN[name]), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(UnsupportedLayerError, match=r"layer '1' \(Function\) reads values.*" + name):
        BoundEngine(model, torch.rand(2, 4))


@pytest.mark.parametrize("name", FROZEN)
def test_the_proof_finds_frozen_values_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal at the source the trace is made, and found to be another function."""
    monkeypatch.setattr(rewrite, "_READS", {})
    model = nn.Sequential(nn.Linear(4, 5), Function(FROZEN[name]), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(UnsupportedLayerError, match=r"another function.*'1' \(Function\)"):
        BoundEngine(model, torch.rand(2, 4))


@pytest.mark.parametrize("function", [lambda x: x - x.mean(0), lambda x: x.flip(0), lambda x: x / x.norm()])
def test_samples_that_depend_on_the_batch_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), Function(function), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(UnsupportedLayerError, match=r"one sample alone differs.*'1' \(Function\)"):
        BoundEngine(model, torch.rand(2, 4))


def test_networks_that_draw_numbers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 5), Function(lambda x: x * torch.rand(())), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(UnsupportedLayerError, match="another output for the same input"):
        BoundEngine(model, torch.rand(2, 4))


def test_a_trace_that_lost_something_is_unproven() -> None:
    """A node of the trace is altered as a lost attribute would alter it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)).eval()
    x = torch.rand(7, 1, 5, 5)
    points = proof_points(x[:1], lambda z: z)
    for attribute, value in (("eps", 0.5), ("padding", [1, 1])):
        wrapped = modules.BoundedNetwork(model, x, conv_mode="patches")
        assert Proof(model, points).check(wrapped, (7, 1, 3))
        for node in wrapped.bounded._modules.values():
            if hasattr(node, attribute) and "Bound" in type(node).__name__:
                setattr(node, attribute, value)
        with pytest.raises(UnprovenError):
            Proof(model, points).check(wrapped, (7, 1, 3))


def test_networks_that_are_not_finite_prove_nothing_and_bound_nothing() -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)), torch.rand(2, 4), torch.tensor([0, 1])
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    engine = BoundEngine(model, x)
    assert not engine._modules._proven
    assert not engine.margins(linf_box(x, 0.1), y, relaxation("crown")).isfinite().any()
    with torch.no_grad():
        model[0].weight[0, 0] = 0.3
    assert engine.margins(linf_box(x, 0.1), y, relaxation("crown")).isfinite().all()
    assert engine._modules._proven


def test_an_operation_too_large_for_a_matrix_is_refused() -> None:
    model = nn.Sequential(Function(lambda x: x.permute(0, 2, 3, 1)), nn.Flatten(), nn.Linear(3 * 64 * 64, 2))
    with pytest.raises(UnsupportedLayerError, match=r"layer '0' \(Function\): permute.*matrix"):
        BoundEngine(model, torch.rand(1, 3, 64, 64))

"""Gradients of bounds, chunks, and what a call leaves behind: nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.losses.terms import margin_cross_entropy
from gls_lirpa.relaxations import RELAXATIONS
from tests.helpers import networks
from tests.helpers.bounding import SMOOTH, margins_at, relaxation

METHODS = RELAXATIONS.names()


def directional_error(model: nn.Module, function: Callable[[], Tensor]) -> float:
    """|analytic − central difference| of the derivative along a random direction, relative."""
    generator = torch.Generator().manual_seed(0)
    weights = [p for p in model.parameters() if p.requires_grad]
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]
    gradients = torch.autograd.grad(function(), weights, allow_unused=True)
    analytic = sum((g * d).sum().item() for g, d in zip(gradients, directions, strict=True) if g is not None)
    values = []
    with torch.no_grad():
        for step in (1e-6, -2e-6, 1e-6):
            for weight, direction in zip(weights, directions, strict=True):
                weight.add_(direction, alpha=step)
            values.append(function().item())
    numeric = (values[0] - values[1]) / 2e-6
    return abs(analytic - numeric) / (1 + abs(numeric))


@pytest.mark.parametrize("method", SMOOTH)
@pytest.mark.parametrize("name", ["mlp", "conv", "batchnorm", "residual", "normalize"])
def test_gradient_in_the_weights_in_float64(name: str, method: str) -> None:
    model = networks.build(name).double()
    x, y = networks.batch(name, 3)
    x = x.double()
    engine, box = BoundEngine(model, x), linf_box(x, 0.1)
    assert engine.margins(box, y, relaxation(method)).dtype == torch.float64
    expected = margins_at(model, x, y)
    assert torch.allclose(engine.margins(linf_box(x, 0.0), y, relaxation(method)), expected, atol=1e-10)
    scale = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)
    error = directional_error(model, lambda: (engine.margins(box, y, relaxation(method)) * scale).sum())
    assert error < 1e-5


@pytest.mark.parametrize("method", SMOOTH)
def test_gradient_through_batch_statistics(method: str) -> None:
    model = networks.build("residual-bn").double().train()
    x, y = networks.batch("residual-bn", 5)
    x = x.double()
    engine, box = BoundEngine(model, x), linf_box(x, 0.03)

    def loss() -> Tensor:
        _, statistics = engine.forward(x)
        return engine.mean_loss(box, y, relaxation(method), margin_cross_entropy, statistics=statistics)

    assert directional_error(model, loss) < 1e-5
    engine._chunk_mib = 0
    assert directional_error(model, loss) < 1e-5


def gradients_of(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    (0.5 * loss).backward()
    (0.25 * loss.detach() * sum(p.sum() for p in model.parameters())).backward()  # accumulated on top
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["batchnorm", "residual-bn", "normalize"])
@pytest.mark.parametrize("method", ["hbox", "crown-ibp", "crown"])
def test_chunks_have_the_same_loss_and_gradient(name: str, method: str, training: bool) -> None:
    model = networks.build(name).train(training)
    x, y = networks.batch(name, 5)
    box = linf_box(x, 0.05)
    results = []
    for chunk_mib in (None, 0):
        engine = BoundEngine(model, x, chunk_mib=chunk_mib)
        _, statistics = engine.forward(x)
        size = engine.chunk_size(relaxation(method), box, margin_spec(y, 3), statistics)
        assert (size == 1) == (chunk_mib == 0)
        loss = engine.mean_loss(box, y, relaxation(method), margin_cross_entropy, statistics=statistics)
        results.append((loss.item(), gradients_of(model, loss)))
    (whole, whole_gradients), (chunked, chunked_gradients) = results
    assert chunked == pytest.approx(whole, rel=1e-5)
    for a, b in zip(whole_gradients, chunked_gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * (1 + a.abs().max().item()))


def test_chunks_carry_the_gradient_in_the_box() -> None:
    model = networks.build("mlp")
    x, y = networks.batch("mlp", 4)
    found = []
    for chunk_mib in (None, 0):
        lower, upper = (x - 0.1).requires_grad_(), (x + 0.1).requires_grad_()
        engine = BoundEngine(model, x, chunk_mib=chunk_mib)
        engine.mean_loss(Box(lower, upper), y, relaxation("crown"), margin_cross_entropy).backward()
        found.append((lower.grad, upper.grad))
    assert found[0][0].abs().max() > 1e-3
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_weights_flags_and_random_state_are_untouched(method: str, training: bool, grad: bool) -> None:
    model = networks.build("batchnorm").train(training)
    model[0].weight.requires_grad_(False)
    x, y = networks.batch("batchnorm", 4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0) if parameter.requires_grad else None
    flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        engine = BoundEngine(model, x)
        for size in (4, 2):
            lower = engine.margins(linf_box(x[:size], 0.1), y[:size], relaxation(method))
    assert lower.requires_grad == (grad and relaxation(method).differentiable)
    assert torch.equal(random_state, torch.get_rng_state())
    assert flags == [(p.requires_grad, p.grad is None) for p in model.parameters()]
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all((p.grad == 7.0).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("method", SMOOTH)
def test_frozen_weights_get_no_gradient_and_no_graph(method: str) -> None:
    model = networks.build("conv")
    x, y = networks.batch("conv", 3)
    engine, box = BoundEngine(model, x), linf_box(x, 0.1)
    model[0].weight.requires_grad_(False)
    engine.margins(box, y, relaxation(method)).sum().backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not engine.margins(box, y, relaxation(method)).requires_grad


class _Held:
    """A saved tensor whose life can be watched."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Retained:
    """Bytes that autograd holds, now and at most."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[_Held] = weakref.WeakSet()
        self.most = 0

    def now(self) -> int:
        gc.collect()
        return self._count()

    def _count(self) -> int:
        storages = [held.tensor.untyped_storage() for held in self._alive]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor.detach())
        self._alive.add(held)
        self.most = max(self.most, self._count())
        return held


@pytest.mark.parametrize("method", SMOOTH)
@pytest.mark.parametrize("chunk_mib", [None, 0])
def test_no_graph_outlives_its_result(method: str, chunk_mib: int | None) -> None:
    model = networks.build("batchnorm").train()
    x, y = networks.batch("batchnorm", 4)
    engine = BoundEngine(model, x, chunk_mib=chunk_mib)
    retained = Retained()
    with torch.autograd.graph.saved_tensors_hooks(retained.pack, lambda held: held.tensor):
        logits, statistics = engine.forward(x)
        loss = engine.mean_loss(linf_box(x, 0.1), y, relaxation(method), margin_cross_entropy, statistics=statistics)
        assert retained.now() > 0
        loss.backward()
        del loss, logits, statistics
        assert retained.now() == 0


def test_chunks_hold_one_graph_at_a_time() -> None:
    model = networks.build("conv")
    x, y = networks.batch("conv", 6)
    peaks = []
    for size, chunk_mib in ((2, 0), (6, None), (6, 0)):
        engine = BoundEngine(model, x, chunk_mib=chunk_mib)
        box = linf_box(x[:size], 0.1)
        engine.mean_loss(box, y[:size], relaxation("crown"), margin_cross_entropy)
        retained = Retained()
        with torch.autograd.graph.saved_tensors_hooks(retained.pack, lambda held: held.tensor):
            engine.mean_loss(box, y[:size], relaxation("crown"), margin_cross_entropy).backward()
        peaks.append(retained.most)
    two, six, chunked = peaks
    assert six > 2 * two
    assert chunked < 1.5 * two

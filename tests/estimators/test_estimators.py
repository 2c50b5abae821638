"""Estimates against closed forms, and the contract that every wrapper keeps with an ordinary loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.errors import GLSError
from gls_lirpa.estimators import PGPE, RGS, SAM
from tests.helpers.estimating import Point, cubic, gradient, network

# A deviation of 4.5 standard errors has probability 7e-6 per coordinate; below, the standard error is
# always required to be a small part of the effect under test, so that a wrong formula cannot hide in it.
Z = 4.5


def draws(estimator: Callable[..., Tensor], leaves: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Mean and standard error of the gradients delivered to the leaves, and of the values."""
    rows = []
    for _ in range(count):
        for leaf in leaves:
            leaf.grad = None
        value = estimator()
        value.backward()
        rows.append(
            torch.cat([*(leaf.grad.flatten() for leaf in leaves if leaf.grad is not None), value.detach()[None]])
        )
    stacked = torch.stack(rows)
    return stacked.mean(0), stacked.std(0) / math.sqrt(count)


def agree(estimate: tuple[Tensor, Tensor], truth: Tensor, resolution: float) -> None:
    mean, error = estimate
    assert (error < resolution).all(), f"the test has no power: standard errors {error.tolist()}"
    assert ((mean - truth).abs() <= Z * error + 1e-9).all(), f"{mean.tolist()} vs {truth.tolist()} ± {error.tolist()}"


A = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 3.0]], dtype=torch.float64)
B = torch.tensor([0.3, -1.0, 0.0], dtype=torch.float64)


def quadratic(point: Point) -> Callable[[], Tensor]:
    return lambda: 0.5 * point.w @ A @ point.w + B @ point.w


def jump(point: Point) -> Callable[[], Tensor]:
    return lambda: (point.w > 0).double().sum() + 0 * point.w.sum()


MAKE = {
    "rgs": (lambda loss, point, sigma: RGS(loss, point, sigma=sigma, samples=8, seed=1), 150),
    "rgs-antithetic": (
        lambda loss, point, sigma: RGS(loss, point, sigma=sigma, samples=8, antithetic=True, seed=1),
        150,
    ),
    "pgpe": (lambda loss, point, sigma: PGPE(loss, point, sigma=sigma, population=64, seed=1), 100),
    "pgpe-smallest": (lambda loss, point, sigma: PGPE(loss, point, sigma=sigma, population=4, seed=1), 1000),
}


@pytest.mark.parametrize("name", MAKE)
def test_quadratic(name: str) -> None:
    sigma = 0.4
    point = Point([1.0, -0.5, 0.2])
    w = point.w.detach()
    value = 0.5 * w @ A @ w + B @ w + 0.5 * sigma**2 * A.trace()  # the smoothed loss
    truth = torch.cat([A @ w + B, value[None]])
    make, count = MAKE[name]
    agree(draws(make(quadratic(point), point, sigma), [point.w], count), truth, 0.15)


@pytest.mark.parametrize("name", MAKE)
def test_cubic(name: str) -> None:
    sigma = 0.5
    point = Point([0.2, -0.4])
    w = point.w.detach()
    value = (w.pow(3) + 3 * w * sigma**2).sum()
    truth = torch.cat([3 * w**2 + 3 * sigma**2, value[None]])
    # Plain backpropagation would miss the 3σ² = 0.75.
    make, count = MAKE[name]
    agree(draws(make(cubic(point), point, sigma), [point.w], count), truth, 0.1)


@pytest.mark.parametrize("population", [4, 64])
def test_sigma_gradient(population: int) -> None:
    """∂L_σ/∂σ_j is σ_j A_jj on the quadratic and 6 w_j σ_j on the cubic; a factor (n−1)/n would be 1/2 at n = 2."""
    for loss, truth in (
        (quadratic, lambda w, sigma: sigma * A.diagonal()),
        (cubic, lambda w, sigma: 6 * w * sigma),
    ):
        point = Point([0.6, -0.5, 0.4])
        estimator = PGPE(loss(point), point, sigma=0.3, population=population, seed=2)
        mean, error = draws(estimator, [estimator.sigma], 2000 if population == 4 else 150)
        agree((mean[:-1], error[:-1]), truth(point.w.detach(), 0.3), 0.08)


def test_step_function() -> None:
    """1[x > 0]: the Gaussian density for PGPE, exactly nothing for RGS and SAM, as the paper says."""
    x, sigma = 0.1, 0.2
    density = math.exp(-0.5 * (x / sigma) ** 2) / math.sqrt(2 * math.pi) / sigma
    point = Point([x])
    pgpe = PGPE(jump(point), point, sigma=sigma, population=64, seed=3)
    probability = 0.5 * (1 + math.erf(x / sigma / math.sqrt(2)))
    truth = torch.tensor([density, -density * x / sigma, probability], dtype=torch.float64)
    agree(draws(pgpe, [point.w, pgpe.sigma], 200), truth, 0.05)
    for other in (RGS(jump(point), point, sigma=sigma, samples=8), SAM(jump(point), point, rho=0.05)):
        mean, error = draws(other, [point.w], 20)
        assert mean[0] == 0 and error[0] == 0


def test_antithetic_pairs_cancel_what_is_odd() -> None:
    """±ε leave no noise in the gradient of a quadratic; independent ε do."""
    point = Point([1.0, -0.5, 0.2])
    for antithetic in (True, False):
        point.w.grad = None
        RGS(quadratic(point), point, sigma=0.4, samples=2, antithetic=antithetic)().backward()
        assert point.w.grad is not None
        exact = torch.allclose(point.w.grad, A @ point.w.detach() + B, atol=1e-12, rtol=0)
        assert exact is antithetic


def plain(net: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


@pytest.mark.parametrize("options", [{}, {"split": True}, {"antithetic": True}, {"samples": 3, "split": True}])
def test_rgs_without_noise_is_backpropagation(options: dict[str, bool]) -> None:
    net, loss, x, y = network()
    expected = plain(net, loss(x, y))
    for sigma, tolerance in ((0.0, 1e-6), (1e-6, 1e-4)):
        net.zero_grad()
        value = RGS(loss, net, sigma=sigma, **options)(x, y)
        value.backward()
        torch.testing.assert_close(gradient(net), expected, atol=tolerance, rtol=0)
        assert abs(value.item() - loss(x, y).item()) < tolerance


def test_split_has_the_same_mean() -> None:
    torch.manual_seed(0)
    x = torch.rand(5, dtype=torch.float64) + 1
    for split in (False, True):
        point = Point([0.5])
        loss = lambda x, point=point: (point.w * x).pow(3).mean()  # noqa: E731
        rgs = RGS(loss, point, sigma=0.5, split=split, samples=2, seed=4)
        truth = 3 * (0.25 + 0.25) * x.pow(3).mean()
        mean, error = draws(lambda rgs=rgs: rgs(x), [point.w], 800)
        assert error[0] < 0.1 * abs(truth) and abs(mean[0] - truth) < Z * error[0]
        assert rgs.stats["evaluations"] == 2


@pytest.mark.parametrize("split", [False, True])
def test_relative_sigma_is_each_layers_own(split: bool) -> None:
    """∇ Σ w³/3 = w²; at ±ε its mean is w² + ε², so E = w² + (σ·rms)², rms that of the layer's kernel, biases too."""
    net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1), nn.LayerNorm(1)).double()
    values = ([[3.0, 4.0]], [0.0], [[-0.1]], [0.7], [1.0], [0.0])
    for parameter, value in zip(net.parameters(), values, strict=True):
        parameter.data.copy_(torch.tensor(value))

    def loss(rows: Tensor) -> Tensor:
        return rows.mean() * torch.cat([p.flatten() for p in net.parameters()]).pow(3).sum() / 3

    rgs = RGS(loss, net, sigma=0.5, relative=True, antithetic=True, samples=4, split=split, seed=1)
    leaves = list(net.parameters())
    mean, error = draws(lambda: rgs(torch.ones(4, dtype=torch.float64)), leaves, 3000)
    scales = torch.tensor([12.5**0.5] * 3 + [0.1] * 2 + [0.5**0.5] * 2, dtype=torch.float64)
    truth = torch.cat([p.detach().flatten() for p in leaves]).square() + (0.5 * scales).square()
    assert (error[:-1] < 0.02 * (0.5 * scales).square()).all(), "the test has no power"
    assert ((mean[:-1] - truth).abs() <= Z * error[:-1]).all()
    assert rgs.stats["sigma"] == pytest.approx(0.5 * scales.mean().item())


def test_split_weighs_parts_by_size_and_cuts_per_sample_keywords() -> None:
    point = Point([1.0])
    seen = []

    def loss(x: Tensor, *, eps: Tensor, scale: Tensor) -> Tensor:
        seen.append((len(x), len(eps), scale.shape))
        return (point.w * x[:, 0, 0, 0] * eps).mean()

    x, eps, scale = torch.arange(3.0).double().view(3, 1, 1, 1), torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, 1, 1)
    RGS(loss, point, sigma=0.0, split=True)(x, eps=eps, scale=scale).backward()
    assert seen == [(1, 1, (3, 1, 1)), (2, 2, (3, 1, 1))]
    assert point.w.grad is not None and point.w.grad.item() == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 3)
    RGS(loss, point, sigma=0.0, split=True, samples=8)(x, eps=eps, scale=scale)  # fewer rows than parts
    assert [rows for rows, _, _ in seen[2:]] == [1, 1, 1]
    with pytest.raises(GLSError, match="needs a batch"):
        RGS(quadratic(point), point, sigma=0.1, split=True)()


def test_sam_is_its_two_line_definition() -> None:
    net, loss, x, y = network()
    rho = 0.05
    g = plain(net, loss(x, y))
    offset = 0
    moved = []
    for p in net.parameters():
        moved.append(p.detach() + rho * g[offset : offset + p.numel()].view_as(p) / g.norm())
        offset += p.numel()
    names = [name for name, _ in net.named_parameters()]
    leaves = [m.requires_grad_() for m in moved]
    there = torch.func.functional_call(net, dict(zip(names, leaves, strict=True)), (x,))
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(nn.functional.cross_entropy(there, y), leaves)])
    value = SAM(loss, net, rho=rho)(x, y)
    value.backward()
    torch.testing.assert_close(gradient(net), expected, atol=1e-6, rtol=1e-5)
    assert value.item() == pytest.approx(loss(x, y).item(), abs=1e-7)

"""Estimates against closed forms, and the contract that every wrapper keeps with an ordinary loop."""

from __future__ import annotations

import gc
import io
import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.errors import CheckpointError, ConfigError, GLSError
from gls_lirpa.estimators import ESTIMATORS, GRAD, PGPE, RGS, SAM, Estimator

# A deviation of 4.5 standard errors has probability 7e-6 per coordinate; below, the standard error is
# always required to be a small part of the effect under test, so that a wrong formula cannot hide in it.
Z = 4.5


class Point(nn.Module):
    """A vector of parameters to put a loss on."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=torch.float64))


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


def cubic(point: Point) -> Callable[[], Tensor]:
    return lambda: point.w.pow(3).sum()


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


def network() -> tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(7, 5), torch.randint(0, 3, (7,))
    return net, lambda x, y: nn.functional.cross_entropy(net(x), y), x, y


def gradient(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


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


def every(loss: Callable[..., Tensor], net: nn.Module, **options: object) -> dict[str, Estimator]:
    return {
        "grad": GRAD(loss, net),
        "rgs": RGS(loss, net, sigma=1e-2, **options),  # type: ignore[arg-type]
        "pgpe": PGPE(loss, net, sigma=1e-2, population=8, **options),  # type: ignore[arg-type]
        "sam": SAM(loss, net, rho=1e-2, **options),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_delivery_composes(name: str) -> None:
    """Accumulation, scaling, a regulariser built before or after, clipping: as for any scalar of autograd."""
    net, loss, x, y = network()
    estimator = every(loss, net)[name]
    state = estimator.state_dict()
    assert isinstance(estimator, Estimator)

    before = sum(p.square().sum() for p in net.parameters())
    value = estimator(x, y)
    assert all(p.grad is None for p in net.parameters())
    value.backward()
    once = gradient(net)
    assert once.abs().sum() > 0

    estimator.load_state_dict(state)
    (0.5 * estimator(x, y)).backward()
    torch.testing.assert_close(gradient(net), 1.5 * once, atol=1e-6, rtol=1e-5)

    net.zero_grad()
    estimator.load_state_dict(state)
    after = estimator(x, y)
    (after + 0.1 * before).backward()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(gradient(net), once + 0.2 * weights, atol=1e-6, rtol=1e-5)

    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    assert gradient(net).norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_value_without_gradients(name: str) -> None:
    net, loss, x, y = network()
    estimator = every(loss, net)[name]
    with torch.no_grad():
        value = estimator(x, y)
    assert not value.requires_grad
    assert value.item() == pytest.approx(loss(x, y).item(), abs=0.05)
    assert estimator.stats["loss"] == pytest.approx(value.item(), rel=1e-6)
    assert estimator.stats["evaluations"] >= 1


def test_estimators_nest() -> None:
    net, loss, x, y = network()
    outer = SAM(RGS(loss, net, sigma=0.0), net, rho=0.05)
    outer(x, y).backward()
    nested = gradient(net)
    net.zero_grad()
    SAM(loss, net, rho=0.05)(x, y).backward()
    torch.testing.assert_close(gradient(net), nested, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("make", [lambda f, n: RGS(f, n, sigma=0.1), lambda f, n: SAM(f, n, rho=0.1)])
def test_loss_without_gradient(make: Callable[..., Estimator]) -> None:
    point = Point([0.3])
    for loss in (lambda: point.w.detach().sum(), lambda: 3.0):
        with pytest.raises(GLSError, match="PGPE"):
            make(loss, point)()
    assert PGPE(lambda: float(point.w.detach().sum() > 0), point, sigma=0.1, population=8)().item() > 0
    with pytest.raises(GLSError, match="return a scalar"):
        make(lambda: torch.stack([point.w, point.w]), point)()


def test_subset_of_parameters() -> None:
    net, loss, x, y = network()
    last = net[2]
    for params in (["2.weight", "2.bias"], list(last.parameters())):
        seen = []

        def watching(x: Tensor, y: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(net[0].weight.detach().clone())
            return loss(x, y)

        pgpe = PGPE(watching, net, sigma=1e-2, population=8, params=params)
        net.zero_grad()
        pgpe(x, y).backward()
        assert net[0].weight.grad is None and last.weight.grad is not None
        assert pgpe.sigma.numel() == 6 * 3 + 3
        assert all(torch.equal(s, net[0].weight) for s in seen)
    with pytest.raises(ConfigError, match=r"no parameter '2.wight'; did you mean '2.weight'"):
        RGS(loss, net, sigma=0.1, params=["2.wight"])
    with pytest.raises(ConfigError, match="not a parameter of the model"):
        RGS(loss, net, sigma=0.1, params=[nn.Parameter(torch.zeros(1))])


def test_common_random_numbers() -> None:
    """What is random inside the loss is the same for all members, and costs the user no random numbers."""
    point = Point([0.5])
    seen: list[tuple[float, float]] = []

    def loss(*, generator: torch.Generator | None = None) -> Tensor:
        seen.append((torch.rand(()).item(), torch.rand((), generator=generator).item()))
        return point.w.sum()

    for estimator in (RGS(loss, point, sigma=0.1, samples=4), PGPE(loss, point, sigma=0.1, population=8)):
        seen.clear()
        state = torch.get_rng_state()
        estimator()
        assert len(seen) >= 4 and len(set(seen)) == 1
        first = seen[0]
        estimator()
        assert len(set(seen)) == 2, "another estimate, other numbers"
        estimator(generator=torch.Generator().manual_seed(11))
        estimator(generator=torch.Generator().manual_seed(11))
        assert len(set(seen)) == 3 and seen[0] == first, "the caller's generator decides"
        assert len({own for _, own in seen}) == len({world for world, _ in seen}) == 3
        assert torch.equal(torch.get_rng_state(), state)
    GRAD(loss)(generator=torch.Generator().manual_seed(11))
    assert seen[-1][1] == torch.rand((), generator=torch.Generator().manual_seed(11)).item()


@pytest.mark.parametrize("name", ["rgs", "pgpe", "sam"])
def test_resume_is_exact(name: str) -> None:
    net, loss, x, y = network()
    estimator = every(loss, net)[name]
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)

    def train(steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            optimizer.zero_grad()
            value = estimator(x, y)
            value.backward()
            optimizer.step()
            values.append(value.item())
        return values

    train(2)
    estimator(x, y).backward()  # in the middle of an accumulation
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict(), estimator.state_dict()], file)
    expected = train(3)
    file.seek(0)
    weights, moments, state = torch.load(file, weights_only=True)
    net, loss, x, y = network()
    net.load_state_dict(weights)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    optimizer.load_state_dict(moments)
    estimator = every(loss, net, seed=99)[name]
    estimator.load_state_dict(state)
    assert train(3) == expected
    with pytest.raises(CheckpointError, match="another estimator"):
        estimator.load_state_dict({"sigma": 1.0})
    if name == "pgpe":
        with pytest.raises(CheckpointError, match="another network"):
            estimator.load_state_dict({**state, "sigma": torch.ones(3)})


def pgpe_on_cubic(**options: float) -> tuple[Point, PGPE, torch.optim.Optimizer]:
    point = Point([0.6, -0.5, 0.4])
    pgpe = PGPE(cubic(point), point, **{"sigma": 0.3, "population": 64, "sigma_lr": 0.1, **options})  # type: ignore[arg-type]
    return point, pgpe, torch.optim.SGD(point.parameters(), 1e-3)


def test_sigma_moves_once_per_optimizer_step() -> None:
    _, pgpe, optimizer = pgpe_on_cubic()
    start = pgpe.sigma.detach().clone()
    pgpe().backward()
    pgpe().backward()
    assert torch.equal(pgpe.sigma, start), "backward() only gathers"
    g, s = pgpe.sigma.grad, pgpe._unit.grad
    assert g is not None and s is not None
    expected = start * (1 - 0.1 * start * g / s)
    stranger = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    stranger.step()
    assert torch.equal(pgpe.sigma, start), "another optimizer's step is not ours"
    optimizer.step()
    torch.testing.assert_close(pgpe.sigma.detach(), expected)
    assert not torch.equal(pgpe.sigma, start)
    moved = pgpe.sigma.detach().clone()
    optimizer.step()
    pgpe.step()
    assert torch.equal(pgpe.sigma, moved), "nothing gathered, nothing moves"
    pgpe().backward()
    pgpe.step()
    assert not torch.equal(pgpe.sigma, moved), "the explicit call, for other update rules"


def test_sigma_follows_its_gradient() -> None:
    """On the cubic ∂L/∂σ = 6wσ: σ falls where w > 0, grows where w < 0."""
    _, pgpe, optimizer = pgpe_on_cubic(population=256)
    for _ in range(40):
        optimizer.zero_grad()
        pgpe().backward()
        optimizer.step()
    assert pgpe.sigma[0] < 0.25 and pgpe.sigma[1] > 0.35 and pgpe.sigma[2] < 0.25


def test_sigma_does_not_see_loss_scaling() -> None:
    results = []
    for scale in (1.0, 1024.0):
        _, pgpe, optimizer = pgpe_on_cubic()
        for _ in range(3):
            (scale * pgpe()).backward()
            optimizer.zero_grad()
            optimizer.step()
        results.append(pgpe.sigma.detach())
    torch.testing.assert_close(*results)


def test_sigma_limits() -> None:
    _, pgpe, optimizer = pgpe_on_cubic(sigma_lr=1e6, sigma_max_change=0.25, sigma_min=0.2, sigma_max=0.5)
    pgpe().backward()
    optimizer.step()
    ratios = (pgpe.sigma.detach() / 0.3).tolist()
    assert all(r == pytest.approx(0.75) or r == pytest.approx(1.25) for r in ratios)
    for _ in range(5):
        pgpe().backward()
        optimizer.step()
    assert pgpe.sigma.min() >= 0.2 and pgpe.sigma.max() <= 0.5
    point, pgpe, optimizer = pgpe_on_cubic(sigma_lr=0)
    pgpe().backward()
    optimizer.step()
    assert (pgpe.sigma == 0.3).all()
    for silent in (lambda: 1.0, lambda: math.nan):
        other = PGPE(silent, point, sigma=0.3, population=8)
        other().backward()
        optimizer.step()
        assert (other.sigma == 0.3).all(), "a constant or infinite loss says nothing about sigma"
    with pytest.raises(ConfigError, match="between sigma_min"):
        pgpe.set_sigma(100.0)


def test_memory_does_not_grow_with_the_population() -> None:
    size = 977  # of no other tensor
    net = nn.Linear(size, 1, bias=False)
    calls, peaks = [0], [0]

    def loss() -> Tensor:
        calls[0] += 1
        if calls[0] % 8 == 0:
            alive = sum(1 for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter) and o.numel() == size)
            peaks.append(alive)
        return net.weight.square().sum()

    most = {}
    for population in (8, 48):
        for kind in (PGPE(loss, net, sigma=0.1, population=population), RGS(loss, net, sigma=0.1, samples=population)):
            calls[0] = 0
            peaks.clear()
            kind()
            most[type(kind).__name__, population] = max(peaks)
    assert most["PGPE", 48] == most["PGPE", 8] > 0
    assert most["RGS", 48] == most["RGS", 8] > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f, n: RGS(f, n, sigma=-1.0), "expected a finite sigma >= 0, got -1.0"),
        (lambda f, n: RGS(f, n, sigma=math.nan), "expected a finite sigma >= 0, got nan"),
        (lambda f, n: RGS(f, n, sigma=0.1, samples=0), "expected samples >= 1, got 0"),
        (lambda f, n: RGS(f, n, sigma=0.1, samples=3, antithetic=True), "expected samples even and >= 2, got 3"),
        (lambda f, n: PGPE(f, n, sigma=0.0), "expected a finite sigma > 0, got 0.0"),
        (lambda f, n: PGPE(f, n, sigma=0.1, population=3), "expected population even and >= 4, got 3"),
        (lambda f, n: PGPE(f, n, sigma=0.1, population=2.5), "a whole number, got 2.5"),
        (lambda f, n: PGPE(f, n, sigma=0.1, sigma_max_change=2), "expected sigma_max_change < 1, got 2"),
        (lambda f, n: PGPE(f, n, sigma=0.1, sigma_min=0.2), "expected sigma between sigma_min=0.2"),
        (lambda f, n: SAM(f, n, rho=0), "expected a finite rho > 0, got 0"),
        (lambda f, n: RGS(f, n, sigma=0.1, actors=-1), "expected actors >= 0, got -1"),
        (lambda f, n: RGS(f, n, sigma=0.1, actors=2), "cannot receive a closure: pass factory="),
        (lambda f, n: RGS(f, n.requires_grad_(False), sigma=0.1), "no parameter of the model requires"),
        (lambda f, n: ESTIMATORS.get("pgp"), "did you mean 'pgpe'"),
    ],
)
def test_wrong_options(make: Callable[..., object], message: str) -> None:
    point = Point([0.5])
    with pytest.raises(ConfigError) as caught:
        make(cubic(point), point)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_import_is_light() -> None:
    code = "import sys, gls_lirpa.estimators; print([m for m in ('ray', 'evotorch', 'auto_LiRPA') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

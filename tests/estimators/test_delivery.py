"""How estimates are delivered, resumed and checked."""

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
from tests.helpers.estimating import Point, cubic, gradient, network


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

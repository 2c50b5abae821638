"""What estimating must leave alone: weights, buffers, gradients, flags; BatchNorm; auto_LiRPA's modules."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.errors import DataError, GLSError
from gls_lirpa.estimators import PGPE, RGS, SAM, Estimator, reset_batchnorm
from gls_lirpa.estimators.reach import modules_of
from gls_lirpa.losses.certified import CertifiedLoss
from gls_lirpa.relaxations import RELAXATIONS

MAKE: dict[str, Callable[..., Estimator]] = {
    "rgs": lambda loss, model: RGS(loss, model, sigma=0.1, samples=4),
    "pgpe": lambda loss, model: PGPE(loss, model, sigma=0.1, population=8),
    "sam": lambda loss, model: SAM(loss, model, rho=0.1),
}


def batchnorm_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def bits(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers()]]


def same(model: nn.Module, before: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(model), before, strict=True))


@pytest.mark.filterwarnings("ignore:BatchNorm in train mode")
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", MAKE)
def test_everything_is_restored_after_an_error(name: str, error: BaseException) -> None:
    model = batchnorm_net()
    model[0].weight.requires_grad_(False)
    stale = torch.ones_like(model[3].weight)
    model[3].weight.grad = stale
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    calls = [0]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        value = F.cross_entropy(model(x), y)
        value.backward(retain_graph=True) if value.requires_grad else None  # a loss that leaves traces everywhere
        model.requires_grad_(calls[0] % 2 == 0)
        if calls[0] == 2:
            raise error
        return value

    before, rng = bits(model), torch.get_rng_state()
    with pytest.raises(type(error)):
        MAKE[name](loss, model)(x, y)
    assert calls[0] == 2 and same(model, before)
    assert [p.requires_grad for p in model.parameters()] == [False, *[True] * 5]
    assert model[3].weight.grad is stale and bool((stale == 1).all())
    assert all(p.grad is None for n, p in model.named_parameters() if n != "3.weight")
    assert "requires_grad_" not in vars(model[3].weight)
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("name", MAKE)
def test_weights_of_any_kind_come_back(name: str) -> None:
    """Precisions that meet in no common float32, and a matrix used twice."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor([1 / 3, math.pi], dtype=torch.float64))
            self.b = nn.Parameter(torch.tensor([1 / 3, 1e-3], dtype=torch.bfloat16))
            self.tied = self.a

    model = Odd()
    before = bits(model)
    MAKE[name](lambda: (model.a.pow(2) * model.b.double()).sum(), model)().backward()
    assert same(model, before)
    assert model.a.grad is not None and model.a.grad.dtype == torch.float64
    assert model.b.grad is not None and model.b.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", MAKE)
def test_batchnorm_does_not_move_and_the_user_is_told_once(name: str) -> None:
    model = batchnorm_net()
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    estimator = MAKE[name](lambda x, y: F.cross_entropy(model(x), y), model)
    before = bits(model)
    with pytest.warns(UserWarning, match=r"reset_batchnorm\(model, loader\)"):
        estimator(x, y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator(x, y).backward()
        MAKE[name](lambda x, y: F.cross_entropy(model(x), y), model.eval())(x, y)
    assert same(model, before)


def test_split_is_refused_with_batchnorm_in_train_mode() -> None:
    model = batchnorm_net()
    loss = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    rgs = RGS(loss, model, sigma=0.0, split=True)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    with pytest.warns(UserWarning), pytest.raises(GLSError, match="split=False, or put BatchNorm in eval mode"):
        rgs(x, y)
    model.eval()
    assert rgs(x, y).item() == pytest.approx(loss(x, y).item(), abs=1e-6)


def test_reset_batchnorm_sets_pooled_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.BatchNorm2d(3, affine=False))
    model[2].eval()
    batches = [(torch.randn(n, 1, 5, 5) * n, torch.zeros(n)) for n in (4, 2, 7)]
    flags = [m.training for m in model.modules()]
    weights = [p.detach().clone() for p in model.parameters()]
    reset_batchnorm(model, batches)
    inputs = model[0](torch.cat([x for x, _ in batches])).detach().transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(model[1].running_mean.double(), inputs.mean(1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(model[1].running_var.double(), inputs.var(1), atol=1e-6, rtol=1e-5)
    # The second layer sees what the first gives in training: every batch normalised by itself.
    seen = [F.batch_norm(model[0](x), None, None, model[1].weight, model[1].bias, True) for x, _ in batches]
    inputs = torch.cat(seen).detach().transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(model[3].running_mean.double(), inputs.mean(1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(model[3].running_var.double(), inputs.var(1), atol=1e-6, rtol=1e-5)
    assert int(model[1].num_batches_tracked) == 3
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    before = bits(model)
    with pytest.raises(DataError, match="empty"):
        reset_batchnorm(model, [])
    with pytest.raises(RuntimeError):
        reset_batchnorm(model, [batches[0], (torch.randn(2, 9, 5, 5), None)])
    assert same(model, before) and [m.training for m in model.modules()] == flags
    reset_batchnorm(nn.Linear(2, 2), [])  # nothing to set


def test_modules_are_found_wherever_a_loss_keeps_them() -> None:
    class Holder:
        def __init__(self, net: nn.Module) -> None:
            self.parts = {"net": net}

        def __call__(self) -> Any:
            return self.parts

        def method(self) -> Any:
            return self.parts

    net = nn.Linear(1, 1)
    holder = Holder(net)
    for loss in (net, holder, holder.method, lambda: net, lambda n=net: n, lambda: holder()):
        assert modules_of(loss) == [net]
    assert modules_of(helper) == [GLOBAL_NET]
    assert modules_of(lambda: later) == [], "a name that is bound only after the loss was made"
    later = None


GLOBAL_NET = nn.Linear(1, 1)


def helper() -> nn.Module:
    return GLOBAL_NET


def bounded_loss(model: nn.Module, example: Tensor) -> tuple[Any, Callable[..., Tensor]]:
    """A loss of the kind auto_LiRPA's examples have, over a BoundedModule of the user's own."""
    lirpa = load_lirpa()
    bounded = lirpa.bounded_module(model, example, bound_opts=lirpa.bound_options())

    def loss(x: Tensor, y: Tensor, *, eps: float, method: str = "CROWN") -> Tensor:
        bounded(x)
        ball = lirpa.bounded_tensor(x, lirpa.perturbation(norm=math.inf, eps=eps))
        spec = torch.eye(3)[y][:, None] - torch.eye(3)
        lower = bounded.compute_bounds(x=(ball,), C=spec, method=method, bound_upper=False)[0]
        return F.cross_entropy(-lower, y)

    return bounded, loss


@pytest.mark.filterwarnings("ignore:BatchNorm in train mode")
def test_a_bounded_module_of_the_users_own() -> None:
    model = batchnorm_net().eval()
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    bounded, loss = bounded_loss(model, x)
    bounded.train()
    graphs = []

    def watched(x: Tensor, y: Tensor, *, eps: float) -> Tensor:
        value = loss(x, y, eps=eps)
        graphs.append(value.requires_grad)
        return value

    before, statistics = bits(model), [b.clone() for b in bounded.buffers()]
    PGPE(watched, model, sigma=1e-2, population=8)(x, y, eps=0.05).backward()
    assert not any(graphs), "a zeroth-order estimate needs no graph over the weights"
    rgs = RGS(watched, model, sigma=1e-2, seed=5)
    seeds = RGS(watched, model, sigma=1e-2, seed=5)._seeds(2)
    model.zero_grad()
    rgs(x, y, eps=0.05).backward()
    assert all(graphs[-2:])
    assert same(model, before) and all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(statistics, bounded.buffers(), strict=True))
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    total = torch.zeros_like(got)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for seed in seeds:
        noise = torch.randn(len(flat), generator=torch.Generator().manual_seed(seed))
        torch.nn.utils.vector_to_parameters(flat + 1e-2 * noise, model.parameters())
        total += torch.cat([g.flatten() for g in torch.autograd.grad(loss(x, y, eps=0.05), list(model.parameters()))])
    torch.testing.assert_close(got, total / 2, atol=1e-6, rtol=1e-4)


def test_bounds_in_eval_mode_do_not_end_the_training() -> None:
    """They switch requires_grad of the shared weights off, which must not silence the next estimate."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    bounded, loss = bounded_loss(model, x)
    rgs = RGS(loss, model, sigma=1e-2)
    pgpe = PGPE(loss, model, sigma=1e-2, population=8)
    for estimator in (rgs, pgpe):
        bounded.eval()
        loss(x, y, eps=0.05)
        assert not any(p.requires_grad for p in model.parameters())
        bounded.train()
        model.zero_grad()
        estimator(x, y, eps=0.05).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    bounded.eval()
    with pytest.raises(GLSError, match="PGPE"):
        rgs(x, y, eps=0.05)


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    return model, torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("relaxation", ["alpha-crown-step", "alpha-crown"])
def test_slope_optimisation_runs_under_pgpe_and_leaves_grad_alone(relaxation: str) -> None:
    model, x, y = small()
    criterion = CertifiedLoss(model, relaxation, eps=0.1)
    crown = CertifiedLoss(model, "crown", eps=0.1)
    assert criterion(x, y).item() < crown(x, y).item() - 1e-4, "slopes are being optimised"
    pgpe = PGPE(criterion, model, sigma=1e-4, population=8)
    value = pgpe(x, y)
    assert value.item() == pytest.approx(criterion(x, y).item(), abs=1e-3)
    assert all(p.grad is None for p in model.parameters())
    value.backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(GLSError, match="PGPE"):
        RGS(criterion, model, sigma=1e-4)(x, y)


def test_certified_loss_with_an_attack_uses_common_random_numbers() -> None:
    model, x, y = small()
    rgs = RGS(CertifiedLoss(model, eps=0.1, loss="pgd"), model, sigma=0.0, samples=3)
    rgs(x, y, eps=0.05).backward()
    assert rgs.stats["spread"] == 0.0
    first = rgs(x, y, generator=torch.Generator().manual_seed(1)).item()
    assert rgs(x, y, generator=torch.Generator().manual_seed(1)).item() == first


class OneNeuron(nn.Module):
    """y = ReLU(x + w) + 1 against a second logit 0, x = 2p − 1 for a pixel p."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1, dtype=torch.float64)
        self.outer = nn.Linear(1, 2, dtype=torch.float64)
        with torch.no_grad():
            self.inner.weight.fill_(2.0)
            self.inner.bias.fill_(w - 1)
            self.outer.weight.copy_(torch.tensor([[1.0], [0.0]]))
            self.outer.bias.copy_(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(F.relu(self.inner(x)))
        return result


def one_neuron(w: float) -> tuple[OneNeuron, Callable[[], Tensor]]:
    """The network and its DeepPoly lower bound over x ∈ [−1, 1], through our engine."""
    model = OneNeuron(w)
    center = torch.full((1, 1), 0.5, dtype=torch.float64)
    engine = BoundEngine(model, center)
    crown = RELAXATIONS.get("crown")
    return model, lambda: engine.margins(linf_box(center, 0.5), torch.tensor([0]), crown).sum()


def test_the_papers_one_neuron_bound_jumps() -> None:
    for w in (-0.5, -1e-3, 1e-3, 0.3):
        assert one_neuron(w)[1]().item() == pytest.approx(1 + (w > 0) * (w - 1), abs=1e-9)


def test_the_papers_one_neuron_bound_smoothed() -> None:
    """E l = 1 + (w−1)Φ(w/σ) + σφ(w/σ), with slope Φ(w/σ) − φ(w/σ)/σ; RGS misses the jump, φ/σ."""
    w, sigma = 0.2, 0.5
    cdf = 0.5 * (1 + math.erf(w / sigma / math.sqrt(2)))
    pdf = math.exp(-0.5 * (w / sigma) ** 2) / math.sqrt(2 * math.pi)
    model, loss = one_neuron(w)

    def repeated(estimator: Estimator, count: int) -> tuple[Tensor, Tensor]:
        rows = []
        for _ in range(count):
            model.zero_grad()
            value = estimator()
            value.backward()
            assert model.inner.bias.grad is not None
            rows.append(torch.stack([value.detach(), model.inner.bias.grad[0]]))
        stacked = torch.stack(rows)
        return stacked.mean(0), stacked.std(0) / math.sqrt(count)

    smoothed = 1 + (w - 1) * cdf + sigma * pdf
    pgpe = PGPE(loss, model, sigma=sigma, population=32, params=["inner.bias"], seed=1)
    mean, error = repeated(pgpe, 25)
    truth = torch.tensor([smoothed, cdf - pdf / sigma], dtype=torch.float64)
    assert (error < 0.09).all() and ((mean - truth).abs() < 4.5 * error).all()
    assert abs(mean[1] - cdf) > 4.5 * error[1], "distinguishable from the slope without the jump"
    rgs = RGS(loss, model, sigma=sigma, samples=16, params=["inner.bias"], seed=1)
    mean, error = repeated(rgs, 25)
    truth = torch.tensor([smoothed, cdf], dtype=torch.float64)
    assert (error < 0.05).all() and ((mean - truth).abs() < 4.5 * error).all()

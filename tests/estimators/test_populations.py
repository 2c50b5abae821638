"""Many weights in one pass: the bounds and losses of each are those it has alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.engine import populations, row_neurons, rows
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.estimators import PGPE
from gls_lirpa.estimators.weights import Weights
from gls_lirpa.losses import CertifiedLoss
from gls_lirpa.relaxations import get_relaxation
from tests.helpers import networks

METHODS = ("ibp", "crown-ibp", "crown", "alpha-crown-step")
MEMBERS = 3


def perturbed(model: nn.Module, count: int = MEMBERS) -> list[Tensor]:
    """Weights far enough from each other that one member's bounds are not another's."""
    generator = torch.Generator().manual_seed(3)
    theta = Weights(model).flat()
    return [theta + 0.1 * torch.randn(theta.shape, generator=generator, dtype=theta.dtype) for _ in range(count)]


def written(model: nn.Module, points: list[Tensor]) -> Iterator[None]:
    weights = Weights(model)
    for point in points:
        weights.write(point)
        yield


def assert_each_is_its_own(
    model: nn.Module, x: Tensor, y: Tensor, method: str, *, eps: float = 0.1, chunk_mib: int | None = None
) -> None:
    engine = BoundEngine(model, x, chunk_mib=chunk_mib)
    relaxation, box, points = get_relaxation(method), linf_box(x, eps), perturbed(model)
    alone = torch.stack([engine.margins(box, y, relaxation).detach() for _ in written(model, points)])
    together = engine.population_margins(box, y, relaxation, written(model, points))
    assert together is not None
    assert (alone[0] - alone[1]).abs().max() > 1e-3
    assert torch.allclose(together, alone, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_members_have_the_margins_they_have_alone(name: str, method: str) -> None:
    model = networks.build(name).double().eval()
    # As many samples as members: no axis may be taken for the other.
    x, y = networks.batch(name, MEMBERS, seed=1)
    if BoundEngine(model, x.double()).route()[0] != "rows":
        pytest.skip("no row form")
    assert_each_is_its_own(model, x.double(), y, method)


@pytest.mark.parametrize("method", ["ibp", "crown"])
def test_members_of_a_network_that_begins_with_a_relu(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double()
    x, y = torch.rand(2, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 2])
    assert_each_is_its_own(model, x, y, method)


@pytest.mark.parametrize("name", ["mlp", "conv", "residual", "batchnorm"])
@pytest.mark.parametrize("pieces", ["rows one by one", "final rows by member", "two members at a time"])
def test_pieces_do_not_matter(name: str, pieces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces == "rows one by one":
        monkeypatch.setattr(row_neurons, "PART_VALUES", 1)
    elif pieces == "final rows by member":
        monkeypatch.setattr(rows, "FINAL_VALUES", 1)
    else:
        monkeypatch.setattr(populations, "at_once", lambda *_: 2)
    model = networks.build(name).double().eval()
    x, y = networks.batch(name, 4, seed=1)
    assert_each_is_its_own(model, x.double(), y, "crown", eps=0.2)


def test_members_that_fit_grow_with_the_budget_and_shrink_with_the_batch() -> None:
    x, _ = networks.batch("conv", 8)
    engine = BoundEngine(networks.build("conv"), x)
    with engine._row_form({}) as (network, _):
        sizes = [populations.at_once(network, linf_box(x[:n], 0.1), 9, mib) for n, mib in ((8, 1), (4, 1), (4, 2))]
    assert 1 < sizes[0] < sizes[1] < sizes[2]


# -- where one at a time is all there is ---------------------------------------------------------------------


def refused(write: Tensor) -> None:
    raise AssertionError("weights were written although nothing can be computed from them")


def train_batchnorm() -> CertifiedLoss:
    return CertifiedLoss(networks.build("batchnorm").train(), "crown", eps=0.1)


def unknown_layer() -> CertifiedLoss:
    shape = networks.batch("mlp", 1)[0][0].numel()
    return CertifiedLoss(
        nn.Sequential(nn.Flatten(), nn.Linear(shape, 4), nn.Sigmoid(), nn.Linear(4, 3)), "ibp", eps=0.1
    )


class Own(CertifiedLoss):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().__call__(*args, **kwargs)


ALONE: dict[str, Callable[[], CertifiedLoss]] = {
    "BatchNorm in train mode": train_batchnorm,
    "no row form": unknown_layer,
    "hbox": lambda: CertifiedLoss(networks.build("mlp"), "hbox", eps=0.1),
    "crown-plain": lambda: CertifiedLoss(networks.build("mlp"), "crown-plain", eps=0.1),
    "attack": lambda: CertifiedLoss(networks.build("mlp"), "crown", eps=0.1, loss="pgd"),
    "natural": lambda: CertifiedLoss(networks.build("mlp"), "crown", eps=0.1, loss="natural"),
    "radius 0": lambda: CertifiedLoss(networks.build("mlp"), "crown", eps=0.0),
    "no memory": lambda: CertifiedLoss(networks.build("mlp"), "crown", eps=0.1, chunk_mib=0),
    "a call of its own": lambda: Own(networks.build("mlp"), "crown", eps=0.1),
}


@pytest.mark.parametrize("case", ALONE)
def test_the_worker_goes_on_one_at_a_time(case: str) -> None:
    loss = ALONE[case]()
    x, y = networks.batch("batchnorm" if "Batch" in case else "mlp", 4, seed=1)
    assert loss.population(refused, perturbed(loss.model), x, y) is None
    plain, own = estimates(loss, x, y)
    assert plain[0] == own[0]
    for a, b in zip(plain[1], own[1], strict=True):
        assert torch.equal(a, b)


# -- PGPE -----------------------------------------------------------------------------------------------------


def estimates(loss: CertifiedLoss, x: Tensor, y: Tensor, **options: Any) -> list[tuple[float, list[Tensor]]]:
    """PGPE's value and gradients by calls of the loss alone, and with all that the loss has to offer."""
    found = []
    for function in (lambda *args, **kwargs: loss(*args, **kwargs), loss):
        pgpe = PGPE(function, loss.model, sigma=1e-2, population=36, seed=4)
        with pytest.warns(UserWarning) if loss.model.training and has_batchnorm(loss.model) else nullcontext():
            value = pgpe(x, y, **options)
        weights = [*loss.model.parameters(), pgpe.sigma]
        found.append((float(value.detach()), list(torch.autograd.grad(value, weights))))
    return found


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


@pytest.mark.parametrize(
    "options",
    [{}, {"natural_weight": 0.3, "l1": 1e-3}, {"warmup": 0.5}],
    ids=["robust", "natural and l1", "warm-up"],
)
@pytest.mark.parametrize("name", ["conv", "batchnorm"])
def test_gradients_are_those_of_one_at_a_time(name: str, options: dict[str, float]) -> None:
    model = networks.build(name).double().eval()
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    x, y = networks.batch(name, 4, seed=1)
    loss = CertifiedLoss(model, "crown", eps=0.1, **options)
    assert loss.population(Weights(model).write, [Weights(model).flat()], x.double(), y, eps=0.05) is not None
    plain, own = estimates(loss, x.double(), y, eps=0.05)
    assert plain[0] == pytest.approx(own[0], rel=1e-12)
    for a, b in zip(plain[1], own[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-9 * (1 + float(a.abs().max())))
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *model.buffers()), strict=True))


def test_single_precision_agrees_to_rounding() -> None:
    model = networks.build("conv").eval()
    x, y = networks.batch("conv", 16, seed=1)
    loss, points = CertifiedLoss(model, "crown", eps=0.1), perturbed(model, 8)
    together = loss.population(Weights(model).write, points, x, y)
    alone = torch.stack([loss(x, y).detach() for _ in written(model, points)])
    assert together is not None and torch.allclose(together, alone, rtol=1e-6, atol=0)

"""The whole table loss × relaxation × estimator: every composition that makes sense takes a step, the
others say why in one line. A loss, relaxation or estimator registered later is a row here at once."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa import RELAXATIONS, CertifiedLoss, build_model, get_relaxation
from gls_lirpa.base.options import Options, Value
from gls_lirpa.data import load_dataset
from gls_lirpa.errors import ConfigError, GLSError
from gls_lirpa.estimators import ESTIMATORS, Estimator
from gls_lirpa.losses import LOSSES
from gls_lirpa.training.config import TrainConfig

EPS = 0.05
# Short attacks and small populations: the contract is about gradients and weights, not about how good they are.
SMALL: dict[str, Value] = {"steps": 2, "latent_steps": 3, "population": 4}


def small(options: Options) -> dict[str, Value]:
    return {name: SMALL[name] for name in options if name in SMALL}


def estimator_around(name: str, criterion: CertifiedLoss, model: nn.Module) -> Estimator:
    method = ESTIMATORS.get(name)
    return method.around(criterion, model, {**method.recipe, **small(method.options)}, placement={})


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    train = load_dataset("digits").train
    return train.batch(list(range(8)))


def fresh_model() -> nn.Module:
    return build_model("cnn3-tiny", in_shape=(1, 8, 8), classes=10, init="kaiming-uniform", seed=3)


@functools.cache
def teacher_network() -> nn.Module:
    """Trained on the batch, so that learning from it and from the labels go together."""
    model, (x, y) = fresh_model(), digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def options_of(loss: str) -> dict[str, Any]:
    """Small, with a teacher for losses that learn from one."""
    record = LOSSES.get(loss)
    return {**small(record.options), **({"teacher": teacher_network()} if record.teacher else {})}


@functools.cache
def shared(loss: str, relaxation: str) -> tuple[nn.Module, CertifiedLoss]:
    """One network and bound engine for all estimators; each test leaves the weights as they were."""
    model = fresh_model()
    chosen = get_relaxation(relaxation, iterations=2 if "iterations" in RELAXATIONS.get(relaxation).options else None)
    return model, CertifiedLoss(model, chosen, eps=EPS, loss=loss, **options_of(loss))


def makes_sense(loss: str, relaxation: str, estimator: str) -> bool:
    needed = LOSSES.get(loss).bounds and ESTIMATORS.get(estimator).needs_gradient
    return not needed or RELAXATIONS.get(relaxation).differentiable


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("relaxation", RELAXATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_one_step(loss: str, relaxation: str, estimator: str) -> None:
    model, criterion = shared(loss, relaxation)
    x, y = digits()
    before = [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    estimate = estimator_around(estimator, criterion, model)
    if not makes_sense(loss, relaxation, estimator):
        with pytest.raises(GLSError, match="PGPE") as caught:
            estimate(x, y, generator=seeded()).backward()
        assert "\n" not in str(caught.value)
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        return
    value = estimate(x, y, generator=seeded())
    assert torch.isfinite(value)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)), "restored"
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    value.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0, name
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    try:
        assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert torch.isfinite(criterion(x, y, generator=seeded()))
    finally:
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_configuration_refuses_what_cannot_run(loss: str) -> None:
    teacher = "run" if LOSSES.get(loss).teacher else None
    for relaxation in RELAXATIONS:
        for estimator in ESTIMATORS:
            if makes_sense(loss, relaxation, estimator):
                TrainConfig(loss=loss, relaxation=relaxation, estimator=estimator, teacher=teacher)
                continue
            with pytest.raises(ConfigError, match="no gradient in the weights") as caught:
                TrainConfig(loss=loss, relaxation=relaxation, estimator=estimator, teacher=teacher)
            assert "\n" not in str(caught.value)


DESCENTS = [
    (loss, relaxation)
    for loss in LOSSES
    for relaxation in RELAXATIONS
    if makes_sense(loss, relaxation, "grad") and (LOSSES.get(loss).bounds or relaxation == "ibp")
]


@pytest.mark.parametrize(("loss", "relaxation"), DESCENTS)
def test_the_loss_decreases_under_backpropagation(loss: str, relaxation: str) -> None:
    model, (x, y) = fresh_model(), digits()
    criterion = CertifiedLoss(model, relaxation, eps=EPS, loss=loss, **options_of(loss))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    values = []
    for _ in range(10):
        optimizer.zero_grad()
        value = criterion(x, y, generator=seeded())
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.95 * values[0], values


@pytest.mark.parametrize("loss", LOSSES)
def test_a_mix_with_the_natural_loss_and_the_clean_batch_at_radius_zero(loss: str) -> None:
    model, criterion = shared(loss, "crown-ibp")
    x, y = digits()
    natural = F.cross_entropy(model(x), y).item()
    assert criterion(x, y, eps=0.0).item() == pytest.approx(natural, abs=1e-6)
    mixed = CertifiedLoss(model, "crown-ibp", eps=EPS, loss=loss, natural_weight=0.25, **options_of(loss))
    worst = criterion(x, y, generator=seeded()).item()
    assert mixed(x, y, generator=seeded()).item() == pytest.approx(0.25 * natural + 0.75 * worst, abs=1e-5)


@pytest.mark.parametrize("relaxation", [name for name in RELAXATIONS if not RELAXATIONS.get(name).differentiable])
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if LOSSES.get(loss).bounds])
def test_a_bound_without_gradient_has_a_value_but_refuses_backward(loss: str, relaxation: str) -> None:
    """Also where it is one part of a mix whose other parts could be differentiated."""
    model, (x, y) = fresh_model(), digits()
    options = options_of(loss)
    criterion = CertifiedLoss(model, relaxation, eps=EPS, loss=loss, natural_weight=0.5, l1=1e-4, **options)
    value = criterion(x, y, generator=seeded())
    with torch.no_grad():
        assert value.item() == pytest.approx(criterion(x, y, generator=seeded()).item(), abs=1e-5)
    with pytest.raises(ConfigError, match=f"'{relaxation}' has no gradient"):
        value.backward()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_factory_for_actors_rebuilds_the_same_loss(loss: str) -> None:
    _, criterion = shared(loss, "crown-ibp")
    x, y = digits()
    _, rebuilt = pickle.loads(pickle.dumps(criterion.factory()))()
    assert rebuilt(x, y, generator=seeded()).item() == pytest.approx(
        criterion(x, y, generator=seeded()).item(), abs=1e-6
    )

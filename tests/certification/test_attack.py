"""Attacks: inside the box exactly, as strong as theory allows, without traces on the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.attacks import pgd_points, project, random_points, worst_margin
from gls_lirpa.base.boxes import Box, linf_box
from gls_lirpa.certification.attack import AttackStage, pgd, sample_generators
from gls_lirpa.certification.stage import OpenSamples, StageOptions, Subject
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import ConfigError

CLASSES = 4


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(9, CLASSES))


def convolutional() -> nn.Module:
    head = [nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, CLASSES)]
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), *head)


def images(number: int = 12) -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1], a third of them exactly at its ends."""
    x = (torch.rand(number, 1, 3, 3) * 1.5 - 0.25).clamp(0, 1)
    return x, torch.randint(CLASSES, (number,))


def exact_worst_margins(model: nn.Module, box: Box, labels: Tensor) -> Tensor:
    """Of a linear network: wᵀc + b − |w|ᵀr for w = w_y − w_j, minimised over j ≠ y."""
    layer = model[1]
    center, radius = box.center.flatten(1), ((box.upper - box.lower) / 2).flatten(1)
    weights = layer.weight[labels].unsqueeze(1) - layer.weight.unsqueeze(0)
    offsets = layer.bias[labels].unsqueeze(1) - layer.bias.unsqueeze(0)
    margins = (weights @ center.unsqueeze(2)).squeeze(2) + offsets - (weights.abs() @ radius.unsqueeze(2)).squeeze(2)
    return margins.scatter(1, labels.unsqueeze(1), torch.inf).amin(1).detach()


@pytest.mark.parametrize("eps", [0.0, 0.07, 0.6])
@pytest.mark.parametrize("targeted", [False, True])
def test_points_are_in_the_box_and_margins_are_theirs(eps: float, targeted: bool) -> None:
    model, (x, labels) = convolutional().eval(), images()
    box = linf_box(x, eps)
    found = pgd(model, x, labels, box, steps=5, restarts=3, targeted=targeted)
    assert bool((found.points >= box.lower).all() and (found.points <= box.upper).all())
    assert torch.allclose(found.margins, worst_margin(model(found.points), labels), atol=1e-6)
    assert bool((found.margins <= worst_margin(model(x), labels) + 1e-6).all())
    if eps == 0.0:
        assert torch.equal(found.points, x)


@pytest.mark.parametrize("targeted", [False, True])
def test_reaches_the_optimum_of_a_linear_network(targeted: bool) -> None:
    model, (x, _) = linear(), images(40)
    labels = model(x).argmax(1)
    box = linf_box(x, 0.02)
    expected = exact_worst_margins(model, box, labels)
    robust = expected > 0
    assert 5 < int(robust.sum()) < 40
    found = pgd(model, x, labels, box, steps=20, restarts=CLASSES - 1, targeted=targeted)
    assert torch.allclose(found.margins[robust], expected[robust], atol=2e-6)
    assert bool((found.margins[~robust] <= 0).all())


def test_a_broken_sample_is_left_as_it_was_broken() -> None:
    """What is misclassified already needs no attack: the sample itself is returned."""
    model, (x, _) = convolutional().eval(), images()
    wrong = (model(x).argmax(1) + 1) % CLASSES
    assert torch.equal(pgd(model, x, wrong, linf_box(x, 0.3)).points, x)


def test_restarts_never_make_it_worse() -> None:
    model, (x, labels) = convolutional().eval(), images(30)
    box = linf_box(x, 0.1)
    once = pgd(model, x, labels, box, steps=4, restarts=1).margins
    often = pgd(model, x, labels, box, steps=4, restarts=4).margins
    unbroken = once > 0
    assert bool((often <= once)[unbroken].all()) and bool((often < once)[unbroken].any())


def test_nothing_of_the_model_changes() -> None:
    model, (x, labels) = convolutional().train(), images()
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    before = copy.deepcopy(model.state_dict())
    pgd(model, x, labels, linf_box(x, 0.1), steps=2, restarts=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not model[0].weight.requires_grad and model[4].weight.requires_grad
    assert torch.equal(model[4].weight.grad, torch.ones_like(model[4].weight))
    assert all(p.grad is None for p in model.parameters() if p is not model[4].weight)


def test_works_where_gradients_are_disabled() -> None:
    model, (x, _) = linear(), images()
    labels = model(x).argmax(1)
    with torch.no_grad():
        found = pgd(model, x, labels, linf_box(x, 0.3))
    assert bool((found.margins < worst_margin(model(x), labels)).all())
    assert not found.points.requires_grad and not found.margins.requires_grad


def test_the_generator_decides() -> None:
    model, (x, labels) = convolutional().eval(), images()
    box = linf_box(x, 0.05)

    def attacked(seed: int) -> Tensor:
        torch.rand(7)  # the global state must not matter
        return pgd(model, x, labels, box, steps=1, restarts=2, generator=torch.Generator().manual_seed(seed)).points

    assert torch.equal(attacked(1), attacked(1))
    starts = [random_points(box, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_one_generator_per_sample_makes_samples_independent() -> None:
    box = linf_box(images(6)[0], 0.2)
    indices = torch.tensor([4, 9, 2, 7, 1, 0])
    together = random_points(box, generator=sample_generators(5, indices))
    alone = random_points(box[2:3], generator=sample_generators(5, indices[2:3]))
    assert torch.equal(together[2:3], alone)
    seeds = {g.initial_seed() for s in range(30) for g in sample_generators(s, torch.arange(100))}
    assert len(seeds) == 3000


def test_nan_is_never_a_counterexample() -> None:
    model, (x, labels) = linear(), images()
    with torch.no_grad():
        model[1].weight.fill_(torch.nan)
    found = pgd(model, x, labels, linf_box(x, 0.1), steps=3, restarts=2)
    assert torch.equal(found.points, x)
    assert not bool((found.margins <= 0).any())


def test_the_stage_reports_broken_samples_alone() -> None:
    model, (x, _) = linear(), images(40)
    labels, box = model(x).argmax(1), linf_box(x, 0.02)
    open_samples = OpenSamples(
        torch.arange(40), x, labels, box, torch.full((40, 3), -torch.inf), torch.zeros(40, 3, dtype=torch.bool)
    )
    findings = AttackStage(StageOptions())(Subject(model, BoundEngine(model, x)), open_samples, timeout=1.0)
    broken = [point is not None for point in findings.counterexamples]
    assert 0 < sum(broken) < 40
    for point, label in zip(findings.counterexamples, labels, strict=True):
        if point is not None:
            assert worst_margin(model(point[None]), label[None]).item() <= 1e-6
    assert bool((findings.lower == -torch.inf).all()) and not any(findings.exhausted)


def test_training_points_raise_the_loss() -> None:
    model, (x, labels) = linear(), images()
    box = linf_box(x, 0.1)

    def losses(points: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(points), labels, reduction="none")

    for restarts in (1, 3):
        points = pgd_points(model, x, labels, box, steps=4, restarts=restarts, random_start=restarts > 1)
        assert bool((points >= box.lower).all() and (points <= box.upper).all())
        assert bool((losses(points) > losses(x)).all())
        assert not points.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_training_points_take_any_forward_and_objective() -> None:
    x, labels = images()
    box = linf_box(x, 0.1)

    def objective(logits: Tensor, labels: Tensor) -> Tensor:
        return logits[:, 0]

    # Three steps of 0.7 radii cross the box from anywhere.
    for sign, expected in ((1, box.upper), (-1, box.lower)):

        def forward(points: Tensor, sign: int = sign) -> Tensor:
            return sign * points.flatten(1).sum(1, keepdim=True)

        points = pgd_points(forward, x, labels, box, steps=3, step=0.7, objective=objective)
        assert torch.equal(points, expected)


def test_projection_is_exact() -> None:
    box = linf_box(torch.rand(5, 1, 3, 3), 0.1)
    wild = project(torch.randn(5, 1, 3, 3) * 10, box)
    assert bool((wild >= box.lower).all() and (wild <= box.upper).all())
    assert torch.equal(project(box.center, box), box.center)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"restarts": 0}, {"step_size": 0.0}, {"step_size": float("nan")}])
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    model, (x, labels) = linear(), images()
    with pytest.raises(ConfigError, match="expected"):
        pgd(model, x, labels, linf_box(x, 0.1), **wrong)  # type: ignore[arg-type]

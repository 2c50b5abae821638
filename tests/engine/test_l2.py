"""ℓ2 balls: bounds hold at sampled and attacked points of the ball, in training and in certification; others refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gls_lirpa
from gls_lirpa import PGPE, BoundEngine, CertifiedLoss, GLSError, certify, get_relaxation, l2_ball, linf_box
from gls_lirpa.base.balls import Ball
from gls_lirpa.models import Normalize
from gls_lirpa.relaxations import RELAXATIONS
from tests.helpers.command import Glscert

BALLS = ("ibp", "crown-ibp", "crown", "crown-plain")
"""The relaxations that bound ℓ2 balls."""

NETS = {
    "dense": ((6,), lambda: [nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)]),
    "flat": ((1, 4, 4), lambda: [nn.Flatten(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 3)]),
    "conv": (
        (2, 6, 6),
        lambda: [
            *(Normalize((0.1, 0.2), (0.3, 0.5)), nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 3, 3, 1, 1)),
            *(nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)),
        ],
    ),
}


def network(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    shape, layers = NETS[name]
    model = nn.Sequential(*layers()).eval()
    x = torch.rand(4, *shape)
    return model, x, model(x).argmax(1)


def lengths(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1))


def attacked(model: nn.Module, x: Tensor, y: Tensor, other: Tensor, eps: float) -> Tensor:
    """The least margin f_y − f_other that projected descent in the ball finds, from random points of its surface."""
    start = torch.randn_like(x)
    point = (x + eps * start / lengths(start)).requires_grad_()
    least = torch.full((len(x),), torch.inf)
    for _ in range(25):
        logits = model(point)
        margin = (logits.gather(1, y[:, None]) - logits.gather(1, other[:, None])).squeeze(1)
        least = torch.minimum(least, margin.detach())
        (gradient,) = torch.autograd.grad(margin.sum(), point)
        step = point.detach() - 0.3 * eps * gradient / lengths(gradient).clamp(min=1e-12) - x
        point = (x + step * (eps / lengths(step).clamp(min=eps))).requires_grad_()
    return least


@pytest.mark.parametrize("relaxation", BALLS)
@pytest.mark.parametrize("name", NETS)
def test_bounds_hold_in_the_ball_and_are_tighter_than_over_its_box(name: str, relaxation: str) -> None:
    model, x, y = network(name)
    engine = BoundEngine(model, x)
    for eps in (0.05, 0.5, 2.0):
        bounds = engine.margins(l2_ball(x, eps), y, get_relaxation(relaxation)).detach()
        for column in range(2):
            other = column + (y <= column).long()
            for _ in range(3):
                least = attacked(model, x, y, other, eps)
                assert (least >= bounds[:, column] - 1e-4 * (1 + least.abs())).all()
        box = engine.margins(linf_box(x, min(eps, 1.0), low=-9, high=9), y, get_relaxation(relaxation))
        if eps <= 1:
            assert (bounds > box).all()


def test_a_linear_network_is_bounded_exactly() -> None:
    model, x = nn.Linear(5, 2), torch.rand(3, 5)
    row = (model.weight[0] - model.weight[1]).detach()
    exact = x @ row + (model.bias[0] - model.bias[1]).detach() - 0.25 * row.norm()
    labels = torch.zeros(3, dtype=torch.int64)
    for relaxation in BALLS:
        found = BoundEngine(model, x).margins(l2_ball(x, 0.25), labels, get_relaxation(relaxation))
        assert torch.allclose(found[:, 0], exact, atol=1e-5)


def test_layers_are_bounded_in_the_ball() -> None:
    model, x, _ = network("dense")
    layers = BoundEngine(model, x).layers(l2_ball(x, 0.3), get_relaxation("crown"))
    noise = torch.randn(500, *x.shape)
    points = x + 0.3 * noise / noise.norm(dim=2, keepdim=True)
    lower, upper = layers[-1]
    assert ((model(points) >= lower - 1e-5) & (model(points) <= upper + 1e-5)).all()
    first = model[0](points)  # type: ignore[index]
    assert ((first >= layers[0][0] - 1e-5) & (first <= layers[0][1] + 1e-5)).all()


@pytest.mark.parametrize("relaxation", [name for name in RELAXATIONS if name not in BALLS])
def test_other_relaxations_refuse(relaxation: str) -> None:
    if relaxation.startswith("test-"):
        pytest.skip("another test's")
    model, x, y = network("dense")
    with pytest.raises(GLSError, match="no bounds over l2 balls"):
        BoundEngine(model, x).margins(l2_ball(x, 0.1), y, get_relaxation(relaxation))
    with pytest.raises(GLSError, match="no bounds over l2 balls"):
        CertifiedLoss(model, relaxation, eps=0.1, norm="l2")


def test_networks_that_do_not_begin_with_an_affine_layer_are_refused() -> None:
    model, x = nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), torch.rand(2, 4)
    with pytest.raises(GLSError, match="begins with linear layers or convolutions, got Relu"):
        BoundEngine(model, x).margins(l2_ball(x, 0.1), torch.tensor([0, 1]), get_relaxation("crown"))


def test_chunks_and_parts_keep_the_ball() -> None:
    model, x, y = network("conv")
    whole, chunked = (CertifiedLoss(model, "crown", eps=0.3, norm=2, chunk_mib=mib) for mib in (None, 0))
    losses, gradients = [], []
    for criterion in (whole, chunked):
        losses.append(criterion(x, y))
        gradients.append(torch.autograd.grad(losses[-1], list(model.parameters()), allow_unused=True))
    assert torch.allclose(losses[0], losses[1], rtol=1e-5)
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.allclose(one, other, atol=1e-5))
    assert isinstance(l2_ball(x, 0.1)[1:], Ball)
    assert float(losses[0]) < float(CertifiedLoss(model, "crown", eps=0.3)(x, y))


def test_a_population_is_evaluated_in_the_ball() -> None:
    model, x, y = network("dense")
    estimator = PGPE(CertifiedLoss(model, "crown", eps=0.3, norm="l2"), model, sigma=1e-6, population=4)
    assert float(estimator(x, y).detach()) == pytest.approx(
        float(CertifiedLoss(model, "crown", eps=0.3, norm="l2")(x, y)), rel=1e-3
    )


@pytest.mark.parametrize("loss", ["pgd", "sabr", "mtl", "taps"])
def test_losses_with_attacks_refuse(loss: str) -> None:
    model, _, _ = network("flat")
    with pytest.raises(GLSError, match="works in linf boxes"):
        CertifiedLoss(model, "ibp", eps=0.1, loss=loss, norm="l2")


def test_certify_with_incomplete_stages_alone() -> None:
    model, x, y = network("conv")
    small, large = (certify(model, x, y, eps=eps, norm="l2") for eps in (0.001, 5.0))
    assert small.certified == 1.0 and large.certified == 0.0
    assert small.settings["norm"] == "l2" and {record.stage for record in small} <= {"ibp", "crown-ibp", "crown"}
    assert not any(record.verdict == "falsified" for record in large)
    eps = 0.05
    balls, boxes = certify(model, x, y, eps=eps, norm=2, domain=None), certify(model, x, y, eps=eps, stages=["crown"])
    assert balls.certified >= boxes.certified
    for arguments, message in [
        ({"stages": ["ibp", "pgd"]}, "stage 'pgd' works in linf boxes"),
        ({"stages": ["bab"]}, "stage 'bab' works in linf boxes"),
        ({"cross_check": True}, "cross_check attacks in linf boxes"),
        ({"eps": torch.full((4,), 0.1)}, "one eps for all samples"),
        ({"norm": "l1"}, "unknown norm 'l1': expected one of linf, l2"),
    ]:
        with pytest.raises(GLSError, match=message):
            certify(model, x, y, **{"eps": 0.1, "norm": "l2", **arguments})  # type: ignore[arg-type]


def test_train_and_certify_a_run(tmp_path: Path, glscert: Glscert) -> None:
    options = ["--net", "cnn3-tiny", "--epochs", 1, "--limit", 100, "--eval-samples", 20, "--eps", 1.5]
    assert glscert("train", "--out", tmp_path / "run", "--norm", "l2", "--relaxation", "crown-ibp", *options).code == 0
    run = gls_lirpa.load_run(tmp_path / "run")
    assert run.config.norm == "l2" and run.certify(samples=3).settings["norm"] == "l2"
    answer = glscert("certify", tmp_path / "run", "--samples", 5)
    assert answer.code == 0 and "(l2)" in answer.out, answer.err
    assert (tmp_path / "run" / "certify-l2-eps1.5-test" / "summary.json").exists()
    answer = glscert("certify", tmp_path / "run", "--samples", 5, "--stages", "bab")
    assert answer.code == 2 and answer.err.count("\n") == 1 and "not in l2 balls" in answer.err
    answer = glscert("train", "--out", tmp_path / "no", "--norm", "l2", "--loss", "sabr", *options)
    assert answer.code == 2 and answer.err.count("\n") == 1

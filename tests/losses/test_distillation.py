"""Distillation beside the bound against its formula; the teacher stays as it is; runs that learn from runs."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gls_lirpa import PGPE, CertifiedLoss
from gls_lirpa.attacks import pgd_points
from gls_lirpa.base.boxes import linf_box
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import ConfigError
from gls_lirpa.losses.distillation import soft_divergence
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.training.config import TrainConfig
from tests.helpers.baseline_reference import EXACT, batch_of, batchnorm_net, gradients, mlp, seeded
from tests.helpers.command import Glscert

ALPHA, BETA, TEMPERATURE, STEPS = 0.3, 0.6, 2.0, 4
OPTIONS = {"alpha": ALPHA, "beta": BETA, "temperature": TEMPERATURE, "steps": STEPS}


@pytest.mark.parametrize("chunk_mib", [None, 0])
@pytest.mark.parametrize("relaxation", ["ibp", "crown-ibp", "crown"])
def test_formula(relaxation: str, chunk_mib: int | None) -> None:
    model, teacher, (x, y) = mlp(4, 6, 5, 3), mlp(4, 9, 3, seed=5), batch_of(4, 3)
    criterion = CertifiedLoss(
        model, relaxation, eps=0.1, loss="distill", teacher=teacher, chunk_mib=chunk_mib, **OPTIONS
    )
    loss = criterion(x, y, generator=seeded())
    found = gradients(model, loss)
    engine = BoundEngine(model, x)
    logits = model(pgd_points(model, x, y, linf_box(x, 0.1), steps=STEPS, generator=seeded()))
    with torch.no_grad():
        wanted = torch.softmax(teacher(x) / TEMPERATURE, 1)
    divergence = (wanted * (wanted.log() - torch.log_softmax(logits / TEMPERATURE, 1))).sum(1).mean()
    attacked = (1 - BETA) * F.cross_entropy(logits, y) + BETA * TEMPERATURE**2 * divergence
    margins = engine.margins(linf_box(x, 0.1), y, RELAXATIONS.get(relaxation))
    expected = (1 - ALPHA) * attacked + ALPHA * torch.log1p(torch.exp(-margins).sum(1)).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=EXACT)
    assert torch.allclose(found, gradients(model, expected), atol=EXACT)
    assert all(p.grad is None for p in teacher.parameters())


def test_without_the_teachers_share_it_is_mtl() -> None:
    model, (x, y) = mlp(4, 6, 5, 3), batch_of(4, 3)
    common = {"eps": 0.1, "alpha": ALPHA, "steps": STEPS, "radius": 1.5}
    mtl = CertifiedLoss(model, "crown", loss="mtl", **common)(x, y, generator=seeded())
    teacher = mlp(4, 9, 3, seed=5)
    own = CertifiedLoss(model, "crown", loss="distill", beta=0.0, teacher=teacher, **common)(x, y, generator=seeded())
    assert own.item() == pytest.approx(mtl.item(), abs=EXACT)


def test_divergence_of_known_distributions() -> None:
    teacher, student = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log()
    expected = 0.8 * math.log(1.6) + 0.2 * math.log(0.4)
    assert soft_divergence(student, teacher, 1.0).item() == pytest.approx(expected, abs=1e-6)


def test_the_teacher_stays_as_it_is() -> None:
    """Its BatchNorm does not move, its mode is kept, and zeroth-order estimates take it along."""
    teacher, x, y = batchnorm_net()
    teacher.train()
    before = copy.deepcopy(teacher.state_dict())
    model = mlp(x[0].numel(), 6, 3)
    criterion = CertifiedLoss(model, "ibp", eps=0.05, loss="distill", teacher=teacher, **OPTIONS)
    PGPE(criterion, model, sigma=1e-2, population=4)(x, y).backward()
    criterion(x, y).backward()
    assert teacher.training
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())


def test_who_needs_a_teacher_says_so() -> None:
    model = mlp(4, 5, 3)
    for options in ({"loss": "distill"}, {"loss": "robust", "teacher": model}):
        with pytest.raises(ConfigError, match="teacher") as caught:
            CertifiedLoss(model, "ibp", eps=0.1, **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="needs --teacher RUN"):
        TrainConfig(loss="distill")
    with pytest.raises(ConfigError, match="learns from no teacher"):
        TrainConfig(teacher="run")
    x, y = batch_of(4, 3)
    with pytest.raises(ConfigError, match="the teacher has 5 classes, the student 3"):
        CertifiedLoss(model, "ibp", eps=0.1, loss="distill", teacher=mlp(4, 5))(x, y)


def test_a_run_learns_from_another(glscert: Glscert, tmp_path: Path) -> None:
    common = ["--limit", "60", "--epochs", "1", "--estimator", "grad"]
    assert glscert("train", *common, "--loss", "pgd", "--net", "cnn3", "--out", tmp_path / "teacher").code == 0
    student = ["--loss", "distill", "--relaxation", "crown", "--net", "cnn3-tiny", "--set", "steps=2"]
    trained = glscert("train", *common, *student, "--teacher", tmp_path / "teacher", "--out", tmp_path / "student")
    assert trained.code == 0, trained.err
    missing = glscert("train", *common, *student, "--teacher", tmp_path / "nobody", "--out", tmp_path / "other")
    assert missing.code == 2 and "nobody" in missing.err

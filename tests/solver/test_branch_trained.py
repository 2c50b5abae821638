"""Branch and bound on trained networks decides as the MILP does, and keeps its time limit on hard ones.

Mutations that made a test of this file fail: bounds of branch and bound 0.3 too high, subproblems closed before
they are proven, its counterexamples withheld, the sign of the MILP's bounds, the time limit ignored in the tree
or before it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.attacks import pgd_points, violation, worst_margin
from gls_lirpa.base.boxes import linf_box
from gls_lirpa.certification import StageOptions, Summary, certify
from gls_lirpa.models import build_model
from gls_lirpa.training import TrainConfig, load_run, train
from tests.helpers.reporters import Quiet

# A weak attack leaves counterexamples to the complete verifiers.
WEAK = StageOptions(attack_steps=1, attack_restarts=1)


RECIPES: dict[str, dict[str, Any]] = {
    "pgd": {"net": "cnn3", "loss": "pgd", "loss_options": {"steps": 2}, "eps": 0.01, "eps_shape": "none", "epochs": 3},
    "crown": {"net": "cnn3-tiny", "relaxation": "crown", "eps": 0.05, "eps_anneal_epochs": 3, "epochs": 4},
}


@pytest.mark.parametrize(("method", "eps"), [("pgd", 0.055), ("crown", 0.1)])
def test_branch_and_bound_equals_the_milp_on_trained_networks(tmp_path: Path, method: str, eps: float) -> None:
    config = TrainConfig(init="kaiming-uniform", lr=2e-2, batch_size=64, eval_samples=64, seed=1, **RECIPES[method])
    train(config, tmp_path / "run", reporter=Quiet())
    run = load_run(tmp_path / "run")
    x, y = run.dataset.test.batch(range(60))
    # The limit would end a search without end; none of these takes more than a few seconds.
    found, exact = (
        certify(run.model, x, y, eps=eps, stages=stages, timeout=300.0, options=WEAK)
        for stages in (("pgd", "crown", "bab"), ("pgd", "milp"))
    )
    assert [record.verdict for record in found] == [record.verdict for record in exact]
    assert Summary.of(found).unknown == 0 and Summary.of(found).certified == Summary.of(exact).certified > 0.2
    decided = Counter((record.stage, record.verdict) for record in (*found, *exact))
    assert decided["crown", "verified"] >= 5 and decided["pgd", "falsified"] >= 4, "not all is left to the complete"
    for stage in ("bab", "milp"):
        assert decided[stage, "verified"] >= 3 and decided[stage, "falsified"] >= 1


def robust_looking(net: str, eps: float) -> tuple[nn.Module, Tensor, Tensor]:
    """A random network and a sample which an attack cannot break, at a radius far too large for a proof."""
    torch.manual_seed(0)
    model = build_model(net, in_shape=(1, 8, 8), classes=10, init="kaiming-uniform").eval()
    x = torch.rand(1, 1, 8, 8)
    with torch.no_grad():
        label = model(x).argmax(1)
        point = pgd_points(model, x, label, linf_box(x, eps), steps=50, restarts=5, objective=violation)
        margin, worst = (float(worst_margin(model(p), label)) for p in (x, point))
        list(model.modules())[-1].bias[label] += 0.2 * (margin - worst) - min(worst, 0.0)
    return model, x, label


@pytest.mark.parametrize(("net", "eps"), [("cnn3", 0.3), ("cnn5-l", 0.05)], ids=["tree", "preparation"])
def test_a_search_without_end_returns_its_bound_within_one_and_a_half_times_the_limit(net: str, eps: float) -> None:
    model, x, label = robust_looking(net, eps)
    (crown,) = certify(model, x, label, eps=eps, stages=["crown"])
    limit = 3.0
    certify(model, x, label, eps=eps, stages=["crown", "bab"], timeout=limit)  # compiles kernels where none are cached
    # Processor time: on a busy machine it is below the clock's, and a limit that is ignored exceeds both.
    started = time.process_time()
    (record,) = certify(model, x, label, eps=eps, stages=["crown", "bab"], timeout=limit)
    assert time.process_time() - started <= 1.5 * limit
    assert (record.verdict, record.stage, record.exhausted) == ("unknown", "bab", True)
    assert crown.bound is not None and record.bound is not None and math.isfinite(record.bound)
    assert crown.bound <= record.bound < 0

"""Smoothed training of a real network on digits, and the training loop on actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gls_lirpa.data import load_dataset
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.training import Interrupted, RunFolder, TrainConfig, load_run, train
from gls_lirpa.training.evaluation import held_out_accuracy
from gls_lirpa.training.runs import make_network
from tests.helpers.reporters import Quiet, untimed

EPS = 0.08
BASE: dict[str, Any] = {
    "net": "cnn3-tiny",
    "eps": EPS,
    "eps_shape": "none",
    "batch_size": 128,
    "seed": 1,
    "eval_samples": 144,
}


def certified(run: Path) -> float:
    loaded = load_run(run)
    x, _ = loaded.dataset.test.batch(range(1))
    engine = BoundEngine(loaded.model, x)
    crown = RELAXATIONS.get("crown")
    return held_out_accuracy(
        loaded.model, engine, loaded.dataset.test, eps=EPS, relaxation=crown, samples=359, device="cpu"
    ).certified


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network trained by PGD for a quarter of the radius: accurate, hardly certifiable at the whole."""
    out = tmp_path_factory.mktemp("warm") / "run"
    train(
        TrainConfig(**{**BASE, "eps": EPS / 4, "loss": "pgd", "loss_options": {"steps": 4}, "epochs": 12, "lr": 1e-2}),
        out,
        reporter=Quiet(),
    )
    return out


@pytest.mark.parametrize(
    ("estimator", "options", "epochs", "lr", "gain"),
    [
        ("rgs", {"sigma": 1e-3, "samples": 2}, 4, 1e-2, 3.0),
        ("pgpe", {"sigma": 1e-2, "population": 32}, 3, 5e-3, 2.0),
    ],
)
def test_smoothed_crown_training_raises_certified_accuracy_above_the_warm_start(
    tmp_path: Path, warm: Path, estimator: str, options: dict[str, float], epochs: int, lr: float, gain: float
) -> None:
    """The gain is several times what the warm start's accuracy varies by from rounding or seeds; with
    the estimate's sign flipped, or its noise not matching its losses, accuracy falls instead."""
    config = TrainConfig(
        **{
            **BASE,
            "estimator": estimator,
            "estimator_options": options,
            "epochs": epochs,
            "lr": lr,
            "init_from": str(warm),
        }
    )
    reporter = Quiet()
    train(config, tmp_path / "run", reporter=reporter)
    losses = [row["loss"] for row in reporter.rows]
    assert losses[-1] < losses[0]
    untrained = make_network(config, load_dataset("digits"))
    folder = RunFolder(tmp_path / "untrained")
    folder.create(config)
    folder.save(folder.weights_file, {"model": untrained.state_dict()})
    reached = certified(tmp_path / "run")
    assert reached >= certified(warm) + gain
    assert reached >= certified(folder.path) + gain


def test_a_resumed_run_on_two_actors_equals_an_uninterrupted_one_without(tmp_path: Path) -> None:
    options = {**BASE, "limit": 150, "epochs": 2, "batch_size": 64, "estimator": "pgpe"}
    options["estimator_options"] = {"sigma": 1e-2, "population": 8}
    train(TrainConfig(**options), tmp_path / "whole", reporter=Quiet())
    actors = TrainConfig(**{**options, "actors": 2})
    with pytest.raises(Interrupted):
        train(actors, tmp_path / "parts", reporter=Quiet(3))
    train(actors, tmp_path / "parts", reporter=Quiet(), resume=True)
    assert untimed(RunFolder(tmp_path / "whole").metrics()) == untimed(RunFolder(tmp_path / "parts").metrics())

"""Fronts and areas against brute force; a whole study on digits; resuming it; several fronts in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gls_lirpa.errors import CheckpointError, ConfigError
from gls_lirpa.estimators import ESTIMATORS
from gls_lirpa.losses import LOSSES
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.tuning.fronts import MethodFront, fronts_table, read_front
from gls_lirpa.tuning.job import fronts_job, tune_job
from gls_lirpa.tuning.pareto import dominates, front, hypervolume, ranked
from gls_lirpa.tuning.space import applied, space_of
from gls_lirpa.tuning.study import Final, Plan, Study, load_study
from tests.helpers.command import Glscert

PLAN = Plan(trials=3, rungs=2, finalists=1, seeds=2, samples=4, timeout=0.5)
OPTIONS: dict[str, Any] = {
    "dataset": "digits",
    "net": "cnn3-tiny",
    "loss": "mtl",
    "relaxation": "ibp",
    "estimator": "rgs",
    "assignments": (("steps", "1"),),
    "limit": 60,
    "val_fraction": 0.2,
    "eval_samples": 4,
    "seed": 0,
}


def test_area_against_counting() -> None:
    """Points on a lattice: the area is the number of unit cells that some point dominates."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        points = [(float(a), float(b)) for a, b in rng.integers(0, 8, size=(5, 2))]
        cells = [(a, b) for a in range(8) for b in range(8) if any(p[0] > a and p[1] > b for p in points)]
        assert hypervolume(points, (0.0, 0.0)) == len(cells)
    assert hypervolume([(1.0, 1.0)], (2.0, 0.0)) == 0.0


def test_ranks_go_front_by_front() -> None:
    rng = np.random.default_rng(1)
    points = [(float(a), float(b)) for a, b in rng.random((30, 2))]
    order = ranked(points)
    assert sorted(order) == list(range(30))
    first = front(points)
    assert set(order[: len(first)]) == set(first)
    assert not any(dominates(points[order[j]], points[order[i]]) for i in range(30) for j in range(i + 1, 30))


def test_every_loss_and_estimator_has_a_space_whose_values_fit() -> None:
    for loss in LOSSES:
        for estimator in ESTIMATORS:
            teacher = "run" if LOSSES.get(loss).teacher else None
            config = TrainConfig(loss=loss, relaxation="ibp", estimator=estimator, eps=0.7, teacher=teacher)
            space = space_of(config)
            assert len({d.name for d in space}) == len(space)
            for end in ("low", "high"):
                chosen = applied(config, {d.name: getattr(d.range, end) for d in space})
                assert chosen.lr == getattr(space[0].range, end)
                assert chosen.trained_eps <= 1.0
                assert chosen.epochs == (15 if end == "low" else 30)
    relative = TrainConfig(estimator="rgs", estimator_options={"relative": True})
    assert space_of(relative)[-1].range.high > space_of(TrainConfig(estimator="rgs"))[-1].range.high


def test_plan() -> None:
    plan = Plan(trials=27, rungs=3, finalists=3, seeds=3)
    assert plan.sizes() == [27, 9, 3]
    assert [plan.share(rung) for rung in range(3)] == pytest.approx([1 / 9, 1 / 3, 1.0])
    assert plan.epochs(9) == pytest.approx(27 + 27 + 27 + 3 * 2 * 9)
    for wrong in ({"trials": 2, "rungs": 2}, {"seeds": 0}, {"samples": 0}):
        with pytest.raises(ConfigError, match="expected"):
            Plan(**wrong)


def test_a_study_and_its_resumption(tmp_path: Path) -> None:
    out = tune_job(plan=PLAN, options=OPTIONS, epochs=3, out=tmp_path / "study", workers=1)
    study = load_study(out)
    assert [sum(e["rung"] == rung and e["seed"] == 0 for e in study["evaluations"]) for rung in (0, 1)] == [3, 1]
    (final,) = study["finals"]
    assert len(final["points"]) == 2
    runs = sorted((out / "runs").iterdir())
    assert len(runs) == 3 + 1 + 1
    for run in runs:
        settings = json.loads((next(run.glob("certify-*")) / "settings.json").read_text())
        assert settings["split"] == "val", "test images are never looked at"
        config = json.loads((run / "config.json").read_text())
        chosen = study["proposed"][int(run.name[1:4])]["epochs"]
        assert isinstance(chosen, int) and 2 <= chosen <= 3
        assert config["epochs"] == (1 if "-r0-" in run.name else chosen)
    assert {file.name for file in out.glob("front.*")} == {"front.md", "front.csv", "front.png"}
    # Killed after the first round of proposals: the same study comes out.
    stamps = {run: (run / "weights.pt").stat().st_mtime_ns for run in runs}
    (out / "study.json").write_text(json.dumps({**study, "evaluations": study["evaluations"][:2], "finals": []}))
    tune_job(plan=PLAN, options=OPTIONS, epochs=3, out=out, workers=1)
    again = load_study(out)
    assert again["proposed"] == study["proposed"]
    keys = ("trial", "rung", "seed", "natural", "certified")
    assert [[e[k] for k in keys] for e in again["evaluations"]] == [[e[k] for k in keys] for e in study["evaluations"]]
    assert stamps == {run: (run / "weights.pt").stat().st_mtime_ns for run in runs}, "nothing is trained twice"
    with pytest.raises(ConfigError, match="study with other settings"):
        tune_job(plan=PLAN, options={**OPTIONS, "loss": "cc"}, epochs=3, out=out, workers=1)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no study"):
        tune_job(plan=PLAN, options=OPTIONS, epochs=3, out=tmp_path, workers=1)
    assert [file.name for file in tmp_path.iterdir()] == ["weights.pt"]


def test_held_out_images_are_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held-out images"):
        tune_job(plan=PLAN, options={**OPTIONS, "val_fraction": 0.0}, out=tmp_path, workers=1)


def test_runs_that_all_failed_are_an_error_and_tried_again(tmp_path: Path) -> None:
    config = TrainConfig(dataset="folder", data_root=str(tmp_path / "nowhere"), estimator="rgs", val_fraction=0.2)
    for _ in range(2):
        study = Study(config, PLAN, tmp_path / "study")
        with pytest.raises(ConfigError, match=r"none of 3 runs could be finished: .*nowhere"):
            study.run(workers=1, console=Console(quiet=True))
        assert load_study(tmp_path / "study")["evaluations"] == []


def test_fronts_of_several_methods(glscert: Glscert, tmp_path: Path) -> None:
    def write(method: str, points: list[tuple[float, float]], trials: int = 3) -> Path:
        finals = [{"trial": i, "values": {"lr": 0.01}, "points": [p, p]} for i, p in enumerate(points)]
        evaluations = [{"seconds": 1800.0}] * 2
        content = {"method": method, "header": {}, "epochs": 10.0, "proposed": [{}] * trials, "finals": finals}
        folder = tmp_path / method
        folder.mkdir()
        (folder / "study.json").write_text(json.dumps({**content, "evaluations": evaluations}))
        return folder

    ibp = write("ibp", [(95.0, 90.0), (94.0, 91.0), (93.5, 90.5)])
    crown = write("crown", [(97.0, 92.0)])
    result = glscert("bench", "fronts", "--study", ibp, "--study", crown, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    text = (tmp_path / "out" / "fronts.md").read_text()
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith(("| ibp", "| crown"))]
    # Above (93, 90): crown 4 · 2; ibp's front is (94, 91) and (95, 90), the latter no higher than the reference.
    assert [[cell.strip() for cell in row][:2] for row in rows] == [["crown", "8.00"], ["ibp", "1.00"]]
    assert "budgets differ" not in text
    assert (tmp_path / "out" / "fronts.png").stat().st_size > 1000
    uneven = [read_front(ibp), read_front(write("more", [(96.0, 91.0)], trials=9))]
    assert "budgets differ" in fronts_table(uneven).note
    assert glscert("bench", "fronts").code == 2
    with pytest.raises(CheckpointError, match="not a study"):
        fronts_job([tmp_path / "nowhere"], out=tmp_path)
    assert MethodFront("m", (Final(0, {}, ((1.0, 2.0), (3.0, 4.0))),), 1, 1.0, 1.0).points == [(2.0, 3.0)]

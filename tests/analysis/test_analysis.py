"""Scores, toys and training curves: against closed forms and known answers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from gls_lirpa.analysis import (
    Scores,
    jump_toy,
    smoothness_scores,
    training_dynamics,
    valley_toy,
)
from gls_lirpa.analysis.toys import PiecewiseLinear
from gls_lirpa.errors import CheckpointError, ConfigError, DataError
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.runs import RunFolder

# -- scores ----------------------------------------------------------------------------------------


def test_scores_of_a_line_are_its_slope_and_nothing_else() -> None:
    found = smoothness_scores(3.0 - 2.0 * 0.1 * np.arange(50), step=0.1)
    assert found.max_slope == pytest.approx(2.0, rel=1e-12)
    assert found.curvature == pytest.approx(0.0, abs=1e-11)
    assert found.nonconvexity == pytest.approx(0.0, abs=1e-14)


def test_scores_of_a_step() -> None:
    """A jump of 3 has slope 3/h and two second differences of 3."""
    n, step = 10, 0.5
    found = smoothness_scores([0.0] * (n // 2) + [3.0] * (n // 2), step=step)
    assert found.max_slope == pytest.approx(3.0 / step, rel=1e-12)
    assert found.curvature == pytest.approx(2 * 3.0 / step**2 / (n - 2), rel=1e-12)
    # The lowest chord over the first high point goes from the last low one to the end: 3 · 1/5 of the way up.
    assert found.nonconvexity == pytest.approx(3.0 * (1 - 1 / 5), rel=1e-12)


def test_scores_of_a_parabola_and_its_negative() -> None:
    t = np.linspace(-1.0, 1.0, 81)
    step = t[1] - t[0]
    up, down = smoothness_scores(t**2, step=step), smoothness_scores(-(t**2), step=step)
    assert up.max_slope == pytest.approx(2.0 - step, rel=1e-9)
    assert up.curvature == pytest.approx(2.0, rel=1e-9)
    assert up.nonconvexity == pytest.approx(0.0, abs=1e-12)
    assert down.curvature == pytest.approx(2.0, rel=1e-9)
    assert down.nonconvexity == pytest.approx(1.0, rel=1e-9)  # the chord from −1 to 1, at 0


def test_scores_of_a_sine() -> None:
    t = np.linspace(0.0, 2 * math.pi, 2001)
    found = smoothness_scores(np.sin(t), step=t[1] - t[0])
    assert found.max_slope == pytest.approx(1.0, abs=1e-5)
    assert found.curvature == pytest.approx(2 / math.pi, abs=1e-3)  # the mean of |sin|
    # The lowest chord from (0, 0) touches at u with sin u = u cos u, u in (π, 2π): u = 4.4934, slope cos u.
    slope = math.cos(4.493409457909064)
    peak = math.acos(slope)
    assert found.nonconvexity == pytest.approx(math.sin(peak) - slope * peak, abs=1e-4)


def test_deviation_from_convexity_is_the_largest_over_all_triples() -> None:
    values = np.random.default_rng(0).normal(size=25)
    largest = max(
        values[j] - ((k - j) * values[i] + (j - i) * values[k]) / (k - i)
        for i, j, k in itertools.combinations(range(25), 3)
    )
    assert smoothness_scores(values, step=1.0).nonconvexity == pytest.approx(largest, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_of_a_curve_with_a_hole_are_nan(bad: float) -> None:
    found = smoothness_scores([0.0, bad, 1.0, 2.0], step=1.0)
    assert all(math.isnan(value) for value in (found.max_slope, found.curvature, found.nonconvexity))
    again = Scores.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert math.isnan(again.curvature)


def test_scores_refuse_what_is_no_curve() -> None:
    with pytest.raises(DataError, match="at least 3"):
        smoothness_scores([1.0, 2.0], step=1.0)
    with pytest.raises(ConfigError, match="step > 0"):
        smoothness_scores([1.0, 2.0, 3.0], step=0.0)


# -- toys ------------------------------------------------------------------------------------------


def _mean_by_quadrature(values: object, sigma: float) -> float:
    """E[f(σz)] from a callable, by the trapezoid rule on 12 standard deviations."""
    z = np.linspace(-12.0, 12.0, 48001)
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return float((values(sigma * z) * density).sum() * (z[1] - z[0]))  # type: ignore[operator]


def test_crown_bound_of_the_one_neuron_network_jumps_at_zero() -> None:
    toy = jump_toy()
    w = np.array(toy.weights)
    assert 0.0 in toy.weights
    assert toy.original == pytest.approx(np.where(w > 0, w, 1.0).tolist(), abs=1e-7)
    middle = toy.weights.index(0.0)
    assert toy.original[middle] - toy.original[middle + 1] > 0.95


@pytest.mark.parametrize("sigma", [0.25, 0.5, 1.0])
def test_smoothed_jump_is_the_gaussian_mean_of_the_bound(sigma: float) -> None:
    toy = jump_toy()
    for place in (20, 95, 100, 120):
        w = toy.weights[place]
        expected = _mean_by_quadrature(lambda e, w=w: np.where(w + e > 0, w + e, 1.0), sigma)
        assert toy.smoothed[sigma][place] == pytest.approx(expected, abs=2e-4)


def test_smoothing_lessens_every_score_of_the_jump() -> None:
    toy = jump_toy()
    step = toy.weights[1] - toy.weights[0]
    rows = [smoothness_scores(curve, step=step) for curve in (toy.original, *toy.smoothed.values())]
    for before, after in itertools.pairwise(rows):
        assert after.max_slope < before.max_slope
        assert after.curvature < before.curvature
        assert after.nonconvexity < before.nonconvexity


def test_valley_keeps_loses_and_misplaces_its_minima() -> None:
    toy = valley_toy()
    bad = [[w for w in toy.local_minima(s) if -1.5 <= w <= -0.25] for s in (0.0, 0.25, 0.5, 1.0)]
    assert [len(found) for found in bad] == [1, 1, 0, 0]
    assert bad[0] == [pytest.approx(-0.75, abs=0.011)]
    assert toy.minimum() == pytest.approx(1.0, abs=1e-9)
    assert abs(toy.minimum(0.5) - 1.0) < 0.15
    assert abs(toy.minimum(1.0) - 1.0) > 0.9


@pytest.mark.parametrize("sigma", [0.25, 1.0])
def test_smoothed_piecewise_linear_is_its_gaussian_mean(sigma: float) -> None:
    loss = PiecewiseLinear(corners=(-1.0, 0.5), slopes=(-1.0, 2.0, 0.5), start=0.3)
    for w in (-2.0, -0.7, 0.4, 3.0):
        expected = _mean_by_quadrature(lambda e, w=w: loss(w + e), sigma)
        assert float(loss.smoothed(np.array([w]), sigma=sigma)[0]) == pytest.approx(expected, abs=1e-6)


def test_toys_refuse_a_sigma_of_zero() -> None:
    with pytest.raises(ConfigError, match="sigma > 0"):
        jump_toy(sigmas=(0.0,))
    with pytest.raises(ConfigError, match="sigma > 0"):
        valley_toy(sigmas=(-1.0,))


# -- training curves -------------------------------------------------------------------------------


def _run(path: Path, estimator: str, losses: list[float]) -> Path:
    folder = RunFolder(path)
    folder.create(TrainConfig(estimator=estimator))
    for epoch, loss in enumerate(losses, 1):
        row = {"epoch": epoch, "loss": loss, "eps": 0.1 * epoch, "natural": 90.0, "certified": 10.0 * epoch}
        folder.append_metrics({**row, "held_out": "val"})
    return path


def test_dynamics_reads_finished_epochs_of_runs(tmp_path: Path) -> None:
    first, second = _run(tmp_path / "a", "grad", [3.0, 2.0]), _run(tmp_path / "b", "rgs", [2.5, 1.5, 1.0])
    with RunFolder(second).metrics_file.open("a") as file:
        file.write('{"epoch": 4, "lo')  # a run that was killed
    found = training_dynamics([first, second])
    assert [run.label for run in found.runs] == ["robust·crown·grad", "robust·crown·rgs"]
    assert found.runs[0].loss == [3.0, 2.0]
    assert found.runs[1].epochs == [1.0, 2.0, 3.0]
    assert found.runs[1].certified == [10.0, 20.0, 30.0]
    assert found.runs[1].held_out == "val"
    assert found.runs[1].annealed == 3.0
    assert json.loads(json.dumps(found.to_dict()))["runs"][0]["loss"] == [3.0, 2.0]


def test_dynamics_tells_runs_of_one_method_apart(tmp_path: Path) -> None:
    paths = [_run(tmp_path / name, "grad", [1.0]) for name in ("a", "b")]
    labels = [run.label for run in training_dynamics(paths).runs]
    assert labels == ["robust·crown·grad (a)", "robust·crown·grad (b)"]
    assert training_dynamics(paths, labels=["x", "y"]).runs[1].label == "y"


def test_dynamics_refuses_folders_without_metrics(tmp_path: Path) -> None:
    empty = _run(tmp_path / "a", "grad", [])
    with pytest.raises(CheckpointError, match="no metrics yet"):
        training_dynamics([empty])
    RunFolder(empty).append_metrics({"epoch": 1, "loss": 1.0})
    with pytest.raises(CheckpointError, match="no number 'eps'"):
        training_dynamics([empty])
    with pytest.raises(CheckpointError, match="does not exist"):
        training_dynamics([tmp_path / "missing"])
    with pytest.raises(ConfigError, match="at least one"):
        training_dynamics([])
    with pytest.raises(ConfigError, match="one label"):
        training_dynamics([empty], labels=["a", "b"])

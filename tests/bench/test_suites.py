"""Every suite end to end at its smallest scale, on files of a few random images."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from gls_lirpa.bench.job import bench_job
from gls_lirpa.bench.suite import Budget, Suite, planned_runs
from gls_lirpa.bench.suites import SUITES
from gls_lirpa.bench.tables import cell_table
from gls_lirpa.errors import ConfigError
from gls_lirpa.training.presets import PRESETS
from tests.helpers.datasets import make_cifar_binary, make_mnist, make_tinyimagenet

SMALLEST = Budget(epochs_scale=0.001, samples=1, seeds=1)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for make in (make_mnist, make_cifar_binary, make_tinyimagenet):
        make(root)
    return root


def _smallest(suite: Suite) -> Suite:
    """One step of two images, four perturbed networks and the smallest net with the same layers in each cell."""
    nets = {"cnn5-l": "cnn5", "cnn7": "cnn3", "cnn7-bn": "cnn3", "cnn5": "cnn3"}
    cells = []
    for cell in suite.cells:
        options = {**cell.options, "limit": 6, "batch_size": 2, "eval_samples": 2, "val_fraction": 0.1}
        options["net"] = nets.get(cell.options["net"], cell.options["net"])
        if options["estimator"] == "pgpe":
            options["population"] = 4
        cells.append(dataclasses.replace(cell, options=options))
    settings = {**suite.settings}
    if suite.renderer in ("landscape", "ablation"):
        settings |= {"samples": 2, "points": 5, "batch": 2}
    if settings.get("option") == "population":
        settings |= {"values": (2, 4)}
    if suite.renderer == "tightness":
        settings |= {"points": 3}
    return dataclasses.replace(suite, cells=tuple(cells), settings=settings, timeout=0.2)


def _one_per_renderer() -> list[str]:
    """The suite with the fewest cells of each kind: suites of one kind differ in their data alone."""
    ordered = sorted((name for name in SUITES if name != "speed"), key=lambda name: -len(SUITES.get(name).cells))
    return sorted({SUITES.get(name).renderer: name for name in ordered}.values())


@pytest.mark.parametrize("name", _one_per_renderer())
def test_suite_end_to_end(name: str, images: Path, tmp_path: Path) -> None:
    suite = _smallest(SUITES.get(name))
    page = bench_job(suite, out=tmp_path, budget=SMALLEST, workers=1, data_root=str(images))
    assert page is not None
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert [(row["name"], row["reason"]) for row in rows if row["status"] != "done"] == []
    assert len(rows) == len(suite.cells)
    text = page.read_text()
    assert "Shortened" in text
    assert text.count("data:image/png;base64,") == len(list(tmp_path.glob("*.png")))
    assert {"report.md", "report.json"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize("name", [name for name in SUITES if SUITES.get(name).preset])
@pytest.mark.parametrize("preset", ["paper", "tuned"])
def test_the_recipe_is_what_it_says(name: str, preset: str, tmp_path: Path) -> None:
    suite = SUITES.get(name).with_preset(preset)
    for run in planned_runs(suite, Budget(), out=tmp_path, changes={}):
        config, cell = run.config, run.cell
        assert cell.paper is None or preset == "paper"
        recipe = "tuned" if preset == "tuned" else "paper" if cell.paper is None else cell.paper.recipe
        assert config.preset is not None and PRESETS.get(config.preset).recipe == recipe
        if cell.once:
            assert config.loss == "pgd"
        elif config.estimator == "pgpe":
            assert run.needs is not None and "pgd" in run.needs
        else:
            assert (config.init_from is not None) == (cell.start is not None) == ("from ibp" in cell.row)
        if recipe == "literature":
            assert (config.net, config.estimator, config.warmup > 0) == ("cnn7-bn", "grad", True)
        if recipe == "paper":
            assert (config.val_fraction, config.l1, config.warmup) == (0.0, 0.0, 0.0)
            assert config.lr == (3e-4 if config.estimator == "pgpe" else 5e-4)


def test_a_table_says_which_recipe() -> None:
    note = cell_table(SUITES.get("cnn7"), []).note
    assert "Recipe: paper, but with learning rate 0.0005" in note
    assert "literature for cnn7-bn ibp, cnn7-bn mtl-ibp, cnn7-bn taps" in note
    assert cell_table(SUITES.get("cnn7").with_preset("tuned"), []).note.endswith("Recipe: tuned.")


def test_no_choice_of_recipe() -> None:
    with pytest.raises(ConfigError, match="'paradox-digits' has a recipe of its own"):
        SUITES.get("paradox-digits").with_preset("paper")
    with pytest.raises(ConfigError, match="unknown recipe 'best'"):
        SUITES.get("cnn5").with_preset("best")

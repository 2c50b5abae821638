"""Methods from outside the package: a loss, a relaxation and an estimator in one file of the user's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gls_lirpa.base.options import Option, Options, Range
from gls_lirpa.base.registry import Registry
from gls_lirpa.base.user_code import load_plugins, loaded_plugins
from gls_lirpa.errors import ConfigError
from gls_lirpa.estimators import ESTIMATORS, GRAD, EstimatorMethod
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.dry_run import PROBED_MEMBERS, probe
from gls_lirpa.training.presets import get_preset
from gls_lirpa.tuning.space import Dimension, space_of

PLUGIN = """
import torch.nn.functional as F

from gls_lirpa.base.options import Option, Options
from gls_lirpa.estimators import ESTIMATORS, GRAD, EstimatorMethod
from gls_lirpa.losses import LOSSES, Loss
from gls_lirpa.relaxations import RELAXATIONS, Relaxation


def squared(batch, *, weight, twice):
    margins = batch.engine.margins(batch.box, batch.y, batch.relaxation, statistics=batch.statistics)
    return (2 if twice else 1) * weight * F.relu(1 - margins).square().mean()


def halved(engine, box, spec, statistics, *, share=0.5):
    return engine.relaxed(type(box)(box.center + share * (box.lower - box.center), box.upper), spec, "IBP", statistics)


class Scaled(GRAD):
    def __init__(self, loss, model, *, factor, flipped=False):
        super().__init__(loss, model)
        self.factor = -factor if flipped else factor

    def __call__(self, *args, **kwargs):
        return self.factor * super().__call__(*args, **kwargs)


LOSSES.register(
    "toy-loss",
    Loss(
        "toy-loss",
        squared,
        bounds=True,
        options=Options(
            Option("weight", float, "factor of the toy loss", default=1.0), Option("twice", bool, "", default=False)
        ),
        relaxation="toy-relaxation",
        help="a loss from outside",
    ),
)
RELAXATIONS.register(
    "toy-relaxation",
    Relaxation("toy-relaxation", halved, help="bounds from outside", options=Options(Option("share", float, "of it"))),
)
ESTIMATORS.register(
    "toy-estimator",
    EstimatorMethod(
        "toy-estimator",
        Scaled,
        help="an estimator from outside",
        options=Options(Option("factor", float, "factor of the gradient"), Option("flipped", bool, "turns it around")),
        recipe={"factor": 1.0},
    ),
)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "toys.py"
    file.write_text(PLUGIN)
    return file


def glscert(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glscert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_methods_of_a_plugin_are_in_the_help(plugin: Path) -> None:
    text = glscert("train", "--plugin", plugin, "--help").stdout
    flat = " ".join(text.split())
    for kind, words in (("loss", "a loss"), ("relaxation", "bounds"), ("estimator", "an estimator")):
        assert f"toy-{kind}: {words} from outside" in flat
    assert "weight: Factor of the toy loss, by default 1" in flat
    assert "--factor FLOAT Factor of the gradient (toy-estimator)" in flat
    assert "--flipped / --no-flipped" in flat
    tune = glscert("tune", "--plugin", plugin, "--help").stdout
    assert "--flipped / --no-flipped" in tune and "--factor" not in tune, "switches are fixed, numbers are searched"
    stages = "".join(glscert("certify", f"--plugin={plugin}", "--help").stdout.split())
    assert "toy-relaxation" in stages, "a relaxation is a stage"


def test_the_doctor_and_configurations_know_methods_of_a_plugin(plugin: Path) -> None:
    checks = glscert("doctor", "--plugin", plugin)
    assert checks.returncode == 0, checks.stdout
    (line,) = [line for line in checks.stdout.splitlines() if "bounds: toy-relaxation" in line]
    assert " ok " in line
    named = glscert("config", "show", "mnist-0.1", "--estimator", "toy-estimator", "--plugin", plugin)
    shown = json.loads(named.stdout)
    assert (shown["estimator"], shown["estimator_options"]) == ("toy-estimator", {"factor": 1.0})
    assert "toy-estimator" in glscert("config", "show", "--plugin", plugin, "--help").stdout


def test_a_run_with_methods_of_a_plugin_and_its_certification(plugin: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ("--net", "cnn3-tiny", "--epochs", 1, "--limit", 64, "--eval-samples", 8, "--eps", 0.02)
    toys = ("--loss", "toy-loss", "--estimator", "toy-estimator", "--factor", 0.5, "--no-flipped")
    options = ("--set", "weight=2", "--set", "twice=yes", "--set", "share=0.25")
    done = glscert("train", "--plugin", plugin, "--out", run, *small, *toys, *options)
    assert done.returncode == 0, done.stderr
    config = json.loads((run / "config.json").read_text())
    assert (config["loss"], config["relaxation"]) == ("toy-loss", "toy-relaxation")
    assert config["loss_options"] == {"weight": 2.0, "twice": True}
    assert config["relaxation_options"] == {"share": 0.25}
    assert config["estimator_options"] == {"factor": 0.5, "flipped": False}
    certified = glscert("certify", run, "--plugin", plugin, "--samples", 4, "--stages", "ibp,toy-relaxation")
    assert certified.returncode == 0, certified.stderr

    without = glscert("certify", run, "--samples", 4)
    assert without.returncode == 2
    assert "unknown loss 'toy-loss'" in without.stderr and "--plugin" in without.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("1 / 0", "cannot be run: ZeroDivisionError"),
        ("from gls_lirpa.losses import LOSSES\nLOSSES.register('robust', None)", "'robust' is already registered"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "bad.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_plugins([file])
    assert "\n" not in str(caught.value)
    assert str(file) not in loaded_plugins()


def test_speed_is_probed_with_few_members_and_ranges_are_searched_whatever_they_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []

    class Crowd(GRAD):
        def __init__(self, loss: Any, model: Any, *, heads: float) -> None:
            super().__init__(loss, model)
            seen.append(heads)

    heads = Option("heads", int, "", default=50, search=Range(2, 90))
    method = EstimatorMethod("crowd", Crowd, options=Options(heads), members="heads")
    monkeypatch.setitem(ESTIMATORS._items, "crowd", method)
    small = TrainConfig(net="cnn3-tiny", relaxation="ibp", estimator="crowd", limit=50, batch_size=25)
    assert probe(small).step_seconds > 0 and seen == [PROBED_MEMBERS]
    assert space_of(small)[-1] == Dimension("heads", Range(2, 90), "estimator_options")


def test_an_estimator_brings_its_schedule_to_every_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(dataset: str, large: bool) -> dict[str, Any]:
        return {"epochs": 3 if large else 2, "batch_size": 7 if dataset == "mnist" else 5}

    monkeypatch.setitem(ESTIMATORS._items, "brief", EstimatorMethod("brief", GRAD, schedule=schedule))
    found = {name: get_preset(name, "brief") for name in ("mnist-0.1", "paper-mnist-0.3", "digits-0.1")}
    assert [(fields["epochs"], fields["batch_size"]) for fields in found.values()] == [(2, 7), (3, 7), (2, 5)]
    assert found["mnist-0.1"]["lr"] == get_preset("mnist-0.1", "grad")["lr"]


def test_followers_hear_of_what_is_registered_before_and_after() -> None:
    table: Registry[int] = Registry("thing")
    table.register("old", 1, aliases=("ancient",))
    heard: list[tuple[str, int, tuple[str, ...]]] = []
    table.follow(lambda *event: heard.append(event))
    table.register("new", 2)
    assert heard == [("old", 1, ("ancient",)), ("new", 2, ())]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lam": 1.5}, "lam >= 0 and <= 1"),
        ({"steps": 2.5}, "a whole number"),
        ({"steps": 0}, "steps >= 1"),
        ({"multi": 2}, "multi true or false"),
        ({"step": 3}, "no option 'step'.*did you mean 'steps'"),
    ],
)
def test_options_have_types_and_limits(given: dict[str, float], message: str) -> None:
    options = Options(
        Option("lam", float, "", most=1.0), Option("steps", int, "", least=1), Option("multi", bool, "", default=True)
    )
    with pytest.raises(ConfigError, match=message):
        options.checked("loss 'x'", given)
    assert options.checked("loss 'x'", {"lam": 0, "steps": 8.0, "multi": 0}) == {"lam": 0.0, "steps": 8, "multi": False}

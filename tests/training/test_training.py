"""The training loop: exact resume, presets, configuration, failure handling."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gls_lirpa.data import load_dataset
from gls_lirpa.errors import CheckpointError, ConfigError, NumericalError
from gls_lirpa.training import PRESETS, Interrupted, RunFolder, TrainConfig, get_preset, load_run, preset_of, train
from gls_lirpa.training.job import make_config
from gls_lirpa.training.runs import dataset_of
from gls_lirpa.training.trainer import Trainer
from tests.helpers.reporters import Quiet, untimed

SMALL: dict[str, Any] = {
    "net": "cnn3-tiny",
    "limit": 200,
    "epochs": 3,
    "batch_size": 64,
    "lr": 1e-2,
    "eps": 0.05,
    "eps_anneal_epochs": 1.5,
    "eval_samples": 32,
    "milestones": (2,),
}


METHODS: dict[str, dict[str, Any]] = {
    "ibp-grad": {"relaxation": "ibp", "estimator": "grad", "warmup": 0.5, "l1": 1e-5},
    "crown-rgs": {"relaxation": "crown", "estimator": "rgs", "estimator_options": {"sigma": 1e-3, "samples": 2}},
    "crown-pgpe": {"relaxation": "crown", "estimator": "pgpe", "estimator_options": {"sigma": 1e-2, "population": 4}},
    "pgd-grad": {"loss": "pgd", "estimator": "grad", "loss_options": {"steps": 2}},
    "ibp-sam": {"relaxation": "ibp", "estimator": "sam", "estimator_options": {"rho": 0.01}},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop_after", [2, 3, 7])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, method: str, stop_after: int) -> None:
    config = TrainConfig(**{**SMALL, **METHODS[method]})
    whole = train(config, tmp_path / "whole", reporter=Quiet())
    with pytest.raises(Interrupted, match="--resume"):
        train(config, tmp_path / "parts", reporter=Quiet(stop_after))
    resumed = train(config, tmp_path / "parts", reporter=Quiet(), resume=True)
    first, second = RunFolder(tmp_path / "whole").metrics(), RunFolder(tmp_path / "parts").metrics()
    assert len(first) == 3
    assert untimed(first) == untimed(second)
    for a, b in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_resume_after_a_kill_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    config = TrainConfig(**{**SMALL, **METHODS["ibp-grad"]})
    train(config, tmp_path / "whole", reporter=Quiet())
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", reporter=Quiet(5))
    folder = RunFolder(tmp_path / "run")
    folder.append_metrics({"epoch": 2, "loss": -1.0})
    with folder.metrics_file.open("a") as file:
        file.write('{"epoch": 3, "lo')
    train(config, tmp_path / "run", reporter=Quiet(), resume=True)
    assert untimed(folder.metrics()) == untimed(RunFolder(tmp_path / "whole").metrics())


def _in_its_third_epoch(out: Path, *, epochs: int) -> subprocess.Popen[str]:
    options = f"--net cnn3-tiny --limit 200 --epochs {epochs} --relaxation ibp --estimator grad".split()
    command = [sys.executable, "-m", "glscert", "train", "--out", str(out), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    next(line for line in process.stderr if line.startswith("epoch 2/"))
    return process


def test_a_killed_process_can_be_resumed(tmp_path: Path) -> None:
    """SIGKILL at an arbitrary moment: the folder still holds a loadable checkpoint."""
    process = _in_its_third_epoch(tmp_path / "run", epochs=200)
    process.kill()
    process.communicate()
    run = load_run(tmp_path / "run")
    assert run.config.epochs == 200
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["position"]["epoch"] >= 1


def test_a_run_folder_that_goes_away_is_one_line(tmp_path: Path) -> None:
    process = _in_its_third_epoch(tmp_path / "run", epochs=2000)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Traceback" not in error and "No such file or directory" in error.splitlines()[-1]
    assert load_run(tmp_path / "elsewhere").config.epochs == 2000


def test_batchnorm_network_trains_and_holds_population_statistics(tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(
        "from torch import nn\n"
        "def make(classes):\n"
        "    return nn.Sequential(nn.Conv2d(1, 2, 3, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(),\n"
        "                         nn.Linear(32, classes))\n"
    )
    options = {**SMALL, "net": f"{source}:make", "epochs": 1, **METHODS["crown-rgs"]}
    trainer = train(TrainConfig(**options), tmp_path / "run", reporter=Quiet())
    conv, norm = trainer.model[0], trainer.model[1]
    with torch.no_grad():
        x, _ = trainer.dataset.train.batch(range(len(trainer.dataset.train)))
        features = conv(x)
    assert torch.allclose(norm.running_mean, features.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(norm.running_var, features.var((0, 2, 3)), rtol=1e-2)


def test_averaged_weights_are_the_mean_of_the_epochs_and_survive_a_resume(tmp_path: Path) -> None:
    config = TrainConfig(**{**SMALL, **METHODS["ibp-grad"], "average_from": 1})
    ends: list[torch.Tensor] = []

    class Recorder(Quiet):
        def epoch_ended(self, row: dict[str, Any]) -> None:
            state = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)
            ends.append(state["model"]["0.weight"])

    whole = train(config, tmp_path / "whole", reporter=Recorder())
    final = torch.load(tmp_path / "whole" / "weights.pt", weights_only=True)["model"]["0.weight"]
    assert torch.allclose(final, torch.stack(ends[1:]).mean(0), atol=1e-6)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "parts", reporter=Quiet(8))
    resumed = train(config, tmp_path / "parts", reporter=Quiet(), resume=True)
    assert torch.equal(whole.model[0].weight, resumed.model[0].weight)


def test_a_loss_brings_its_relaxation_and_published_options() -> None:
    sabr = make_config({"dataset": "mnist", "eps": 0.1, "loss": "sabr", "estimator": "grad"})
    assert (sabr.relaxation, sabr.loss_options["lam"]) == ("ibp", 0.4)
    mine = make_config({"dataset": "mnist", "eps": 0.1, "loss": "sabr", "assignments": (("lam", "0.7"),)})
    assert mine.loss_options["lam"] == 0.7
    assert make_config({"loss": "robust-fused"}).relaxation == "crown-ibp"
    assert make_config({"loss": "mtl-ibp", "relaxation": "crown"}).relaxation == "crown"


def test_training_raises_certified_accuracy_on_digits(tmp_path: Path) -> None:
    """From 10 % (chance) to a level that a broken loss or bound does not reach."""
    config = make_config({"net": "cnn3-tiny", "relaxation": "ibp", "estimator": "grad", "eps": 0.05, "epochs": 12})
    config = config.replaced({"eps_anneal_epochs": 4.0, "milestones": (9.0,), "lr": 2e-2})
    reporter = Quiet()
    train(config, tmp_path / "run", reporter=reporter)
    assert reporter.rows[-1]["natural"] > 60
    assert reporter.rows[-1]["certified"] > 35


def test_nan_loss_stops_with_the_step_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    config = TrainConfig(**{**SMALL, "lr": 1e30, "relaxation": "ibp", "estimator": "grad"})
    with pytest.raises(NumericalError, match=r"epoch \d+, step \d+"):
        train(config, tmp_path / "run", reporter=Quiet())
    weights = load_run(tmp_path / "run").model.state_dict()
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        train(TrainConfig(**SMALL), tmp_path, reporter=Quiet())
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_output_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        train(TrainConfig(**SMALL), tmp_path / "run", reporter=Quiet())


def test_output_below_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        train(TrainConfig(**SMALL), tmp_path / "file" / "run", reporter=Quiet())


def test_warm_start_and_weights_of_another_network(tmp_path: Path) -> None:
    config = TrainConfig(**{**SMALL, "epochs": 1, "relaxation": "ibp"})
    first = train(config, tmp_path / "first", reporter=Quiet())
    warm = Trainer(config.replaced({"init_from": str(tmp_path / "first")}), first.dataset)
    for a, b in zip(first.model.parameters(), warm.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(CheckpointError, match="another network"):
        Trainer(config.replaced({"init_from": str(tmp_path / "first"), "net": "cnn3"}), first.dataset)


def test_damaged_and_dangerous_checkpoints(tmp_path: Path) -> None:
    config = TrainConfig(**{**SMALL, "epochs": 1, "relaxation": "ibp"})
    train(config, tmp_path / "run", reporter=Quiet())
    weights = tmp_path / "run" / "weights.pt"
    content = weights.read_bytes()
    (tmp_path / "run" / "checksums.json").unlink()  # as in a run of an earlier version
    for cut in (0, 10, len(content) // 2, len(content) - 10):
        weights.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            load_run(tmp_path / "run")
    torch.save({"model": Exploit()}, weights)
    with pytest.raises(CheckpointError, match="other than tensors"):
        load_run(tmp_path / "run")
    assert not Path("exploited").exists()


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploited"),))


def test_resume_with_other_options_is_refused(tmp_path: Path) -> None:
    config = TrainConfig(**{**SMALL, "epochs": 1, "relaxation": "ibp"})
    train(config, tmp_path / "run", reporter=Quiet())
    with pytest.raises(ConfigError, match="another configuration"):
        train(config.replaced({"lr": 0.5}), tmp_path / "run", reporter=Quiet(), resume=True)


def test_every_preset_is_a_valid_configuration() -> None:
    for name in PRESETS:
        for estimator in ("grad", "rgs", "pgpe", "sam"):
            config = make_config({"preset": name, "estimator": estimator})
            assert config.preset == name
            if name.startswith("paper-"):
                assert config.val_fraction == 0.0
                assert (config.l1, config.warmup) == (0.0, 0.0)


def test_paper_presets_are_the_appendix() -> None:
    """But for the learning rate: 5e-4 instead of the printed 5e-5, for the reason in the module's heading."""
    mnist = make_config({"preset": "paper-mnist-0.1", "estimator": "rgs"})
    assert (mnist.lr, mnist.epochs, mnist.milestones, mnist.lr_factor) == (5e-4, 70, (50.0, 60.0), 0.2)
    assert mnist.eps_anneal_epochs == 20
    assert mnist.estimator_options == {"sigma": 1e-3, "samples": 2}
    assert mnist.sigma_factor == 0.4
    pgpe = make_config({"preset": "paper-cifar10-8/255", "estimator": "pgpe"})
    assert (pgpe.epochs, pgpe.batch_size, pgpe.lr, pgpe.lr_factor) == (150, 128, 3e-4, 0.4)
    assert pgpe.milestones == (110.0, 130.0)
    assert pgpe.eps_anneal_epochs == 50
    assert make_config({"preset": "paper-mnist-0.1", "estimator": "pgpe"}).eps_schedule().at(0.0) == 0.1
    cifar = make_config({"preset": "paper-cifar10-2/255", "estimator": "grad"})
    assert cifar.eps_schedule().at(1.0) == 0.0
    assert cifar.eps_schedule().at(80.0) == 2 / 255


def test_tuned_preset_applies_when_dataset_and_eps_are_named() -> None:
    assert make_config({"dataset": "cifar10", "eps": 8 / 255}).preset == "cifar10-8/255"
    near = make_config({"dataset": "mnist", "eps": 0.12})
    assert (near.preset, near.eps) == ("mnist-0.1", 0.12)
    assert make_config({"dataset": "folder", "estimator": "rgs"}).estimator_options["sigma"] == 1e-3
    assert make_config({}).preset == "digits-0.1"
    assert preset_of("tuned", "folder", None) is None
    assert get_preset("mnist-0.1", "grad")["preset"] == "mnist-0.1"
    assert make_config({"dataset": "mnist", "estimator": "grad", "net": "cnn7-bn"}).lr == 5e-4
    assert make_config({"dataset": "mnist", "estimator": "grad", "net": "cnn3-tiny"}).lr == 5e-3
    assert make_config({"dataset": "mnist", "estimator": "grad", "net": "cnn5", "lr": 0.1}).lr == 0.1


def test_recipes_by_kind() -> None:
    paper = make_config({"preset": "paper", "dataset": "mnist", "eps": 0.3, "estimator": "grad"})
    assert paper == make_config({"preset": "paper-mnist-0.3", "estimator": "grad"})
    assert (paper.init, paper.init_from, paper.lr, paper.val_fraction) == ("ibp", None, 5e-4, 0.0)
    assert make_config({"preset": "tuned", "dataset": "mnist", "eps": 0.3}) == make_config({"preset": "mnist-0.3"})
    with pytest.raises(ConfigError, match="'digits' has no paper preset: expected one of cifar10, mnist, tinyimagenet"):
        make_config({"preset": "paper"})
    with pytest.raises(ConfigError, match="unknown preset 'papr'"):
        make_config({"preset": "papr", "dataset": "mnist"})


def test_literature_recipes_bring_each_losss_own_training() -> None:
    def config(loss: str, dataset: str, eps: float, **options: object) -> TrainConfig:
        given = {"preset": "literature", "estimator": "grad", "net": "cnn7-bn", "loss": loss, "dataset": dataset}
        return make_config({**given, "eps": eps, **options})

    ibp, mtl = config("robust", "mnist", 0.1), config("mtl", "mnist", 0.1)
    assert (ibp.l1, mtl.l1) == (2e-6, 1e-5)
    assert (ibp.natural_weight, mtl.natural_weight) == (0.3, 0.3)
    assert (ibp.average_from, mtl.average_from) == (None, 65)
    assert (ibp.eps, ibp.trained_eps, ibp.eps_schedule().at(70.0)) == (0.1, 0.2, 0.2)
    assert mtl.loss_options["steps"] == 10 and config("mtl", "cifar10", 2 / 255).loss_options["steps"] == 1
    assert config("taps", "mnist", 0.1).loss_options["relus"] == 3
    assert config("taps", "mnist", 0.3).loss_options["relus"] == 2
    assert config("taps", "cifar10", 2 / 255).loss_options["shrinkage"] == 0.8
    assert config("robust", "tinyimagenet", 1 / 255).l1 == 1e-5
    large = config("exp", "cifar10", 8 / 255)
    assert (large.epochs, large.milestones, large.average_from, large.lr) == (240, (200.0, 220.0), 225, 5e-4)
    assert (large.padding, make_config({"preset": "paper", "dataset": "cifar10"}).padding) == ("edge", "zero")
    assert config("robust", "mnist", 0.1, l1=0.5).l1 == 0.5, "what the user names wins"
    tuned = make_config({"dataset": "mnist", "eps": 0.1, "estimator": "grad", "loss": "mtl"})
    assert (tuned.average_from, tuned.natural_weight, tuned.eps_factor) == (None, 0.0, 1.0)


def test_training_radius_is_a_multiple_of_the_certified_one() -> None:
    config = TrainConfig(**{**SMALL, "eps": 0.05, "eps_factor": 2.0})
    trainer = Trainer(config, dataset_of(config))
    assert (trainer.criterion.eps, config.eps) == (0.1, 0.05)
    with pytest.raises(ConfigError, match=r"eps \* eps_factor <= 1"):
        TrainConfig(eps=0.6, eps_factor=2.0)


def test_sigma_tied_to_the_learning_rate() -> None:
    options = {"preset": "mnist-0.1", "estimator": "rgs", "sigma_per_lr": 4.0, "lr": 1e-3}
    config = make_config(options)
    sigma, lr = config.sigma_schedule(), config.lr_schedule()
    assert sigma is not None
    for epoch in (0.0, 49.9, 50.0, 55.0, 65.0):
        assert sigma.at(epoch) == pytest.approx(4 * lr.at(epoch), rel=1e-12)
    assert lr.at(65.0) == pytest.approx(1e-3 * 0.2**2)
    with pytest.raises(ConfigError, match="whose sigma decays, not with 'grad'"):
        make_config({**options, "estimator": "grad"})


def test_configuration_file_and_options(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"epochs": 7, "lr": 0.5, "estimator": "grad"}))
    config = make_config({"lr": 0.25}, file)
    assert (config.epochs, config.lr, config.estimator) == (7, 0.25, "grad")
    stored = TrainConfig(**{**SMALL, "epochs": 1})
    assert TrainConfig(**json.loads(json.dumps(stored.to_dict()))) == stored


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"epoch": 7}', "unknown configuration key 'epoch'; did you mean 'epochs'"),
        ('{"epochs": "many"}', "must be of type int"),
        ('{"net": "evil.py:make"}', "asks for code to be executed"),
        ("[1, 2]", "must hold one JSON object"),
        ('{"epochs": 7', "not valid JSON"),
        ('{"eps": NaN}', "eps must be a number in"),
        ('{"loss_options": {"steps": "ten"}}', "must be a number"),
    ],
)
def test_bad_configuration_files(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        make_config({}, file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relaxation": "crwn"}, "did you mean 'crown'"),
        ({"estimator": "pgp"}, "did you mean 'pgpe'"),
        ({"dataset": "minst"}, "did you mean 'mnist'"),
        ({"net": "cnn33"}, "did you mean 'cnn3'"),
        ({"preset": "paper-mnist-0.2"}, "did you mean 'paper-mnist-0.3'|did you mean 'paper-mnist-0.1'"),
        ({"eps": -0.1}, "eps must be"),
        ({"eps": math.nan}, "eps must be"),
        ({"eps": 1.5}, "eps must be"),
        ({"estimator": "grad", "sigma": 1e-3}, "--sigma is an option of pgpe, rgs"),
        ({"relaxation": "alpha-crown", "estimator": "grad"}, "use --estimator pgpe"),
        ({"epochs": 0}, "expected epochs >= 1, got 0"),
        ({"loss": "pgd", "assignments": (("step", "3"),)}, "no option 'step'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(options)


def test_the_order_of_data_depends_on_seed_and_epoch_alone() -> None:
    dataset = load_dataset("digits", limit=200)
    first, second = (Trainer(TrainConfig(**{**SMALL, "seed": 3, "relaxation": "ibp"}), dataset) for _ in range(2))
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)

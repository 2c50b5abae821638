"""Training from Python: the same run as on the command line, and one's own data and networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gls_lirpa
from gls_lirpa import GLSError
from gls_lirpa.data import load_dataset
from gls_lirpa.training.own_data import own_dataset, own_split
from tests.helpers.command import Glscert

QUICK: dict[str, Any] = {"net": "cnn3-tiny", "relaxation": "ibp", "estimator": "grad", "epochs": 2, "eval_samples": 32}


def toy(number: int = 60) -> tuple[Tensor, Tensor]:
    """Bright and dark images of 6×6 pixels."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(number) % 2
    x = 0.1 + 0.2 * torch.rand(number, 1, 6, 6, generator=generator) + 0.6 * y.reshape(-1, 1, 1, 1)
    return x, y


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_same_run_as_on_the_command_line(tmp_path: Path, glscert: Glscert, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--relaxation", "ibp", "--net", "cnn3-tiny", "--epochs", 2, "--limit", 200, "--sigma", 0.002]
    assert glscert("train", "--out", tmp_path / "a", *options).code == 0
    run = gls_lirpa.train(
        out=tmp_path / "b", relaxation="ibp", net="cnn3-tiny", epochs=2, limit=200, sigma=0.002, progress=False
    )
    assert capfd.readouterr() == ("", "")
    other = gls_lirpa.load_run(tmp_path / "a")
    assert run.config == other.config and run.config.estimator == "rgs"
    assert torch.equal(weights(run.model), weights(other.model))
    assert [row["loss"] for row in run.metrics] == [row["loss"] for row in other.metrics]
    assert not run.model.training
    result = run.certify(samples=20, stages=["ibp"])
    assert len(result) == 20 and result.settings["eps"] == run.config.eps
    assert [r.bound for r in result] == [r.bound for r in other.certify(samples=20, stages=["ibp"])]
    assert (tmp_path / "b" / "summary.json").exists()


def test_progress_is_a_line_per_epoch_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gls_lirpa.train(dataset=toy(), out=tmp_path / "run", eps=0.05, **QUICK)
    out, err = capfd.readouterr()
    assert out == "" and "epoch 1/2" in err and "epoch 2/2" in err


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader", "arrays"])
def test_own_data_in_every_form_trains_alike(tmp_path: Path, kind: str) -> None:
    x, y = toy()
    forms = {
        "tensors": (x, y),
        "dataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=7),
        "arrays": (x.numpy(), y.numpy()),
    }
    reference = gls_lirpa.train(dataset=(x, y), out=tmp_path / "a", eps=0.05, progress=False, **QUICK)
    run = gls_lirpa.train(dataset=forms[kind], out=tmp_path / "b", eps=0.05, progress=False, **QUICK)
    assert torch.equal(weights(run.model), weights(reference.model))
    assert run.config.dataset == "custom" and run.config.preset is None


def test_own_network_and_data_learn_and_are_loaded_again(tmp_path: Path) -> None:
    x, y = toy()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 2))
    run = gls_lirpa.train(
        dataset=(x.flatten(1), y),
        test=(x.flatten(1), y),
        net=model,
        eps=0.05,
        relaxation="crown",
        estimator="rgs",
        epochs=8,
        batch_size=20,
        lr=0.02,
        out=tmp_path / "run",
        progress=False,
    )
    assert run.model is model
    result = run.certify(stages=["ibp", "crown"])
    assert result.certified > 0.9 and len(result) == len(x)
    fresh = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 2))
    again = gls_lirpa.load_run(tmp_path / "run", model=fresh)
    assert torch.equal(weights(again.model), weights(model)) and again.dataset is None
    assert again.certify(x.flatten(1), y, stages=["ibp", "crown"]).certified == result.certified
    with pytest.raises(GLSError, match="data was passed as an object"):
        again.certify()
    with pytest.raises(GLSError, match=r"pass model= to load_run"):
        gls_lirpa.load_run(tmp_path / "run")
    with pytest.raises(GLSError, match="another network's weights"):
        gls_lirpa.load_run(tmp_path / "run", model=nn.Linear(36, 2))


def test_named_network_on_own_data_needs_no_data_to_be_loaded(tmp_path: Path, glscert: Glscert) -> None:
    run = gls_lirpa.train(dataset=toy(), out=tmp_path / "run", eps=0.05, progress=False, **QUICK)
    again = gls_lirpa.load_run(tmp_path / "run")
    assert torch.equal(weights(again.model), weights(run.model))
    with_data = gls_lirpa.load_run(tmp_path / "run", dataset=toy(), test=toy(10))
    assert len(with_data.certify(stages=["ibp"])) == 10
    refused = glscert("certify", tmp_path / "run")
    assert refused.code == 2 and "load_run(path, dataset=" in refused.err and refused.err.count("\n") == 1


def test_resume_goes_on_with_the_same_data_alone(tmp_path: Path) -> None:
    whole = gls_lirpa.train(dataset=toy(), out=tmp_path / "whole", eps=0.05, progress=False, **QUICK)

    class Stop(gls_lirpa.training.Silent):
        def epoch_ended(self, row: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(GLSError, match="interrupted"):
        gls_lirpa.train(dataset=toy(), out=tmp_path / "parts", eps=0.05, progress=False, reporters=[Stop()], **QUICK)
    x, y = toy()
    with pytest.raises(GLSError, match="begun with other data"):
        gls_lirpa.train(dataset=(x, 1 - y), out=tmp_path / "parts", eps=0.05, resume=True, progress=False, **QUICK)
    resumed = gls_lirpa.train(dataset=(x, y), out=tmp_path / "parts", eps=0.05, resume=True, progress=False, **QUICK)
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_a_dataset_of_the_library_is_taken_as_it_is(tmp_path: Path) -> None:
    digits = load_dataset("digits", limit=100)
    run = gls_lirpa.train(dataset=digits, out=tmp_path / "run", eps=0.05, progress=False, **QUICK)
    assert run.dataset is digits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "mnits"}, "unknown dataset 'mnits'.*did you mean 'mnist'"),
        ({"epoch": 3}, "unknown configuration key 'epoch'; did you mean 'epochs'"),
        ({"rho": 0.1}, "--rho is an option of sam, not of estimator 'grad'"),
        ({"test": toy()}, "dataset 'digits' has its own splits"),
        ({"dataset": 3}, "training data: expected .* a torch Dataset or a DataLoader, got int"),
        ({"dataset": (2 * toy()[0], toy()[1])}, r"training data: expected float images in \[0, 1\]"),
        ({"dataset": (toy()[0], toy()[1].float())}, "expected integer labels"),
        ({"dataset": (toy()[0], toy()[1] - 1)}, "expected labels 0…1, got -1…0"),
        ({"dataset": toy(), "test": (torch.rand(3, 1, 5, 5), torch.tensor([0, 1, 0]))}, "differ in the shape"),
        ({"dataset": (toy()[0].flatten(1), toy()[1])}, "expected in_shape = "),
        ({"dataset": TensorDataset(toy()[0])}, "expected items"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GLSError, match=message) as caught:
        gls_lirpa.train(out=tmp_path / "run", progress=False, **{**QUICK, **arguments})
    assert "\n" not in str(caught.value)


def test_a_run_is_shown_in_one_line_and_says_which_data_is_missing(tmp_path: Path) -> None:
    run = gls_lirpa.train(dataset=toy(), out=tmp_path / "run", eps=0.05, progress=False, **QUICK)
    shown = repr(run)
    assert "robust·ibp·grad, cnn3-tiny, custom, eps=0.05, 2 of 2 epochs, natural" in shown and "\n" not in shown
    with pytest.raises(GLSError, match=r"no test split here; pass test=\(x, y\)"):
        run.certify()


def test_splits_of_own_data_share_no_sample() -> None:
    x, y = toy(40)
    data = own_dataset((x, y), val_fraction=0.25, seed=3)
    assert (len(data.train), len(data.val)) == (30, 10)
    seen = {tuple(image.flatten().tolist()) for image in data.train.images}
    assert not seen & {tuple(image.flatten().tolist()) for image in data.val.images}
    assert len(own_split(((255 * x).to(torch.uint8), y))) == 40

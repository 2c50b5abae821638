"""The networks that come with the package: what the manifest says of them is true, and how they are used."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gls_lirpa
from gls_lirpa import GLSError, certify, zoo
from gls_lirpa.data import load_dataset
from gls_lirpa.models import count_parameters
from gls_lirpa.training.config import TrainConfig, checked_fields
from gls_lirpa.zoo import catalogue
from gls_lirpa.zoo.add import add_network
from tests.helpers.command import Glscert

DIGITS = "digits-cnn3-crown-rgs"


@pytest.mark.parametrize("name", zoo.list())
def test_every_network_is_what_the_manifest_says(name: str) -> None:
    entry, model = zoo.info(name), zoo.load(name)
    assert hashlib.sha256(entry.file.read_bytes()).hexdigest() == entry.sha256
    assert entry.file.stat().st_size < 2**20
    assert not model.training and count_parameters(model) == entry.parameters
    assert model(torch.rand(2, *entry.in_shape)).shape == (2, entry.classes)
    config = TrainConfig(**checked_fields(entry.config))
    assert (config.net, config.dataset, config.eps, config.seed) == (entry.net, entry.dataset, entry.eps, entry.seed)
    assert config.method == entry.method and config.data_root == "data"
    assert 1 >= entry.natural >= entry.adversarial >= entry.certified > 0.5
    assert entry.command.startswith("glscert train ") and f"--seed {entry.seed}" in entry.command


def test_accuracies_are_those_of_the_embedded_data() -> None:
    entry, model = zoo.info(DIGITS), zoo.load(DIGITS)
    x, y = load_dataset("digits").test.batch(range(entry.samples))
    result = certify(model, x, y, eps=entry.eps, stages=["ibp", "crown"])
    assert len(result) == entry.samples and result.natural == entry.natural
    assert entry.certified - 0.02 <= result.certified <= entry.certified


def test_the_command_line_lists_and_certifies_them(
    tmp_path: Path, glscert: Glscert, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = glscert("zoo")
    assert listed.code == 0 and all(name in listed.out for name in zoo.list())
    one = glscert("zoo", DIGITS)
    assert zoo.info(DIGITS).sha256 in one.out and zoo.info(DIGITS).command in one.out
    monkeypatch.chdir(tmp_path)
    answer = glscert("certify", f"zoo:{DIGITS}", "--samples", 30, "--stages", "ibp,crown")
    assert answer.code == 0, answer.err
    folder = tmp_path / "runs" / f"zoo-{DIGITS}-certify-eps0.1-test"
    assert len(gls_lirpa.Certification.load(folder)) == 30
    for arguments, message in [
        (("zoo", "digits-cnn3"), "did you mean"),
        (("certify", "zoo:nothing"), "no network 'nothing' in the zoo"),
        (("certify", f"zoo:{DIGITS}", "--net", "cnn5"), "remove --net"),
    ]:
        refused = glscert(*arguments)
        assert refused.code == 2 and message in refused.err and refused.err.count("\n") == 1


def test_training_starts_from_one(tmp_path: Path) -> None:
    run = gls_lirpa.train(
        relaxation="ibp",
        estimator="grad",
        epochs=1,
        lr=0.0,
        limit=50,
        init_from=f"zoo:{DIGITS}",
        out=tmp_path / "run",
        progress=False,
    )
    for name, tensor in zoo.state(DIGITS).items():
        assert torch.equal(run.model.state_dict()[name], tensor)
    with pytest.raises(GLSError, match="another network's weights"):
        gls_lirpa.train(net="cnn3-tiny", init_from=f"zoo:{DIGITS}", out=tmp_path / "other", progress=False)


class Dangerous:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("executed"),)  # type: ignore[return-value]


def test_damaged_and_dangerous_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(zoo.info(DIGITS), name="copy")
    added = add_network(zoo.load(DIGITS), entry, tmp_path)
    monkeypatch.setattr(catalogue, "FOLDER", tmp_path)
    monkeypatch.setattr(catalogue, "_entries", lambda: {"copy": added})
    assert torch.equal(zoo.load("copy")[0].weight, zoo.load("copy")[0].weight)
    added.file.write_bytes(added.file.read_bytes()[:-1] + b"x")
    with pytest.raises(GLSError, match="damaged"):
        zoo.load("copy")
    content = pickle.dumps(Dangerous())
    added.file.write_bytes(content)
    trusted = replace(added, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(catalogue, "_entries", lambda: {"copy": trusted})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        zoo.load("copy")
    assert not (tmp_path / "executed").exists()
    added.file.unlink()
    with pytest.raises(GLSError, match="is missing"):
        zoo.load("copy")

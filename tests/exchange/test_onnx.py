"""Networks in ONNX files: read for any batch size, equal to onnxruntime, and one line for what is wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto
from torch import nn

from gls_lirpa.certification import certify
from gls_lirpa.errors import ConfigError, GLSError
from gls_lirpa.exchange import onnx_model
from gls_lirpa.exchange.export import write_onnx
from gls_lirpa.exchange.onnx_model import read_onnx
from gls_lirpa.models import Normalize, build_model
from tests.helpers.onnx_nets import NETS, node, save


@pytest.mark.parametrize("name", NETS)
def test_networks_of_other_tools(tmp_path: Path, name: str) -> None:
    network = read_onnx(NETS[name](tmp_path / "net.onnx"))
    x = torch.rand(5, *network.in_shape)
    ours = network.model(x).numpy()
    assert np.allclose(ours, network.replay(x.numpy()), atol=1e-4 * (1 + np.abs(ours).max()))
    labels = network.model(x).argmax(1)
    bounds = [certify(network.model, x, labels, eps=0.02, stages=(stage,)) for stage in ("ibp", "crown", "bab")]
    for records in zip(*bounds, strict=True):
        verdicts = {record.verdict for record in records} - {"unknown"}
        assert len(verdicts) == 1 and records[-1].verdict != "unknown"


def test_normalisation_is_recognised(tmp_path: Path) -> None:
    model = read_onnx(NETS["convolution"](tmp_path / "net.onnx")).model
    assert isinstance(model[0], Normalize)


@pytest.mark.parametrize("packed", [False, True])
def test_our_networks_come_back(tmp_path: Path, packed: bool) -> None:
    model = build_model("cnn7-bn", in_shape=(3, 8, 8), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)).eval()
    model[2].running_mean.normal_()
    model[2].running_var.uniform_(0.5, 2.0)
    file = tmp_path / "net.onnx"
    write_onnx(model, (3, 8, 8), file)
    if packed:
        file = file.with_name("net.onnx.gz")
        file.write_bytes(gzip.compress((tmp_path / "net.onnx").read_bytes()))
    x = torch.rand(4, 3, 8, 8)
    read = read_onnx(file).model
    assert isinstance(read, nn.Sequential) and isinstance(read[0], Normalize)
    assert torch.allclose(read(x), model(x), atol=1e-5)


def test_export_overwrites_nothing_and_leaves_the_model_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write_onnx(model, (1, 2, 2), tmp_path / "net.onnx")
    assert model.training and model[2].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="exists already: add --overwrite"):
        write_onnx(model, (1, 2, 2), tmp_path / "net.onnx")
    write_onnx(model, (1, 2, 2), tmp_path / "net.onnx", overwrite=True)


def _bad(name: str, file: Path) -> None:
    weight = {"W": np.ones((4, 3), np.float32)}
    matmul = [node("MatMul", ["x", "W"], ["y"])]
    good = NETS["flattened"](file).read_bytes()
    if name == "truncated":
        file.write_bytes(good[: len(good) // 2])
    elif name == "empty":
        file.write_bytes(b"")
    elif name == "text":
        file.write_text("not a network")
    elif name == "gzip":
        file.with_name("bad.onnx.gz").write_bytes(gzip.compress(good)[:-20])
    elif name == "operation":
        save(file, [node("MatMul", ["x", "W"], ["a"]), node("Sin", ["a"], ["y"])], weight, [1, 4], [1, 3])
    elif name == "unknown operation":
        save(file, [node("NoSuchOperation", ["x"], ["y"])], {}, [1, 4], [1, 4])
    elif name == "product":
        save(file, [node("Mul", ["x", "x"], ["y"])], {}, [1, 4], [1, 4])
    elif name == "wrong shapes":
        save(file, matmul, weight, [1, 5], [1, 3])
    elif name == "open shape":
        save(file, matmul, weight, ["batch", "width"], ["batch", 3])
    elif name == "integers":
        save(file, [node("Neg", ["x"], ["y"])], {}, [1, 4], [1, 4], kind=TensorProto.INT64)


BAD = {
    "missing": "cannot be read: No such file",
    "truncated": "not a valid ONNX file",
    "empty": "not a valid ONNX file",
    "text": "not a valid ONNX file",
    "gzip": "damaged",
    "operation": "graph node 'sin'",
    "unknown operation": "NoSuchOperation",
    "product": "mul",
    "wrong shapes": "Incompatible dimensions",
    "open shape": "expected fixed sizes",
    "integers": "expected float or double",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "bad.onnx"
    if name != "missing":
        _bad(name, file)
    with pytest.raises(GLSError, match=BAD[name]) as caught:
        read_onnx(file.with_name("bad.onnx.gz") if name == "gzip" else file)
    assert "\n" not in str(caught.value) and "bad.onnx" in str(caught.value)


def test_a_network_read_wrongly_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = NETS["flattened"](tmp_path / "net.onnx")
    right = read_onnx(file).model
    monkeypatch.setattr(onnx_model, "translate", lambda graph, example: nn.Sequential(*right, nn.ReLU()))
    with pytest.raises(GLSError, match="differ from onnxruntime's"):
        read_onnx(file)

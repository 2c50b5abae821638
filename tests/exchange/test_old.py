"""Networks of published benchmarks: whatever their operator set and shapes, they are read as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gls_lirpa.certification import certify
from gls_lirpa.errors import UnsupportedLayerError
from gls_lirpa.exchange.onnx_model import read_onnx
from tests.helpers.onnx_nets import node, save
from tests.helpers.onnx_old import OLD


@pytest.mark.parametrize("name", OLD)
def test_read_and_bounded(tmp_path: Path, name: str) -> None:
    network = read_onnx(OLD[name](tmp_path / "net.onnx"))
    x = 3 * torch.randn(50, *network.in_shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours = network.model(x).numpy()
    theirs = network.replay(x.numpy())
    assert np.abs(ours - theirs).max() <= 1e-5 * (1 + np.abs(theirs).max())
    assert len({tuple(row) for row in theirs.round(3).tolist()}) >= 40  # the inputs reach the outputs
    inside = torch.rand(3, *network.in_shape, generator=torch.Generator().manual_seed(6))
    labels = network.model(inside).argmax(1)
    for stage in ("ibp", "crown", "bab"):
        verdicts = [record.verdict for record in certify(network.model, inside, labels, eps=1e-4, stages=(stage,))]
        assert verdicts == ["verified"] * 3, stage


def test_the_original_is_compared_not_the_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that changes what is computed is noticed: onnxruntime evaluates the file itself."""
    file = OLD["collision avoidance"](tmp_path / "net.onnx")
    convert = onnx.version_converter.convert_version

    def wrong(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
        converted = convert(proto, version)
        del converted.graph.node[2:]
        converted.graph.node[1].output[0] = "y"
        return converted

    monkeypatch.setattr(onnx.version_converter, "convert_version", wrong)
    with pytest.raises(UnsupportedLayerError, match="differ from onnxruntime's"):
        read_onnx(file)


def test_dropout_that_drops_is_noticed(tmp_path: Path) -> None:
    nodes = [node("Dropout", ["x", "half", "yes"], ["d"]), node("MatMul", ["d", "W"], ["y"])]
    constants = {"half": np.float32(0.5), "yes": np.array(True), "W": np.ones((64, 2), np.float32)}
    with pytest.raises(UnsupportedLayerError, match="differ from onnxruntime's"):
        read_onnx(save(tmp_path / "net.onnx", nodes, constants, [1, 64], [1, 2]))


@pytest.mark.parametrize("operation", ["ReduceMax", "ReduceL1"])
def test_what_is_not_affine_is_refused(tmp_path: Path, operation: str) -> None:
    file = save(tmp_path / "net.onnx", [node(operation, ["x"], ["y"], axes=[1])], {}, [1, 4], [1, 1])
    with pytest.raises(UnsupportedLayerError, match="expected to be affine is not"):
        read_onnx(file)

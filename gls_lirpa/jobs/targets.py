"""What ``glscert certify`` and ``export`` are given: a run folder, an ONNX file or a plain weight file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gls_lirpa import zoo
from gls_lirpa.data import Dataset, load_dataset
from gls_lirpa.errors import CheckpointError, ConfigError, DataError
from gls_lirpa.exchange.layers import Reshape, concatenated
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.runs import load_run, load_weights, make_network, state_of


@dataclass(frozen=True)
class Target:
    """A network and the data it is judged on. ``eps``: the radius it was made for, if it is known."""

    model: nn.Module
    dataset: Dataset
    eps: float | None
    device: str
    results: Path
    norm: str = "linf"

    def folder(self, eps: float, split: str, norm: str = "linf") -> Path:
        """Where results go unless the user says otherwise."""
        radius = f"eps{eps:.6g}" if norm == "linf" else f"{norm}-eps{eps:.6g}"
        return self.results.with_name(f"{self.results.name}-{radius}-{split}")


def is_onnx(path: Path) -> bool:
    """Whether a file's name says that it is ONNX.

    >>> is_onnx(Path("net.onnx.gz")), is_onnx(Path("net.pt"))
    (True, False)
    """
    return path.name.lower().endswith((".onnx", ".onnx.gz"))


def load_target(
    path: Path, *, dataset: str | None = None, data_root: str | None = None, net: str | None = None
) -> Target:
    """Load a run folder with its dataset, or a network file with the dataset that is named.

    Networks from elsewhere take pixels in [0, 1]: normalising is part of them.
    """
    if str(path).startswith(zoo.PREFIX):
        return _zoo_target(str(path), dataset, data_root, net)
    if path.is_dir() or not path.exists():
        if dataset is not None and path.is_dir():
            raise ConfigError(f"--dataset is for network files, the run {str(path)!r} has its own: remove it")
        if not path.exists() and (is_onnx(path) or path.suffix):
            raise CheckpointError(f"{str(path)!r} does not exist")
        run = load_run(path, data_root=data_root, net=net)
        return Target(run.model, run.dataset, run.config.eps, run.config.device, path / "certify", run.config.norm)
    if dataset is None:
        raise ConfigError(f"{str(path)!r} is a network without data: add --dataset and --eps, or --vnnlib")
    if is_onnx(path):
        data = load_dataset(dataset, root=data_root or "data")
        return Target(_onnx_model(path, data), data, None, "cpu", _beside(path))
    if net is None:
        raise ConfigError(f"{str(path)!r} holds weights alone: add --net, e.g. --net cnn3 or --net file.py:factory")
    config = TrainConfig(dataset=dataset, net=net)
    data = load_dataset(dataset, root=data_root or "data")
    model = make_network(config, data)
    load_weights(model, _weights(path), f"file {str(path)!r}")
    return Target(model.eval(), data, None, "cpu", _beside(path))


def _zoo_target(name: str, dataset: str | None, data_root: str | None, net: str | None) -> Target:
    entry = zoo.info(name)
    if net is not None:
        raise ConfigError(f"{name!r} has its own network: remove --net")
    data = load_dataset(dataset or entry.dataset, root=data_root or "data")
    if (data.in_shape, data.classes) != (entry.in_shape, entry.classes):
        raise DataError(f"{name!r} takes images of shape {entry.in_shape}, those of {data.name} have {data.in_shape}")
    return Target(zoo.load(name), data, entry.eps, "cpu", Path("runs") / f"zoo-{entry.name}-certify")


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name.split('.')[0]}-certify")


def _weights(path: Path) -> dict[str, Tensor]:
    state = state_of(path)
    inner = state.get("state_dict")
    named = inner if isinstance(inner, dict) else state
    if not all(isinstance(value, Tensor) for value in named.values()):
        raise CheckpointError(f"{str(path)!r} does not hold named weights")
    return named


def _onnx_model(path: Path, data: Dataset) -> nn.Module:
    from gls_lirpa.exchange.onnx_model import read_onnx

    network = read_onnx(path)
    own, images = network.in_shape, data.in_shape
    if torch.Size(own).numel() != torch.Size(images).numel():
        raise DataError(f"network {str(path)!r} takes inputs of shape {own}, images of {data.name} have {images}")
    if network.outputs != data.classes:
        raise DataError(f"network {str(path)!r} has {network.outputs} outputs, {data.name} has {data.classes} classes")
    if network.dtype != torch.float32:
        raise DataError(f"network {str(path)!r} takes {network.dtype}, images are float32")
    if own == images:
        return network.model
    if len(own) == 3:
        raise DataError(f"network {str(path)!r} takes images of shape {own}, those of {data.name} have {images}")
    return concatenated(nn.Flatten() if len(own) == 1 else Reshape(own), *concatenated(network.model))

"""The run folder: configuration, versions, metrics, checkpoints, final weights.

Every file is written to a temporary name and moved into place, so a reader or a resumed run never
meets half a file; the metrics file is append-only and cut back to the checkpoint on resume. What a
later command trusts is checked when it is read: files by ``checksums.json``, metrics row by row.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa import zoo
from gls_lirpa.base.files import replace_file
from gls_lirpa.base.provenance import commit
from gls_lirpa.data import Dataset, load_dataset
from gls_lirpa.engine.compat import versions
from gls_lirpa.errors import CheckpointError, ConfigError, UnknownNameError
from gls_lirpa.models import build_model, load_user_model
from gls_lirpa.training import checksums
from gls_lirpa.training.checksums import digest, read_checked, write_checked
from gls_lirpa.training.config import TrainConfig, checked_fields
from gls_lirpa.training.custom import CUSTOM


@dataclass(frozen=True)
class RunFolder:
    """Paths and file operations of one run, in the folder ``path``; ``content`` is what goes into a ``file``."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoint_file(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def weights_file(self) -> Path:
        return self.path / "weights.pt"

    def create(self, config: TrainConfig) -> None:
        """Start a run of this ``config`` here; an existing one is never overwritten."""
        if self.path.exists() and (
            not self.path.is_dir() or any(file.name not in _BEGUN for file in self.path.iterdir())
        ):
            raise ConfigError(
                f"output folder {str(self.path)!r} is not empty: add --resume to continue the run in it, "
                "or choose another --out"
                if self.path.is_dir()
                else f"{str(self.path)!r} is a file, not a folder: choose another --out"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_json("versions.json", {**versions(), "commit": commit()})
            write_checked(self.config_file, _json(config.to_dict()))
        except OSError as error:
            raise ConfigError(f"output folder {str(self.path)!r} cannot be written: {error.strerror}") from error

    def config(self) -> TrainConfig:
        """The configuration stored in this folder."""
        if not self.path.exists():
            raise CheckpointError(f"{str(self.path)!r} is not a run folder: it does not exist")
        if not self.config_file.is_file():
            raise CheckpointError(f"{str(self.path)!r} is not a run folder: it has no config.json")
        try:
            stored = json.loads(read_checked(self.config_file))
            if not isinstance(stored, dict):
                raise ValueError("expected one JSON object")
            return TrainConfig(**checked_fields(stored))
        except UnknownNameError as error:
            raise ConfigError(
                f"run {str(self.path)!r}{self._other_version()}: {error}; if a plugin defines it, add --plugin FILE"
            ) from error
        except ConfigError as error:
            raise ConfigError(
                f"run {str(self.path)!r} has a config.json that this version does not understand"
                f"{self._other_version()}: {error}"
            ) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{str(self.config_file)!r} is damaged: {error}") from error

    def _other_version(self) -> str:
        """Which version made this run, if it was another one."""
        try:
            theirs = json.loads((self.path / "versions.json").read_text())["gls-lirpa"]
        except (OSError, ValueError, TypeError, KeyError):
            return ""
        ours = versions().get("gls-lirpa")
        return "" if theirs == ours else f" (made by gls-lirpa {theirs}, this is {ours})"

    def write_json(self, name: str, content: Any) -> None:
        """Put ``content`` into the file ``name`` of this folder."""
        replace_file(self.path / name, _json(content))

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add the ``row`` of an epoch to the metrics."""
        with self.metrics_file.open("ab") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All complete rows, one per epoch; a last line cut short by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        checked = (self.path / checksums.NAME).exists()  # not in a run of an earlier version
        *lines, _ = self.metrics_file.read_bytes().split(b"\n")
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                own = row.pop("sha256", None)
                intact = own == (_row_digest(row) if checked or own else None) and row["epoch"] == number
            except (ValueError, TypeError, KeyError, AttributeError):
                intact = False
            if not intact:
                raise CheckpointError(
                    f"line {number} of {str(self.metrics_file)!r} is damaged: restore the file from a copy, "
                    "or train again into another --out"
                )
            rows.append(row)
        return rows

    def cut_metrics(self, epochs: int) -> None:
        """Forget rows beyond the checkpoint's so many finished ``epochs``."""
        rows = self.metrics()
        if len(rows) < epochs:
            raise CheckpointError(
                f"{str(self.metrics_file)!r} is damaged: it has {len(rows)} of {epochs} finished epochs; restore the "
                "file from a copy, or train again into another --out"
            )
        replace_file(self.metrics_file, b"".join(map(_line, rows[:epochs])))

    def save(self, file: Path, content: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_checked(file, buffer.getvalue())


_BEGUN = ("versions.json", "versions.json.tmp", checksums.NAME, f"{checksums.NAME}.tmp", "config.json.tmp")
"""All that a run may have left behind that was killed before its configuration was there."""


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _row_digest(row: dict[str, Any]) -> str:
    return digest(json.dumps(row).encode())[:16]


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps({**row, "sha256": _row_digest(row)}) + "\n").encode()


def load_file(file: Path, *, cure: str = "") -> dict[str, Any]:
    """A checkpoint or weight file, read without executing anything it contains.

    ``cure``: what to do if it is damaged.
    """
    if not file.is_file():
        raise CheckpointError(f"{str(file)!r} does not exist")
    try:
        stored = io.BytesIO(read_checked(file, cure=cure))
    except OSError as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    try:
        # torch does not look at the checksums that its own format has.
        if zipfile.is_zipfile(stored) and zipfile.ZipFile(stored).testzip() is not None:
            raise ValueError("a checksum does not fit")
        stored.seek(0)
        content = torch.load(stored, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        reason = "it holds objects other than tensors and numbers" if "weights_only" in str(error) else "it is damaged"
        end = f"; {cure}" if cure else ""
        raise CheckpointError(
            f"{str(file)!r} cannot be loaded: {reason} or was written by another program{end}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(file)!r} does not hold named weights")
    return content


def load_weights(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Put weights into a network of the same shape; another network's are refused, nothing changes."""
    own = model.state_dict()
    missing, extra = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    if missing or extra or wrong:
        name = (missing + extra + wrong)[0]
        detail = "missing" if missing else "unexpected" if extra else f"of shape {tuple(state[name].shape)}"
        raise CheckpointError(f"{source} holds another network's weights: {name!r} is {detail}")
    model.load_state_dict(state)


def dataset_of(config: TrainConfig, *, root: str | None = None) -> Dataset:
    """The data a configuration names, split by its seed; ``root`` where the files lie elsewhere now."""
    if config.dataset == CUSTOM:
        raise ConfigError("this run was trained on data passed as an object: use gls_lirpa.load_run(path, dataset=…)")
    return load_dataset(
        config.dataset,
        root=root or config.data_root,
        val_fraction=config.val_fraction,
        seed=config.seed,
        limit=config.limit,
    )


def make_network(config: TrainConfig, dataset: Dataset) -> nn.Module:
    """The network a configuration names, for a dataset's images and classes."""
    if config.net == CUSTOM:
        raise ConfigError("this run's network was passed as an object: use gls_lirpa.load_run(path, model=…)")
    shape: dict[str, Any] = {
        "in_shape": dataset.in_shape,
        "classes": dataset.classes,
        "mean": dataset.mean,
        "std": dataset.std,
        "seed": config.seed,
    }
    if ".py:" in config.net:
        return load_user_model(config.net, **shape)
    return build_model(config.net, init=config.init, **shape)


def make_teacher(config: TrainConfig, dataset: Dataset) -> nn.Module | None:
    """The trained network that a configuration's loss learns from, fixed and in eval mode.

    A run folder says which network it is; a weight file must be of the student's.
    """
    if config.teacher is None:
        return None
    path = Path(config.teacher)
    own = RunFolder(path).config() if path.is_dir() else config
    if ".py:" in own.net and own.net != config.net:
        raise ConfigError(
            f"teacher {config.teacher!r} uses the network file {own.net!r}: only the student's own is executed"
        )
    model = make_network(own, dataset)
    load_weights(model, state_of(path), f"--teacher {config.teacher!r}")
    return model.eval().requires_grad_(False)


def state_of(path: Path) -> dict[str, Tensor]:
    """The weights in a run folder (final, else of the last checkpoint), in a weight file, or of the zoo."""
    if str(path).startswith(zoo.PREFIX):
        return zoo.state(str(path))
    folder, cure = RunFolder(path), ""
    if path.is_dir():
        file = folder.weights_file if folder.weights_file.exists() else folder.checkpoint_file
        if not file.exists():
            raise CheckpointError(f"{str(path)!r} holds no weights: expected weights.pt or checkpoint.pt")
        if file == folder.weights_file and folder.checkpoint_file.exists():
            cure = f"`glscert train --out {path} --resume` writes it again from the run's checkpoint"
    else:
        file = path
    content = load_file(file, cure=cure)
    state: Any = content.get("model", content)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{str(file)!r} does not hold named weights")
    return state


@dataclass(frozen=True)
class Run:
    """A finished or interrupted run in the folder ``path``: ``model`` in eval mode, ``config`` and ``dataset``."""

    path: Path
    config: TrainConfig
    dataset: Dataset
    model: nn.Module


def load_run(path: Path, *, data_root: str | None = None, net: str | None = None) -> Run:
    """The run in ``path``, with data in ``data_root`` if given. A user's network file runs only if ``net`` names it."""
    config = RunFolder(path).config()
    if ".py:" in config.net and net is None:
        raise ConfigError(
            f"run {str(path)!r} uses the network file {config.net!r}: add --net {config.net} to let it be executed"
        )
    if net is not None:
        config = config.replaced({"net": net})
    dataset = dataset_of(config, root=data_root)
    model = make_network(config, dataset)
    load_weights(model, state_of(path), f"run {str(path)!r}")
    return Run(path, config, dataset, model.eval())

"""The manifest of the networks that come with the package, and how one is loaded.

Weight files hold tensors alone and are read as such: loading executes no code. Each must have the SHA-256 that the
manifest names.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gls_lirpa.base.registry import nearest
from gls_lirpa.errors import CheckpointError, ConfigError
from gls_lirpa.models import ConvNet, build_model

PREFIX = "zoo:"
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class ZooEntry:
    """One network: how it was made and how good it is.

    ``name``: in the zoo; ``sha256``: of its file. ``net``: its architecture in ``MODELS``; ``in_shape``, ``classes``,
    ``mean`` and ``std``: what that is built for; ``parameters``: how many can be trained. ``dataset`` and ``method``
    (``robust·crown·rgs``): what it was trained on and with.
    ``natural``, ``adversarial``, ``certified``: shares of the first ``samples`` of the test set at radius ``eps``,
    by ``stages`` within ``timeout`` seconds each. ``command`` and ``seed``: what made it; ``config``: the same in full.
    """

    name: str
    sha256: str
    net: str
    dataset: str
    in_shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    parameters: int
    eps: float
    method: str
    seed: int
    natural: float
    adversarial: float
    certified: float
    samples: int
    stages: tuple[str, ...]
    timeout: float
    command: str
    config: dict[str, Any]

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.pt"


def names() -> list[str]:
    """The names of all networks.

    >>> "digits-cnn3-crown-rgs" in names()
    True
    """
    return [*_entries()]


def info(name: str) -> ZooEntry:
    """What the manifest says of a network, with or without ``zoo:`` before its name.

    Raises ConfigError for a name that is not there.

    >>> info("zoo:digits-cnn3-crown-rgs").dataset
    'digits'
    """
    key = name.removeprefix(PREFIX).strip()
    entries = _entries()
    if key not in entries:
        hint = nearest(key, [*entries])
        raise ConfigError(f"no network {key!r} in the zoo: expected one of {', '.join(entries)}{hint}")
    return entries[key]


def state(name: str) -> dict[str, Tensor]:
    """The weights of a network, by name of its parameters.

    Raises CheckpointError where the file is missing or not the one of the manifest.

    >>> sorted(state("digits-cnn3-crown-rgs"))[0]
    '0.bias'
    """
    entry = info(name)
    if not entry.file.is_file():
        raise CheckpointError(f"the file of {entry.name!r} is missing: install gls-lirpa again")
    content = entry.file.read_bytes()
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise CheckpointError(f"the file of {entry.name!r} is damaged (SHA-256): install gls-lirpa again")
    weights: dict[str, Tensor] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return weights


def load(name: str) -> ConvNet:
    """A network of the zoo, in eval mode; it takes pixels in [0, 1].

    Raises ConfigError for a name that is not there, CheckpointError for a damaged file.

    >>> load("digits-cnn3-crown-rgs")(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    entry = info(name)
    model = build_model(entry.net, in_shape=entry.in_shape, classes=entry.classes, mean=entry.mean, std=entry.std)
    model.load_state_dict(state(name))
    model.eval()
    return model


def read_manifest(folder: Path = FOLDER) -> list[ZooEntry]:
    """All entries of ``manifest.json``."""
    rows: list[dict[str, Any]] = json.loads((folder / "manifest.json").read_text())
    tuples = ("in_shape", "mean", "std", "stages")
    for row in rows:
        row.update({key: tuple(row[key]) for key in tuples if row[key] is not None})
    return [ZooEntry(**row) for row in rows]


@cache
def _entries() -> dict[str, ZooEntry]:
    return {entry.name: entry for entry in read_manifest()}

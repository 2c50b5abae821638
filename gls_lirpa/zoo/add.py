"""Putting a trained and certified network into the zoo."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from gls_lirpa.base.files import replace_file
from gls_lirpa.zoo.catalogue import FOLDER, ZooEntry, read_manifest


def add_network(model: nn.Module, entry: ZooEntry, folder: Path = FOLDER) -> ZooEntry:
    """Write the weights beside the manifest and the entry into it, replacing one of the same name.

    The entry's ``sha256`` becomes that of the file.
    """
    buffer = io.BytesIO()
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}, buffer)
    content = buffer.getvalue()
    entry = ZooEntry(**{**asdict(entry), "sha256": hashlib.sha256(content).hexdigest()})
    others = read_manifest(folder) if (folder / "manifest.json").exists() else []
    rows = sorted([*(other for other in others if other.name != entry.name), entry], key=lambda row: row.name)
    replace_file(folder / f"{entry.name}.pt", content)
    replace_file(folder / "manifest.json", (json.dumps([asdict(row) for row in rows], indent=1) + "\n").encode())
    return entry

"""Configurations as files: reading TOML, and printing what a preset or a run stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gls_lirpa.errors import ConfigError
from gls_lirpa.training.job import make_config
from gls_lirpa.training.presets import PRESETS, RECIPES
from gls_lirpa.training.runs import RunFolder


def shown(name: str | None, *, estimator: str | None = None, net: str | None = None, toml: bool = False) -> str:
    """The whole configuration of a preset or a run folder as text, or the names of all presets.

    >>> "paper-mnist-0.1" in shown(None).splitlines()
    True
    >>> json.loads(shown("mnist-0.1"))["batch_size"]
    256
    """
    if name is None:
        return "\n".join(PRESETS)
    if (Path(name) / "config.json").is_file():
        if estimator is not None or net is not None:
            raise ConfigError(f"{name!r} is a run with its own estimator and network: remove --estimator and --net")
        config = RunFolder(Path(name)).config()
    elif name in RECIPES:
        raise ConfigError(f"preset {name!r} depends on the dataset: expected one of {', '.join(PRESETS)}")
    else:
        config = make_config({"preset": name, "estimator": estimator, "net": net})
    fields = config.to_dict()
    return to_toml(fields) if toml else json.dumps(fields, indent=2)


def to_toml(fields: dict[str, Any]) -> str:
    """Flat fields and one level of tables as TOML, which has no null: such fields are left out.

    >>> print(to_toml({"dataset": "mnist", "limit": None, "milestones": (50.0, 60.0), "loss_options": {"steps": 8}}))
    dataset = "mnist"
    milestones = [50.0, 60.0]
    <BLANKLINE>
    [loss_options]
    steps = 8
    """
    plain = {key: value for key, value in fields.items() if value is not None and not isinstance(value, dict)}
    tables = {key: value for key, value in fields.items() if isinstance(value, dict) and value}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines)

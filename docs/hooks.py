"""Pages that are made from the code when the documentation is built: API, commands, methods' options, config keys."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ("api", "commands", "options", "config")
FURTHER = {
    "gls_lirpa.training": ("TrainConfig", "Silent", "Several", "Interrupted"),
    "gls_lirpa.training.own_data": ("own_dataset", "own_split"),
    "gls_lirpa.data": ("Dataset", "Split", "batches", "load_dataset"),
    "gls_lirpa.certification": ("Cascade", "Settings", "StageOptions", "pgd"),
    "gls_lirpa.zoo": ("ZooEntry", "info", "load", "names", "state"),
    "gls_lirpa.errors": ("ConfigError", "DataError", "CheckpointError", "EngineError", "NumericalError"),
}
"""Names below the top that people use too."""


def api_page() -> str:
    """Every public name, documented by mkdocstrings."""
    import gls_lirpa

    lines = ["# Python API", "", "Everything that `gls_lirpa` exports, and what people use below it.", ""]
    for name in sorted(gls_lirpa.__all__, key=str.lower):
        item = getattr(gls_lirpa, name)
        if isinstance(item, types.ModuleType) or name == "__version__":
            lines += [f"## `gls_lirpa.{name}`", "", _first_line(item) if name == "zoo" else f"`{item!r}`", ""]
        else:
            lines += [f"## {name}", "", f"::: gls_lirpa.{name}", ""]
    for module, names in FURTHER.items():
        lines += [f"## `{module}`", ""]
        for name in names:
            lines += [f"### {module}.{name}", "", f"::: {module}.{name}", ""]
    return "\n".join(lines)


def commands_page() -> str:
    """The help of every command."""
    import click
    from glscert.__main__ import COMMANDS, main

    lines = ["# Commands", ""]
    context = click.Context(main, info_name="glscert", terminal_width=100)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        lines += [f"## glscert {name}", "", "```text", _help(command, name), "```", ""]
        if isinstance(command, click.Group):
            for inner, sub in command.commands.items():
                text = _help(sub, f"{name} {inner}")
                lines += [f"### glscert {name} {inner}", "", "```text", text, "```", ""]
    return "\n".join(lines)


def _help(command: Any, name: str) -> str:
    import click

    settings = {"terminal_width": 100, "max_content_width": 100, "resilient_parsing": True}
    context = click.Context(command, info_name=f"glscert {name}", **settings)
    command.parse_args(context, [])  # fills in what comes from the tables of methods
    return str(command.get_help(context))


def options_page() -> str:
    """Losses, relaxations and estimators with their options, from the registries."""
    from gls_lirpa.estimators import ESTIMATORS
    from gls_lirpa.losses import LOSSES
    from gls_lirpa.relaxations import RELAXATIONS

    lines = ["# Methods and their options", "", "What each means, with formulas, is on [Methods](methods.md).", ""]
    for title, table in (("Losses", LOSSES), ("Relaxations", RELAXATIONS), ("Estimators", ESTIMATORS)):
        lines += [f"## {title}", "", "| name | what it is | options |", "|---|---|---|"]
        for name in table:
            item = table.get(name)
            options = ", ".join(f"`{option}`" for option in item.options) or "none"
            lines.append(f"| `{name}` | {item.help} | {options} |")
        lines.append("")
    return "\n".join(lines)


def config_page() -> str:
    """The keys of a configuration file."""
    from gls_lirpa.training.config import TrainConfig

    hints = typing.get_type_hints(TrainConfig)
    lines = [
        "# Configuration keys",
        "",
        "A run's `config.json`, a file for `glscert train --config` (JSON or TOML) and the keyword arguments of",
        "`gls_lirpa.train` have these keys. `glscert config show PRESET` prints a preset's.",
        "",
        "| key | type | default without a preset |",
        "|---|---|---|",
    ]
    for field in dataclasses.fields(TrainConfig):
        default = {} if field.default is dataclasses.MISSING else field.default
        kind = hints[field.name]
        name = kind.__name__ if inspect.isclass(kind) else str(kind).replace("typing.", "")
        lines.append(f"| `{field.name}` | `{name.replace('|', 'or')}` | `{default!r}` |")
    return "\n".join([*lines, ""])


def _first_line(item: Any) -> str:
    return (inspect.getdoc(item) or "").splitlines()[0]


def write_pages(folder: Path = ROOT / "docs") -> None:
    """Write the generated pages, and the pictures that our suites made."""
    pages = {"api": api_page, "commands": commands_page, "options": options_page, "config": config_page}
    for name, make in pages.items():
        (folder / "reference" / f"{name}.md").write_text(make())
    (folder / "pictures").mkdir(exist_ok=True)
    for picture in (ROOT / "benchmarks" / "pictures").glob("*.png"):
        shutil.copy(picture, folder / "pictures")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs: sources point at pictures where they lie in a clone, pages at their copies."""
    return markdown.replace("](../benchmarks/pictures/", "](pictures/")


def on_pre_build(config: Any) -> None:
    """Called by mkdocs."""
    del config
    write_pages()

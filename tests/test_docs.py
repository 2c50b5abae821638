"""The documentation: it is built without warnings, and every public name, command and option is in it."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import gls_lirpa

ROOT = Path(__file__).parents[1]
PUBLIC = [name for name in gls_lirpa.__all__ if callable(getattr(gls_lirpa, name))]


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_on_the_api_page() -> None:
    page = hooks().api_page()
    for name in gls_lirpa.__all__:
        assert f"::: gls_lirpa.{name}\n" in page or f"## `gls_lirpa.{name}`" in page
    for module, names in hooks().FURTHER.items():
        assert all(hasattr(importlib.import_module(module), name) for name in names)


def test_every_command_and_option_is_on_the_commands_page() -> None:
    from glscert.__main__ import COMMANDS

    page = hooks().commands_page()
    for name in COMMANDS:
        assert f"## glscert {name}\n" in page
    for option in ("--relaxation", "--sigma", "--dry-run", "--log", "--cross-check", "--vnnlib", "--epochs-scale"):
        assert option in page


def test_every_method_and_key_is_documented() -> None:
    made = hooks()
    methods, options, config = (ROOT / "docs/reference/methods.md").read_text(), made.options_page(), made.config_page()
    from gls_lirpa.estimators import ESTIMATORS
    from gls_lirpa.losses import LOSSES
    from gls_lirpa.relaxations import RELAXATIONS
    from gls_lirpa.training import TrainConfig

    for table in (LOSSES, RELAXATIONS, ESTIMATORS):
        for name in table:
            if not name.startswith("test-"):
                assert f"| `{name}` |" in options and f"`{name}`" in methods
    for name in TrainConfig.__dataclass_fields__:
        assert f"| `{name}` |" in config


def test_no_link_of_the_pages_is_broken_in_a_clone() -> None:
    generated = {ROOT / "docs" / "reference" / f"{name}.md" for name in hooks().GENERATED}
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")} - generated
    found = 0
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not link.startswith(("http", "mailto:")):
                found += 1
                target = (page.parent / link).resolve()
                made = target in generated or target.is_relative_to(ROOT / "docs" / "pictures")
                assert target.exists() and not made, f"{page}: {link}"
    assert found > 10


def command_lines() -> list[tuple[str, list[str]]]:
    """Every complete ``glscert`` command of the README and the pages, with where it stands."""
    found = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if page.stem in hooks().GENERATED:
            continue
        text = page.read_text()
        blocks = "\n".join(re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL))
        lines = [part for line in blocks.splitlines() for part in line.split("&&")]
        inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`(glscert\s[^`]+)`(?!`)", text)]
        for line in [*lines, *inline]:
            words = shlex.split(line, comments=True)
            if words[:1] == ["glscert"] and len(words) > 1:
                found.append((f"{page.name}: {line.strip()}", words[1:]))
    return found


def test_commands_of_the_pages_exist() -> None:
    import click
    from glscert.__main__ import main

    from gls_lirpa.bench.suites import SUITES

    lines = command_lines()
    assert len(lines) > 40
    for where, words in lines:
        context = click.Context(main, info_name="glscert")
        command = main.get_command(context, words[0])
        assert command is not None, where
        arguments = words[1:]
        if isinstance(command, click.Group) and arguments:
            command, arguments = command.get_command(context, arguments[0]) or command, arguments[1:]
        parsed = command.make_context(words[0], arguments, resilient_parsing=True, allow_extra_args=False)
        known = [word.split("=")[0] for word in arguments if word.startswith("--")]
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert set(known) <= options, where
        if words[0] == "bench" and parsed.params["suite"] is not None:
            assert parsed.params["suite"] in {*SUITES, "fronts", "SUITE"}, where


def test_documentation_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    api = (tmp_path / "site" / "reference" / "api.html").read_text()
    for name in PUBLIC:
        assert f'id="gls_lirpa.{name}"' in api or f">{name}<" in api, name


# That the examples are right is tested with those of all modules.
@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_a_text_and_an_example(name: str) -> None:
    item = getattr(gls_lirpa, name)
    assert inspect.getdoc(item), f"{name} has no docstring"
    if isinstance(item, type) and (issubclass(item, Exception) or name in WITHOUT_EXAMPLE):
        return
    assert any(test.examples for test in doctest.DocTestFinder().find(item, name)), f"{name} has no example"


WITHOUT_EXAMPLE = ("Bounds", "Relaxation", "TrainedRun", "Radii")
"""Plain records, which functions with examples return."""


def test_modules_are_not_mistaken_for_names() -> None:
    assert isinstance(gls_lirpa.zoo, types.ModuleType)


def exported() -> dict[str, Any]:
    """Functions and classes that some package exports, each once. The solver's settings have a text below each."""
    found: dict[str, Any] = {}
    packages = [info.name for info in pkgutil.walk_packages(gls_lirpa.__path__, "gls_lirpa.") if info.ispkg]
    for module in map(importlib.import_module, ["gls_lirpa", *packages]):
        own = [name for name, item in vars(module).items() if getattr(item, "__module__", "") == module.__name__]
        for item in (getattr(module, name) for name in getattr(module, "__all__", own)):
            if inspect.isroutine(item) or (isinstance(item, type) and not issubclass(item, Exception)):
                found[f"{item.__module__.removeprefix('gls_lirpa.')}.{item.__qualname__}"] = item
    found.pop("solver.settings.SolverSettings")
    return found


EXPORTED = exported()


def test_what_packages_export_is_found() -> None:
    assert len(EXPORTED) > 80
    assert {"api.train", "training.config.TrainConfig", "readers.Parts", "zoo.catalogue.names"} < set(EXPORTED)


@pytest.mark.parametrize("name", EXPORTED)
def test_every_argument_is_in_the_text(name: str) -> None:
    """A class's text may speak for its methods; those ``OF_PROTOCOLS`` are in their protocol's."""
    item = EXPORTED[name]
    calls, own = {name: item}, item.__doc__ or ""
    assert own and not own.startswith(f"{item.__name__}("), "no text but what a dataclass has by itself"
    if isinstance(item, type):
        elsewhere = () if getattr(item, "_is_protocol", False) else OF_PROTOCOLS
        public = [key for key in vars(item) if (key == "__call__" or key[0] != "_") and key not in elsewhere]
        found = {key: getattr(item, key, None) for key in public}
        calls |= {key: call for key, call in found.items() if inspect.isfunction(call) or inspect.ismethod(call)}
    for call in calls.values():
        text = re.sub(r"(>>>|\.\.\. ).*", "", f"{own}\n{call.__doc__}")
        known = {*re.findall(r"\w+", text), "self", "args", "kwargs"}
        missing = set(inspect.signature(call).parameters) - known
        assert not missing, f"{call.__qualname__}: {missing}"


OF_PROTOCOLS = ("set_sigma", "load_state_dict", "started", "stepped", "epoch_ended")

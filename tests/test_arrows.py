"""Which package may import which, and that every import in the code obeys."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ARROWS: dict[str, str] = {
    "errors": "",
    "version": "",
    "base": "errors",
    "engine": "base errors",
    "models": "base errors",
    "readers": "base errors",
    "data": "base errors readers",
    "estimators": "base errors",
    "relaxations": "base engine errors",
    "attacks": "base engine",
    "losses": "attacks base engine errors models relaxations",
    "solver": "attacks base engine errors relaxations",
    "certification": "attacks base data engine errors models relaxations solver",
    "zoo": "base errors models",
    "training": "base data engine errors estimators losses models relaxations zoo",
    "exchange": "base certification engine errors models",
    "analysis": "attacks base certification engine errors estimators losses relaxations training",
    "jobs": "base certification data errors estimators exchange losses models relaxations training zoo",
    "doctor": "attacks base data engine errors models relaxations",
    "bench": "analysis base certification data engine errors estimators jobs losses models relaxations training",
    "tuning": "base bench errors losses training",
    "api": "base certification data errors models training",
    "gls_lirpa": "api base certification engine errors estimators losses models relaxations version zoo",
    "cli": "base bench doctor jobs training tuning zoo",
}
"""Each package, from the bottom to the top, and the packages above which it stands."""

SOLE_IMPORTERS = {
    "auto_LiRPA": "engine",
    "ray": "base estimators",
    "evotorch": "estimators",
    "click": "cli",
    "optuna": "tuning",
    "matplotlib": "base",
    "glscert": "cli",
}
"""Libraries, and the packages that know them."""

Import = tuple[str, str, str]
"""(package, imported name, place in the code)"""


def package_of(parts: tuple[str, ...]) -> str:
    """The package of a module, given by the parts of its name below ``gls_lirpa``."""
    if not parts:
        return "gls_lirpa"
    return parts[0]


def target_of(name: str) -> str:
    """The package of an imported name below ``gls_lirpa``; what that exports itself is its own."""
    target = package_of(tuple(name.split(".")[1:]))
    return target if target in ARROWS else "gls_lirpa"


def imports(root: Path = ROOT) -> Iterator[Import]:
    """Every import statement, and ``import_module("…")`` and ``optional("…")``, those inside functions included."""
    for folder, top in ((root / "gls_lirpa", "gls_lirpa"), (root / "cli", "glscert")):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            package = package_of(parts) if top == "gls_lirpa" else "cli"
            for node in ast.walk(ast.parse(file.read_text())):
                for name in _names(node, (top, *file.relative_to(folder).parts)):
                    yield package, name, f"{file.relative_to(root)}:{getattr(node, 'lineno', 0)}"


def _names(node: ast.AST, file: tuple[str, ...]) -> list[str]:
    """What a node imports in a file, whose name is given by its parts."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        # One dot is the file's own folder, every further one the folder above.
        start = file[: len(file) - node.level] if node.level else ()
        return [".".join([*start, *filter(None, [node.module]), alias.name]) for alias in node.names]
    called = node.func if isinstance(node, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    if isinstance(node, ast.Call) and name in ("import_module", "optional") and node.args:
        first = node.args[0]
        return [str(first.value)] if isinstance(first, ast.Constant) else []
    return []


def wrong_arrows(found: list[Import]) -> list[str]:
    wrong = []
    for package, name, place in found:
        top = name.split(".")[0]
        if top == "gls_lirpa":
            if (target := target_of(name)) != package and target not in ARROWS[package].split():
                wrong.append(f"{place}: {package} imports {name}")
        elif package not in SOLE_IMPORTERS.get(top, package).split():
            wrong.append(f"{place}: {package} imports {top}, which only {SOLE_IMPORTERS[top]} may")
    return wrong


def picture() -> str:
    """The arrows that do not follow from others, for CONTRIBUTING.md."""
    above = {name: set(arrows.split()) for name, arrows in ARROWS.items()}
    reach: dict[str, set[str]] = {}
    for name, direct in above.items():
        reach[name] = direct.union(*(reach[lower] for lower in direct))
    lines = ["```mermaid", "graph TD"]
    for name, direct in reversed(above.items()):
        kept = [lower for lower in sorted(direct) if not any(lower in reach[other] for other in direct)]
        lines += [f"    {name} --> {lower}" for lower in kept]
    return "\n".join([*lines, "```"])


def test_packages_import_only_what_they_stand_on() -> None:
    found = list(imports())
    assert len(found) > 500  # the reader sees imports at all
    assert wrong_arrows(found) == []


def test_every_arrow_of_the_table_is_used() -> None:
    used = {(package, target_of(name)) for package, name, _ in imports() if name.startswith("gls_lirpa.")}
    assert {(package, lower) for package, arrows in ARROWS.items() for lower in arrows.split()} <= used


def test_the_table_has_every_package_and_no_cycle() -> None:
    packages = {path.stem for path in (ROOT / "gls_lirpa").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert packages - {"__init__", "__pycache__", "py"} <= set(ARROWS)
    names = list(ARROWS)
    for position, name in enumerate(names):
        assert set(ARROWS[name].split()) <= set(names[:position]), f"{name} must stand above all it imports"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("gls_lirpa/engine/new.py", "def later() -> None:\n    from gls_lirpa.relaxations import RELAXATIONS\n"),
        ("gls_lirpa/certification/new.py", "import gls_lirpa.training.loop\n"),
        ("gls_lirpa/certification/new.py", "from gls_lirpa import training\n"),
        ("gls_lirpa/losses/new.py", "import importlib\n\nlirpa = importlib.import_module('auto_LiRPA.operators')\n"),
        ("gls_lirpa/bench/new.py", "import ray\n"),
        (
            "gls_lirpa/bench/new.py",
            "from gls_lirpa.base import extras\n\nray = extras.optional('ray', extra='actors')\n",
        ),
        ("gls_lirpa/engine/new.py", "from ..losses import terms\n"),
        ("gls_lirpa/engine/new.py", "from .. import losses\n"),
        ("gls_lirpa/losses/new.py", "from gls_lirpa import certify\n"),
        ("gls_lirpa/engine/new.py", "if TYPE_CHECKING:\n    from gls_lirpa.models import ConvNet\n"),
        ("gls_lirpa/jobs/new.py", "from glscert.options import Radius\n"),
    ],
)
def test_a_wrong_arrow_is_seen(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(line)
    assert len(wrong_arrows(list(imports(tmp_path)))) == 1


def test_one_place_starts_ray() -> None:
    files = [*(ROOT / "gls_lirpa").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    assert [file.name for file in files if "ray.init(" in file.read_text()] == ["ray_session.py"]


def test_the_picture_in_contributing_is_the_table() -> None:
    assert picture() in (ROOT / "CONTRIBUTING.md").read_text(), f"put this into CONTRIBUTING.md:\n{picture()}"

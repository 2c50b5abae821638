"""Habits: short test files, helpers in one place, names that mean one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from gls_lirpa.estimators import ESTIMATORS
from gls_lirpa.losses import LOSSES
from gls_lirpa.relaxations import RELAXATIONS

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests").rglob("*.py"))
LINES = 400


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_are_short_and_borrow_from_helpers_alone(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) < LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tests":
            assert node.module.startswith("tests.helpers"), f"line {node.lineno}: move {node.module} to tests/helpers"


def test_the_makefile_names_tests_that_exist() -> None:
    words = (ROOT / "Makefile").read_text().split()
    named = [word for word in words if word.startswith("tests/") and word.endswith(".py")]
    assert len(named) > 4 and all((ROOT / name).is_file() for name in named)


def test_no_two_classes_have_one_name() -> None:
    files = [file for folder in ("gls_lirpa", "cli") for file in (ROOT / folder).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert len(names) > 150 and [name for name, count in names.items() if count > 1] == []


PLANS = {
    "gls_lirpa/bench/suites.py": "what an experiment compares",
    "gls_lirpa/engine/operators.py": "what the engine's own methods do with an operation",
    "gls_lirpa/engine/plain.py": "auto_LiRPA's methods",
}
"""Files that name some methods because they mean these, and not all there are."""


def listed_methods(tree: ast.AST) -> list[int]:
    """Lines with a list, tuple, set or dictionary by name of two methods or more, and of nothing else."""
    tables = [set(table.names()) for table in (LOSSES, RELAXATIONS, ESTIMATORS)]
    found = []
    for node in ast.walk(tree):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        words = {item.value if isinstance(item, ast.Constant) else None for item in items}
        if len(words) > 1 and any(words <= names for names in tables):
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


def test_lists_of_methods_come_from_their_registries() -> None:
    for folder in ("gls_lirpa", "cli"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name, lines = str(file.relative_to(ROOT)), listed_methods(ast.parse(file.read_text()))
            assert bool(lines) == (name in PLANS), f"{name}, lines {lines}"


def test_a_list_of_methods_is_seen() -> None:
    for text in ('("ibp", "crown")', '{"rgs": 1, "pgpe": 2}', '["sabr", "taps", "mtl"]'):
        assert listed_methods(ast.parse(text)) == [1]
    assert listed_methods(ast.parse('("ibp", "other"), ["crown"], {**all}')) == []

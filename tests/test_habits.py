"""Habits: short test files, helpers in one place, names that mean one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

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

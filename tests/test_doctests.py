"""The examples in docstrings, of every module."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import gls_lirpa

MODULES = ["gls_lirpa", *(module.name for module in pkgutil.walk_packages(gls_lirpa.__path__, "gls_lirpa."))]
# It imports evotorch and Ray, whose first import in a process decides their settings.
MODULES.remove("gls_lirpa.estimators.problem")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_examples_are_found() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) > 150

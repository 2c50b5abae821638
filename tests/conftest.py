"""Shared set-up: one thread, so that results do not depend on the machine's cores; the command line."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from glscert.__main__ import run

from tests.helpers.command import Glscert, Result


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def glscert(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Glscert:
    """``glscert`` in this process: exit code, standard output and standard error."""

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["glscert", *map(str, arguments)])
        code = 0
        try:
            run()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capfd.readouterr())

    return call

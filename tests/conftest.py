"""Shared set-up: one thread, so that results do not depend on the machine's cores."""

from __future__ import annotations

import warnings

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

"""Fixtures of several files in this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch import Tensor, nn

from gls_lirpa.certification import STAGES, StageOptions
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from tests.helpers.cascade import (
    Answer,
    exact_minimum,
    images,
    mlp,
)


@pytest.fixture
def register() -> Iterator[Callable[[str, Answer], None]]:
    """Adds stages that give prepared answers, and takes them away again."""
    names: list[str] = []

    def add(name: str, answer: Answer) -> None:
        class Prepared:
            batch = 4

            def __init__(self, options: StageOptions) -> None:
                self.name = name

            def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
                return answer(subject, samples)

        STAGES.register(name, Prepared)
        names.append(name)

    yield add
    for name in names:
        del STAGES._items[name]


@pytest.fixture(scope="module")
def exact_cases() -> list[tuple[nn.Sequential, Tensor, Tensor, float, list[float]]]:
    cases = []
    for seed, eps in ((0, 0.0), (1, 0.02), (2, 0.05), (3, 0.1), (4, 0.2), (5, 0.4)):
        model, x = mlp(seed), images(5, seed=seed)
        labels = model(x).argmax(1)
        cases.append(
            (model, x, labels, eps, [exact_minimum(model, x[i : i + 1], int(labels[i]), eps) for i in range(5)])
        )
    return cases

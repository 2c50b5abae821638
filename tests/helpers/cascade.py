"""Small networks, and stages that claim or offer what a test says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.certification import Record, StageOptions
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from tests.helpers.oracle import exact_margins

INPUTS, HIDDEN, CLASSES = 3, 4, 3
BOUNDING = ("ibp", "hbox", "crown-ibp", "crown", "alpha-crown")
CHEAP = ("ibp", "pgd", "crown-ibp", "crown", "alpha-crown")
FAST = StageOptions(attack_steps=10, attack_restarts=2, iterations=5)
Answer = Callable[[Subject, OpenSamples], Findings]


def mlp(seed: int) -> nn.Sequential:
    """A network whose classes all meet in the middle of the pixel range."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.7, generator=generator)
        model[1].bias -= model[1].weight.sum(1) / 2
        model[3].bias -= model(torch.full((1, 1, 1, INPUTS), 0.5))[0]
    return model


def constant(*logits: float) -> nn.Sequential:
    """A network that gives the same logits everywhere."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, len(logits)))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor(logits))
    return model


def images(number: int, *, seed: int = 0) -> Tensor:
    """Shape (n, 1, 1, 3), a third of the pixels exactly at the ends of [0, 1]."""
    x = torch.rand(number, 1, 1, INPUTS, generator=torch.Generator().manual_seed(seed))
    return (x * 1.5 - 0.25).clamp(0, 1)


def exact_minimum(model: nn.Sequential, x: Tensor, label: int, eps: float) -> float:
    """min over the box and over j ≠ y of f_y − f_j."""
    return float(exact_margins(model, linf_box(x, eps), torch.tensor([label])).min())


def claims(lower: Tensor | float) -> Answer:
    """A stage that returns these bounds whatever the network is."""

    def answer(subject: Subject, samples: OpenSamples) -> Findings:
        bounds = torch.zeros_like(samples.lower) + lower
        return Findings(bounds, [None] * len(samples), [False] * len(samples))

    return answer


def verdicts(records: list[Record]) -> list[tuple[int, str, str]]:
    return [(record.index, record.verdict, record.stage) for record in records]

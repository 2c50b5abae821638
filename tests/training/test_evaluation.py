"""What a network is told about itself on held-out data while it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gls_lirpa.data import Split
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.training.evaluation import held_out_accuracy


@pytest.mark.parametrize(("bias", "active", "unstable"), [(5.0, 100.0, 0.0), (-5.0, 0.0, 0.0), (0.0, 0.0, 100.0)])
def test_shares_of_relus(bias: float, active: float, unstable: float) -> None:
    """Of ±(x₁ − x₂) + bias at x₁ = x₂, of which nothing but the bias decides the sign within a small box."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    first, last = model[1], model[3]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    first.weight.data = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    first.bias.data.fill_(bias)
    last.bias.data = torch.tensor([10.0, 0.0])
    split = Split(torch.full((3, 1, 1, 2), 128, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    engine = BoundEngine(model, split.batch([0])[0])
    found = held_out_accuracy(
        model, engine, split, eps=0.1, relaxation=RELAXATIONS.get("crown"), samples=3, device="cpu"
    )
    assert (found.active, found.unstable, found.natural) == (active, unstable, 100.0)

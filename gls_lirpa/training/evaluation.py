"""Quick accuracies on held-out data while training; ``glscert certify`` is the thorough way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gls_lirpa.base.balls import region
from gls_lirpa.base.boxes import margin_spec
from gls_lirpa.base.modes import evaluating
from gls_lirpa.data import Split
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.relaxations import Relaxation


@dataclass(frozen=True)
class HeldOut:
    """Natural and certified accuracy in per cent, and the shares of ReLUs that are unstable and that are active all
    over the boxes. Where nearly all are active, the network is an affine function."""

    natural: float
    certified: float
    unstable: float
    active: float


@torch.no_grad()
def held_out_accuracy(
    model: nn.Module,
    engine: BoundEngine,
    split: Split,
    *,
    eps: float,
    norm: str = "linf",
    relaxation: Relaxation,
    samples: int,
    device: str,
) -> HeldOut:
    """How good the network is on the first ``samples`` of a split, in eval mode."""
    number = min(samples, len(split))
    natural = certified = unstable = active = neurons = 0
    with evaluating(model):
        for start in range(0, number, 256):
            x, y = split.batch(range(start, min(start + 256, number)), device)
            right = model(x).argmax(1) == y
            natural += int(right.sum())
            if right.any():
                spec = margin_spec(y[right], engine.classes, x.dtype)
                bounds = engine.bounds(region(x[right], eps, norm), spec, relaxation)
                certified += int((bounds.lower > 0).all(1).sum())
                for lower, upper in bounds.intermediate.values():
                    unstable += int(((lower < 0) & (upper > 0)).sum())
                    active += int((lower >= 0).sum())
                    neurons += lower.numel()
    of_neurons = 100.0 / max(neurons, 1)
    return HeldOut(100.0 * natural / number, 100.0 * certified / number, of_neurons * unstable, of_neurons * active)

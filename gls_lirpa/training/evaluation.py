"""Quick accuracies on held-out data while training; ``glscert certify`` is the thorough way."""

from __future__ import annotations

import torch
from torch import nn

from gls_lirpa.data import Split
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.boxes import linf_box
from gls_lirpa.relaxations import Relaxation


@torch.no_grad()
def held_out_accuracy(
    model: nn.Module,
    engine: BoundEngine,
    split: Split,
    *,
    eps: float,
    relaxation: Relaxation,
    samples: int,
    device: str,
) -> tuple[float, float]:
    """Natural and certified accuracy in per cent on the first ``samples`` of a split, in eval mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    number = min(samples, len(split))
    natural = certified = 0
    for start in range(0, number, 256):
        x, y = split.batch(range(start, min(start + 256, number)), device)
        right = model(x).argmax(1) == y
        natural += int(right.sum())
        if right.any():
            margins = engine.margins(linf_box(x[right], eps), y[right], relaxation)
            certified += int((margins > 0).all(1).sum())
    for module, mode in modes.items():
        module.training = mode
    return 100.0 * natural / number, 100.0 * certified / number

"""Random small networks whose margins are near zero."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.certification.stage import OpenSamples, Subject
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.models import Normalize, fold_batchnorm


class Residual(nn.Module):
    """A sum of two branches, twice."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.first, self.inner, self.last = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, classes)
        self.relu, self.relu_inner = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(self.flatten(x))
        value = value - self.inner(self.relu(value))
        result: Tensor = self.last(value + self.relu_inner(value))
        return result


def _dense(width: int, classes: int) -> nn.Module:
    half = width // 2
    return nn.Sequential(
        nn.Flatten(), nn.Linear(4, half), nn.ReLU(), nn.Linear(half, width - half), nn.ReLU(),
        nn.Linear(width - half, classes),
    )  # fmt: skip


def _conv(width: int, classes: int) -> nn.Module:
    # Two outputs per channel, the rest of the ReLUs behind them.
    channels = max(2, width // 5)
    hidden = width - 2 * channels
    return nn.Sequential(
        nn.Conv2d(1, channels, (2, 1)), nn.ReLU(), nn.Flatten(), nn.Linear(2 * channels, hidden), nn.ReLU(),
        nn.Linear(hidden, classes),
    )  # fmt: skip


def _batchnorm(width: int, classes: int) -> nn.Module:
    half = width // 2
    return nn.Sequential(
        nn.Flatten(), nn.Linear(4, half), nn.BatchNorm1d(half), nn.ReLU(), nn.Linear(half, width - half),
        nn.BatchNorm1d(width - half), nn.ReLU(), nn.Linear(width - half, classes),
    )  # fmt: skip


def _normalized(width: int, classes: int) -> nn.Module:
    return nn.Sequential(Normalize((0.4,), (0.3,)), *_conv(width, classes))


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "dense": _dense,
    "conv": _conv,
    "residual": lambda width, classes: Residual(4, width // 2, classes),
    "batchnorm": _batchnorm,
    "normalized": _normalized,
}


def random_net(kind: str, seed: int, *, width: int, classes: int = 3) -> nn.Module:
    """A network over 1×2×2 images with ``width`` ReLUs and weights large enough to make them unstable."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = KINDS[kind](width, classes)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, 0.0, 1.5 / module.weight[0].numel() ** 0.5, generator=generator)
            nn.init.normal_(module.bias, 0.0, 0.4, generator=generator)
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(0.0, 0.5, generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
            nn.init.normal_(module.weight, 1.0, 0.3, generator=generator)
    folded = fold_batchnorm(model).eval()
    for parameter in folded.parameters():
        parameter.requires_grad_(False)
    _bring_near(folded, random_input(seed))
    return folded


def random_input(seed: int) -> Tensor:
    return torch.rand(1, 1, 2, 2, generator=torch.Generator().manual_seed(seed))


def _bring_near(model: nn.Module, x: Tensor, margin: float = 0.3) -> None:
    """Shift the output so that the best class leads by ``margin`` at x: some radius then flips it."""
    first, second = model(x)[0].topk(2).indices.tolist()
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    logits = model(x)[0]
    last.bias[first] -= logits[first] - logits[second] - margin


def problem(
    model: nn.Module, x: Tensor, eps: float, *, engine: BoundEngine | None = None
) -> tuple[Subject, OpenSamples]:
    label = model(x).argmax(1)
    others = int(model(x).shape[1]) - 1
    open_rows = torch.zeros(1, others, dtype=torch.bool)
    samples = OpenSamples(torch.arange(1), x, label, linf_box(x, eps), torch.full((1, others), -torch.inf), open_rows)
    return Subject(model, BoundEngine(model, x) if engine is None else engine), samples


def margins(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    logits = model(x)
    return (margin_spec(label, logits.shape[1], logits.dtype)[0] @ logits.t()).t()

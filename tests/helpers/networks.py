"""Small reference networks shared by the tests, one or two for every layer the engine knows.

``NETWORKS`` maps a name to (factory, input shape). Weights follow from the name alone.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gls_lirpa.models import Normalize

IMAGE = (2, 6, 6)
CLASSES = 3


class Standardized(nn.Module):
    """A user's own normalisation: (x − mean) / std with buffers, then a network."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.6]).view(1, 2, 1, 1))
        self.register_buffer("std", torch.tensor([0.5, 0.25]).view(1, 2, 1, 1))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x - self.mean) / self.std)


class Residual(nn.Module):
    """ReLU(body(x) ± x)."""

    def __init__(self, body: nn.Module, sign: int) -> None:
        super().__init__()
        self.body, self.sign = body, sign

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return torch.relu(y + x) if self.sign > 0 else torch.relu(y - x)


class Viewed(nn.Module):
    """view(x.size(0), −1) instead of Flatten."""

    def __init__(self, head: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.head, self.body = head, body

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        return self.body(x.view(x.size(0), -1))


class Scaled(nn.Module):
    """Constants of every kind around the input: 1 − 2x/3 + 0.5, negated."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(-(1.0 - 2.0 * x / 3.0 + 0.5))


class SumOut(nn.Module):
    """Two branches whose logits are subtracted: the last node is no linear layer."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.first(x) - self.second(x)


def conv(*, stride: int = 1, bias: bool = True, groups: int = 1, channels: int = 2) -> nn.Conv2d:
    return nn.Conv2d(channels, 4, 3, stride=stride, padding=1, bias=bias, groups=groups)


def head(features: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(features, 5), nn.ReLU(), nn.Linear(5, CLASSES)]


def mlp(sizes: tuple[int, ...] = (4, 6, 5, CLASSES), *, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _batchnorm() -> nn.Module:
    return nn.Sequential(
        conv(stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5), nn.ReLU(),
        nn.Linear(5, CLASSES),
    )  # fmt: skip


def _residual_bn() -> nn.Module:
    body = nn.Sequential(conv(channels=4), nn.BatchNorm2d(4), nn.ReLU(), conv(channels=4))
    return nn.Sequential(conv(stride=2), nn.ReLU(), Residual(body, 1), *head(36))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: mlp((4, CLASSES)), (4,)),
    "mlp": (mlp, (4,)),
    "mlp-no-bias": (lambda: mlp(bias=False), (4,)),
    "conv": (lambda: nn.Sequential(conv(stride=2), nn.ReLU(), conv(channels=4), nn.ReLU(), *head(36)), IMAGE),
    "conv-grouped": (
        lambda: nn.Sequential(conv(bias=False), nn.ReLU(), conv(channels=4, groups=2, stride=2), nn.ReLU(), *head(36)),
        IMAGE,
    ),
    "conv-then-conv": (lambda: nn.Sequential(conv(), conv(channels=4, stride=2), nn.ReLU(), *head(36)), IMAGE),
    "batchnorm": (_batchnorm, IMAGE),
    "avgpool": (
        lambda: nn.Sequential(conv(), nn.ReLU(), nn.AvgPool2d(2), conv(channels=4), nn.ReLU(), *head(36)),
        IMAGE,
    ),
    "avgpool-padded": (lambda: nn.Sequential(conv(), nn.ReLU(), nn.AvgPool2d(3, 2, 1), nn.ReLU(), *head(36)), IMAGE),
    "global-pool": (
        lambda: nn.Sequential(conv(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)),
        IMAGE,
    ),
    "view": (lambda: Viewed(nn.Sequential(conv(stride=2), nn.ReLU()), mlp((36, 5, CLASSES))), IMAGE),
    "normalize": (
        lambda: nn.Sequential(Normalize((0.4, 0.6), (0.5, 0.25)), conv(stride=2), nn.ReLU(), *head(36)),
        IMAGE,
    ),
    "standardized": (lambda: Standardized(nn.Sequential(conv(stride=2), nn.ReLU(), *head(36))), IMAGE),
    "residual": (
        lambda: nn.Sequential(
            conv(stride=2),
            nn.ReLU(),
            Residual(nn.Sequential(conv(channels=4), nn.ReLU(), conv(channels=4)), 1),
            *head(36),
        ),
        IMAGE,
    ),
    "residual-bn": (_residual_bn, IMAGE),
    "subtracted": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), Residual(nn.Linear(5, 5), -1), mlp((5, 3))), (4,)),
    "scaled": (lambda: Scaled(mlp()), (4,)),
    "sum-out": (lambda: SumOut(mlp((4, 5, CLASSES)), mlp((4, CLASSES))), (4,)),
}


@torch.no_grad()
def build(name: str) -> nn.Module:
    """The network in eval mode, with moved BatchNorm statistics and a spread of biases."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    model = NETWORKS[name][0]()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.3, 2.0, generator=generator)
            module.weight.normal_(0, 1, generator=generator)
            module.bias.normal_(0, 0.5, generator=generator)
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            module.weight.normal_(0, 1.4 / module.weight[0].numel() ** 0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0, 0.3, generator=generator)
    return model.eval()


def batch(name: str, size: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs in [0, 1], some exactly at the ends, and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(size, *NETWORKS[name][1], generator=generator)
    x = (x * 1.3 - 0.15).clamp(0, 1)
    return x, torch.randint(CLASSES, (size,), generator=generator)

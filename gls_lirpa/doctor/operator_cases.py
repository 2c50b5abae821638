"""Small networks with random attributes, one kind for every operation that is said to be bounded rightly.

``glscert doctor --deep``, the tests and the soundness benchmark all draw from this table: an operation
that is added to the engine gets a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.relaxations import RELAXATIONS, Relaxation

CLASSES = 3

Shape = tuple[int, ...]
Layer = Callable[[Random, Shape], nn.Module]
Claim = Callable[[Relaxation], bool]
"""Of which relaxations something is said."""


def every(relaxation: Relaxation) -> bool:
    del relaxation
    return True


def curved(relaxation: Relaxation) -> bool:
    return relaxation.curved


def none(relaxation: Relaxation) -> bool:
    del relaxation
    return False


@dataclass(frozen=True)
class OperatorCase:
    """A layer with random attributes for images or rows; ``accepted``: by which relaxations it must be.

    Those that are ``partial`` to it may refuse some attributes, and the rest must refuse all of them.
    """

    layer: Layer
    image: bool = True
    accepted: Claim = every
    partial: Claim = none

    @property
    def bounded(self) -> list[str]:
        """The relaxations that must accept it."""
        return [name for name in RELAXATIONS if self.accepted(RELAXATIONS.get(name))]

    @property
    def optional(self) -> list[str]:
        """Those that may refuse some attributes."""
        return [name for name in RELAXATIONS if self.partial(RELAXATIONS.get(name))]


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x)
        return y


class Residual(nn.Module):
    """body(x) + x, or body(x) − x."""

    def __init__(self, body: nn.Module, sign: int) -> None:
        super().__init__()
        self.body, self.sign = body, sign

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y + x if self.sign > 0 else y - x


def _pick(r: Random, *values: Any) -> Any:
    return r.choice(values)


def _conv(r: Random, s: Shape) -> nn.Module:
    size, stride, padding = _pick(r, 1, 2, 3, (3, 2)), _pick(r, 1, 2, (1, 2)), _pick(r, 0, 1, (1, 0))
    return nn.Conv2d(s[0], 2 * s[0], size, stride, padding, _pick(r, 1, 1, 2), _pick(r, 1, s[0]), _pick(r, True, False))


def _padded_conv(r: Random, s: Shape) -> nn.Module:
    mode = _pick(r, "zeros", "circular", "reflect", "replicate")
    padding = _pick(r, "same", "valid", 1, 2)
    return nn.Conv2d(s[0], 3, r.choice([2, 3]), 1, padding, padding_mode=mode)


def _transposed(r: Random, s: Shape) -> nn.Module:
    stride = r.choice([1, 2])
    padding = r.choice([0, 1])
    return nn.ConvTranspose2d(s[0], 3, r.choice([2, 3]), stride, padding, min(padding, stride - 1) * r.choice([0, 1]))


def _avgpool(r: Random, s: Shape) -> nn.Module:
    size, stride, padding = _pick(r, 2, 3, (2, 3)), _pick(r, None, 1, 2, (2, 1)), _pick(r, 0, 1)
    return nn.AvgPool2d(size, stride, padding, _pick(r, True, False), _pick(r, True, False), _pick(r, None, None, 3))


def _maxpool(r: Random, s: Shape) -> nn.Module:
    stride, padding, dilation = r.choice([None, None, 1]), r.choice([0, 0, 1]), r.choice([1, 1, 1, 2])
    return nn.MaxPool2d(r.choice([2, 3]), stride, padding, dilation, ceil_mode=r.random() < 0.2)


def _padding(r: Random, s: Shape) -> nn.Module:
    ends: Any = tuple(r.choice([0, 1, 2]) for _ in range(4))
    kinds: list[nn.Module] = [
        nn.ZeroPad2d(ends), nn.ConstantPad2d(ends, -0.7), nn.ReflectionPad2d(ends), nn.ReplicationPad2d(ends),
        nn.CircularPad2d(ends), nn.ZeroPad2d((-1, 2, 0, -1)),
    ]  # fmt: skip
    return r.choice(kinds)


_MOVES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.permute(0, 2, 3, 1),
    lambda x: x.transpose(1, 3),
    lambda x: x[:, 1:],
    lambda x: x[:, 0],
    lambda x: x[:, :, 1:, ::2],
    lambda x: x[..., 1:3],
    lambda x: x.flip(3),
    lambda x: x.roll(1, 2),
    lambda x: x.chunk(2, 1)[1],
    lambda x: x.view(x.size(0), -1, x.shape[3]),
)
_JOINS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.cat([x, torch.relu(x - 0.4)], 1),
    lambda x: torch.cat([x, x.flip(2)], 2),
    lambda x: torch.stack([x, -x], 1),
    lambda x: torch.cat([x.mean((2, 3)), x[:, :, 0, 0]], 1),
    lambda x: (x[:, :1] + torch.relu(x[:, :, :1] - 0.4)).flatten(1),
)
_SUMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.mean((2, 3)),
    lambda x: x.mean(1),
    lambda x: x.sum((1, 2)),
    lambda x: x.mean((2, 3), keepdim=True),
    lambda x: x.flatten(1).sum(1, keepdim=True),
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
)
_KINKS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.clamp(-0.2, 0.5),
    lambda x: torch.clamp(x, min=0.1),
    lambda x: x.clip(max=0.3),
    torch.abs,
    lambda x: torch.maximum(x, -2.0 * x),
    lambda x: torch.minimum(x, 0.3 - x),
    F.hardsigmoid,
    lambda x: F.hardtanh(x, -0.1, 0.6),
)
_CONSTANTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: -(1.0 - 2.0 * x / 3.0),
    lambda x: x * torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype) + 0.5,
    lambda x: (x - 0.3) / torch.tensor([0.5, 2.0], dtype=x.dtype).view(1, 2, 1, 1),
)


def _picked(functions: tuple[Callable[[Tensor], Tensor], ...]) -> Layer:
    return lambda r, s: Function(r.choice(functions))


def _scaled(kind: Callable[[], nn.Module]) -> Layer:
    """A curved activation of small and of large inputs."""

    def layer(r: Random, s: Shape) -> nn.Module:
        factor, shift = r.choice([1.0, 5.0, 50.0]), r.choice([0.0, 0.5])
        return nn.Sequential(Function(lambda x: (x - shift) * factor), kind())

    return layer


def _residual(r: Random, s: Shape) -> nn.Module:
    body = nn.Sequential(nn.Conv2d(s[0], s[0], 3, 1, 1), nn.BatchNorm2d(s[0]), nn.ReLU(), nn.Conv2d(s[0], s[0], 1))
    return Residual(body, r.choice([1, -1]))


CASES: Mapping[str, OperatorCase] = {
    "Linear": OperatorCase(lambda r, s: nn.Linear(s[0], 5, bias=r.random() < 0.5), image=False),
    "Conv2d": OperatorCase(_conv),
    "Conv2d, padded": OperatorCase(_padded_conv),
    "ConvTranspose2d": OperatorCase(_transposed),
    "BatchNorm1d": OperatorCase(lambda r, s: nn.BatchNorm1d(s[0]), image=False),
    "BatchNorm2d": OperatorCase(lambda r, s: nn.BatchNorm2d(s[0])),
    "AvgPool2d": OperatorCase(_avgpool),
    "AdaptiveAvgPool2d": OperatorCase(lambda r, s: nn.AdaptiveAvgPool2d(_pick(r, 1, 2, 3, 4, (None, 2)))),
    "MaxPool2d": OperatorCase(_maxpool, accepted=none, partial=curved),
    "padding": OperatorCase(_padding),
    "slice, permute": OperatorCase(_picked(_MOVES)),
    "cat, stack, broadcast sums": OperatorCase(_picked(_JOINS)),
    "mean, sum, interpolate": OperatorCase(_picked(_SUMS)),
    "residual": OperatorCase(_residual),
    "constants": OperatorCase(_picked(_CONSTANTS)),
    "ReLU": OperatorCase(lambda r, s: nn.ReLU()),
    "LeakyReLU": OperatorCase(lambda r, s: nn.LeakyReLU(r.choice([-1.5, -0.1, 0.0, 0.1, 1.0, 2.5]))),
    "ReLU6": OperatorCase(lambda r, s: nn.Sequential(nn.Conv2d(s[0], 2, 1), Function(lambda x: 9 * x), nn.ReLU6())),
    "clamp, abs, max": OperatorCase(_picked(_KINKS)),
    "Dropout": OperatorCase(lambda r, s: nn.Dropout(0.5)),
    "Sigmoid": OperatorCase(_scaled(nn.Sigmoid), accepted=curved),
    "Tanh": OperatorCase(_scaled(nn.Tanh), accepted=curved),
    "GELU, SiLU, ELU": OperatorCase(
        lambda r, s: r.choice([nn.GELU(), nn.SiLU(), nn.ELU(), nn.Softplus()]), accepted=none
    ),
}


@torch.no_grad()
def random_network(layer: Layer, seed: int, *, image: bool = True) -> tuple[nn.Module, Shape]:
    """A network in eval mode around the layer, sometimes behind a convolution and a ReLU, and its input shape.

    >>> model, shape = random_network(CASES["AvgPool2d"].layer, 0)
    >>> model(torch.rand(2, *shape)).shape
    torch.Size([2, 3])
    """
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    side = random.choice([5, 6])
    shape: Shape = (2, side, side) if image else (4,)
    ahead: list[nn.Module] = []
    if random.random() < 0.5:
        ahead = [nn.Conv2d(2, 2, 3, 1, 1) if image else nn.Linear(4, 4), nn.ReLU()]
    body = nn.Sequential(*ahead, layer(random, shape), nn.Flatten()).eval()
    features = body(torch.zeros(2, *shape)).shape[1]
    model = nn.Sequential(*body, nn.Linear(features, 4), nn.ReLU(), nn.Linear(4, CLASSES))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_mean, module.bias, module.weight):
                if tensor is not None:
                    tensor.normal_(0, 0.7, generator=generator)
            if module.running_var is not None:
                module.running_var.uniform_(0.3, 2.0, generator=generator)
        elif isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            module.weight.normal_(0, 1.5 / module.weight[0].numel() ** 0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0, 0.3, generator=generator)
    return model.eval(), shape

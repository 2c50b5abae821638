"""The paper's networks, for any image size and number of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from gls_lirpa.base.checks import require
from gls_lirpa.base.normalize import Normalize
from gls_lirpa.base.registry import Registry
from gls_lirpa.errors import ConfigError
from gls_lirpa.models.initialization import initialize
from gls_lirpa.models.structure import split_blocks


class Conv(NamedTuple):
    """A convolution, written as in the paper's table: channels kernel/stride/padding."""

    channels: int
    kernel: int
    stride: int
    padding: int


@dataclass(frozen=True)
class Architecture:
    """Convolutions, then fully connected layers, each followed by [BatchNorm +] ReLU; output layer last.

    ``convs``: the convolutions; ``hidden``: widths of the fully connected layers; ``batchnorm``: whether there is any.
    ``halved_from``: for images at least that high the last convolution has stride 2, so that the first fully
    connected layer has the same size as for half the image.
    """

    convs: tuple[Conv, ...]
    hidden: tuple[int, ...] = ()
    batchnorm: bool = False
    halved_from: int | None = None

    def convs_for(self, height: int) -> tuple[Conv, ...]:
        """The convolutions for images of this ``height``."""
        if self.halved_from is None or height < self.halved_from:
            return self.convs
        return (*self.convs[:-1], self.convs[-1]._replace(stride=2))


MODELS: Registry[Architecture] = Registry("network")

_CNN7 = (Conv(64, 3, 1, 1), Conv(64, 3, 1, 1), Conv(128, 3, 2, 1), Conv(128, 3, 1, 1), Conv(128, 3, 1, 1))

MODELS.register("cnn3-tiny", Architecture((Conv(2, 5, 2, 2), Conv(2, 4, 2, 1))))
MODELS.register("cnn3", Architecture((Conv(8, 5, 2, 2), Conv(8, 4, 2, 1))))
MODELS.register("cnn5", Architecture((Conv(16, 5, 2, 2), Conv(16, 4, 2, 1), Conv(32, 4, 2, 1)), (512,)))
MODELS.register("cnn5-l", Architecture((Conv(64, 5, 2, 2), Conv(64, 4, 2, 1), Conv(128, 4, 2, 1)), (512,)))
# The paper's 17.3 M parameters on TinyImageNet, as in the literature; without the second stride it would be 67.6 M.
MODELS.register("cnn7", Architecture(_CNN7, (512,), halved_from=64))
MODELS.register("cnn7-bn", Architecture(_CNN7, (512,), batchnorm=True, halved_from=64))


class ConvNet(nn.Sequential):
    """A flat Sequential that knows its blocks.

    >>> [type(block[-1]).__name__ for block in build_model("cnn3").blocks()]
    ['ReLU', 'ReLU', 'Linear']
    """

    def blocks(self) -> list[nn.Sequential]:
        """The network cut after every ReLU; see :func:`gls_lirpa.models.structure.split_blocks`."""
        return split_blocks(self)


def build_model(
    name: str,
    *,
    in_shape: Sequence[int] = (1, 28, 28),
    classes: int = 10,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    init: str = "ibp",
    seed: int = 0,
) -> ConvNet:
    """The network ``name`` of the table for images of ``in_shape`` = (channels, height, width) and so many ``classes``.

    With ``mean`` and ``std`` the first layer is :class:`Normalize`. Weights follow from ``init`` and
    ``seed`` alone; the global random state is neither read nor changed.

    >>> sum(p.numel() for p in build_model("cnn5").parameters())
    165850
    """
    name = MODELS.canonical(name)
    architecture = MODELS.get(name)
    if len(in_shape) != 3 or min(in_shape) < 1:
        raise ConfigError(f"expected in_shape = (channels, height, width), got {tuple(in_shape)}")
    require(classes >= 2, "classes >= 2", classes)
    layers = _normalization(mean, std, channels=in_shape[0])
    channels, height, width = in_shape
    for number, conv in enumerate(architecture.convs_for(in_shape[1]), start=1):
        height, width = ((n + 2 * conv.padding - conv.kernel) // conv.stride + 1 for n in (height, width))
        if min(height, width) < 1:
            raise ConfigError(
                f"{name} cannot take images of {in_shape[1]}x{in_shape[2]}: nothing is left after convolution {number}"
            )
        layers.append(_unfilled(nn.Conv2d(channels, *conv, device="meta")))
        layers += [nn.BatchNorm2d(conv.channels)] if architecture.batchnorm else []
        layers.append(nn.ReLU())
        channels = conv.channels
    layers.append(nn.Flatten())
    features = channels * height * width
    for hidden in architecture.hidden:
        layers.append(_unfilled(nn.Linear(features, hidden, device="meta")))
        layers += [nn.BatchNorm1d(hidden)] if architecture.batchnorm else []
        layers.append(nn.ReLU())
        features = hidden
    layers.append(_unfilled(nn.Linear(features, classes, device="meta")))
    model = ConvNet(*layers)
    initialize(model, init, seed=seed)
    return model


def _unfilled(layer: nn.Module) -> nn.Module:
    """Memory for a layer made without weights: filling them would draw from the global random state."""
    return layer.to_empty(device="cpu")


def _normalization(mean: Sequence[float] | None, std: Sequence[float] | None, *, channels: int) -> list[nn.Module]:
    if mean is None and std is None:
        return []
    if mean is None or std is None:
        raise ConfigError("expected mean and std together, got only one of them")
    if len(mean) != channels:
        raise ConfigError(f"expected one mean per channel ({channels}), got {len(mean)}")
    return [Normalize(mean, std)]

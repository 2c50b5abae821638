"""Layers that networks from elsewhere are rebuilt with; all of them take any batch size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Reshape(nn.Module):
    """Every sample in another shape.

    >>> import torch
    >>> Reshape((2, 3))(torch.zeros(4, 6)).shape
    torch.Size([4, 2, 3])
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.shape)


class Sum(nn.Module):
    """a + b, or a − b.

    >>> import torch
    >>> Sum(-1)(torch.tensor([3.0]), torch.tensor([1.0])).item()
    2.0
    """

    def __init__(self, sign: int = 1) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b if self.sign > 0 else a - b


class LayerGraph(nn.Module):
    """Layers of which each takes the outputs of earlier ones: value 0 is the input, value i + 1 the
    output of layer i, and the last value is the network's.

    >>> import torch
    >>> graph = LayerGraph([(nn.ReLU(), (0,)), (Sum(), (0, 1))])
    >>> graph(torch.tensor([[-1.0, 2.0]])).tolist()
    [[-1.0, 4.0]]
    """

    def __init__(self, steps: Sequence[tuple[nn.Module, tuple[int, ...]]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for layer, _ in steps)
        self.inputs = tuple(inputs for _, inputs in steps)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, inputs in zip(self.layers, self.inputs, strict=True):
            values.append(layer(*(values[i] for i in inputs)))
        return values[-1]


def assembled(steps: Sequence[tuple[nn.Module, tuple[int, ...]]]) -> nn.Module:
    """A Sequential where the layers follow one another, which the engine and BatchNorm folding read best.

    >>> type(assembled([(nn.ReLU(), (0,)), (nn.Flatten(), (1,))])).__name__
    'Sequential'
    """
    if all(inputs == (i,) for i, (_, inputs) in enumerate(steps)):
        return nn.Sequential(*(layer for layer, _ in steps))
    return LayerGraph(steps)


def concatenated(network: nn.Module, *layers: nn.Module) -> nn.Sequential:
    """``network`` followed by ``layers``; a plain Sequential is opened, its layers are shared.

    >>> len(concatenated(nn.Sequential(nn.Flatten(), nn.ReLU()), nn.Identity()))
    3
    """
    if isinstance(network, nn.Sequential) and type(network).forward is nn.Sequential.forward:
        return nn.Sequential(*network, *layers)
    return nn.Sequential(network, *layers)

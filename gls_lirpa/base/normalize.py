"""Normalisation as a layer of the network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gls_lirpa.base.checks import require
from gls_lirpa.errors import ConfigError


class Normalize(nn.Module):
    """(x − mean) / std per channel, inside the network so that the ε-ball lives in pixel space.

    Computed as a 1×1 convolution with a diagonal kernel, an operation that every bound method knows. Kernel and
    offset are buffers, never trained.

    >>> Normalize((0.5,), (0.25,))(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ConfigError(f"expected as many std as mean values, got {len(mean)} means and {len(std)} stds")
        require(all(s > 0 for s in std), "std > 0", tuple(std))
        scale = 1 / torch.tensor(tuple(std), dtype=torch.float64)
        offset = -torch.tensor(tuple(mean), dtype=torch.float64) * scale
        dtype = torch.get_default_dtype()
        self.register_buffer("weight", torch.diag(scale)[:, :, None, None].to(dtype))
        self.register_buffer("bias", offset.to(dtype))

    @property
    def stretch(self) -> float:
        """By how much it may lengthen a difference of two inputs in ℓ2: the kernel's spectral norm."""
        return float(torch.linalg.matrix_norm(self.weight[:, :, 0, 0].double(), 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight, self.bias)

"""What the engine asks of a relaxation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.engine.batchnorm import Statistics

if TYPE_CHECKING:
    from gls_lirpa.engine.bounds import BoundEngine

BoundFunction = Callable[["BoundEngine", Box, Tensor, Statistics], Bounds]


@dataclass(frozen=True)
class Relaxation:
    """How bounds are computed. ``light``: memory per sample is that of a forward pass."""

    name: str
    bound: BoundFunction
    differentiable: bool = True
    light: bool = False

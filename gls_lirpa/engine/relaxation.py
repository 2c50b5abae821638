"""What the engine asks of a relaxation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.engine.batchnorm import Statistics
from gls_lirpa.engine.row_network import RowNetwork, Tensors

if TYPE_CHECKING:
    from gls_lirpa.engine.bounds import BoundEngine

BoundFunction = Callable[["BoundEngine", Box, Tensor, Statistics], Bounds]

MembersFunction = Callable[[RowNetwork, Tensors, Box, Tensor], Bounds]
"""Bounds of several networks of the same layers over the same boxes, all samples of the first one first."""


@runtime_checkable
class Rowwise(Protocol):
    """A ``BoundFunction`` that is computed by rows wherever the network allows it, by ``rows``."""

    @property
    def rows(self) -> MembersFunction: ...


@dataclass(frozen=True)
class Relaxation:
    """How bounds are computed. ``light``: memory per sample is that of a forward pass."""

    name: str
    bound: BoundFunction
    differentiable: bool = True
    light: bool = False

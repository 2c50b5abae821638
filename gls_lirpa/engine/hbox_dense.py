"""The coefficients of HBox's error terms: what every form of them can do, and the full form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.engine.graph import AffineMap, Node


class Coefficients(Protocol):
    """The linear part A of z = c + Σᵢ Aᵢ eᵢ + b, for every sample or shared by all of them."""

    def total_radius(self, input_radius: Tensor) -> Tensor:
        """Σᵢ |Aᵢ| rᵢ for every sample: (B, *s)."""

    def scaled(self, factor: Tensor) -> Coefficients:
        """Times a factor (B, *s) per neuron."""

    def through(self, node: Node, apply: AffineMap) -> Coefficients:
        """Behind an affine node, which is ``apply``."""

    def plus(self, other: Coefficients, sign: int) -> Coefficients:
        """The sum with, or the difference to, those of another value of the same shape."""

    def contracted(self, matrix: Tensor) -> Dense:
        """Behind a matrix (1 or B, rows, neurons)."""

    def to_dense(self) -> Dense:
        """The same in full."""


@dataclass(frozen=True)
class Dense:
    """Every neuron's coefficient of every input: (1 or B, inputs, *s)."""

    values: Tensor

    @classmethod
    def identity(cls, x: Tensor) -> Dense:
        inputs = x[0].numel()
        return cls(torch.eye(inputs, dtype=x.dtype, device=x.device).reshape(1, inputs, *x.shape[1:]))

    def total_radius(self, input_radius: Tensor) -> Tensor:
        flat, radius = self.values.flatten(2).abs(), input_radius.flatten(1)
        total = radius @ flat[0] if len(flat) == 1 else torch.bmm(radius.unsqueeze(1), flat)
        return total.reshape(-1, *self.values.shape[2:])

    def scaled(self, factor: Tensor) -> Dense:
        return Dense(self.values * factor.unsqueeze(1))

    def through(self, node: Node, apply: AffineMap) -> Dense:
        mapped = apply(self.values.flatten(0, 1), False, False)
        return Dense(mapped.reshape(*self.values.shape[:2], *mapped.shape[1:]))

    def plus(self, other: Coefficients, sign: int) -> Dense:
        return Dense(self.values + sign * other.to_dense().values)

    def contracted(self, matrix: Tensor) -> Dense:
        if len(matrix) == 1:
            return Dense(F.linear(self.values, matrix[0]))
        return Dense(self.values @ matrix.transpose(1, 2))

    def to_dense(self) -> Dense:
        return self

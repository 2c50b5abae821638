"""Domains: the parts of the box that branch and bound distinguishes, each by the signs of some unstable neurons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gls_lirpa.solver.form import Problem


@dataclass(frozen=True)
class Domains:
    """A batch of b domains.

    ``rows`` (b,): the specification row that is bounded; ``slopes`` (b,): the number of its multi-neuron slopes among
    those it is bounded with (``envelopes``); ``signs`` (b, neurons) in {−1, 0: not split, +1}; ``alpha``, ``beta``,
    ``gamma`` (b, neurons): what its bound begins with (``bounds``); ``bound``: the best lower bound proven.
    """

    rows: Tensor
    slopes: Tensor
    signs: Tensor
    alpha: Tensor
    beta: Tensor
    gamma: Tensor
    bound: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice) -> Domains:
        return Domains(*(getattr(self, field.name)[index] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Domains]) -> Domains:
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    @classmethod
    def roots(cls, problem: Problem, rows: Tensor, dtype: torch.dtype = torch.float32) -> Domains:
        """The whole box, once per entry of ``rows``, with CROWN's slopes: α = 1 where u > −l, else 0; γ = 1."""
        alpha = (problem.upper > -problem.lower).to(dtype).expand(len(rows), -1).clone()
        bound = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=rows.device)
        signs, beta, gamma = torch.zeros_like(alpha, dtype=torch.int8), torch.zeros_like(alpha), torch.ones_like(alpha)
        return cls(rows, rows, signs, alpha, beta, gamma, bound)

    @property
    def unsplit(self) -> Tensor:
        return self.signs == 0

    def children(self, neurons: Tensor) -> Domains:
        """Both signs of each domain's neuron (b,): first all with −1, then all with +1.

        Its β starts at 0: where λ < 0 a child's linear function is then nowhere below its parent's.
        """
        at = neurons.unsqueeze(1)
        return Domains.joined([replace(self, signs=self.signs.scatter(1, at, sign)) for sign in (-1, 1)])


@dataclass(frozen=True)
class Pass:
    """One evaluation of a batch: bounds (b,), the minimising position t, and z, v and v's coefficient λ of every
    neuron there (b, neurons); ``saving``: how far the facet lies below the triangle there (negative where above)."""

    value: Tensor
    t: Tensor
    z: Tensor
    v: Tensor
    coefficient: Tensor
    saving: Tensor

    def __getitem__(self, index: Tensor) -> Pass:
        return Pass(*(getattr(self, field.name)[index] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Pass]) -> Pass:
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

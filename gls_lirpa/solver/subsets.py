"""Sums of a group's neurons (``groups``) over all subsets of them, and the highest.

A subset of k neurons is a subset of the first half and one of the second, so 2 · 2^(k/2) sums stand for all 2ᵏ. Of the
norm ‖Σ_{j ∈ S} ω_j a_j − c‖₁ only the inputs that both halves read have to be gone through for every pair; each half
answers for the inputs it reads alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_CHUNK = 2**20
"""Subsets that are gone through at a time: 4 MiB of values in float32, about what a processor's cache holds."""


@dataclass(frozen=True)
class Bucket:
    """Groups of k members: the row and group they are (n,), ``members`` (n, k), their a and slopes (n, k, width)
    and their b (n, k).

    ``columns`` (n, width): which of the group's inputs; those that both halves of the members read are among the first
    ``crossing``. ``below`` (n, width): those that the first half reads.
    """

    rows: Tensor
    groups: Tensor
    members: Tensor
    columns: Tensor
    crossing: int
    below: Tensor
    weight: Tensor
    offset: Tensor
    slopes: Tensor

    def to(self, dtype: torch.dtype) -> Bucket:
        weight, offset, slopes = (part.to(dtype) for part in (self.weight, self.offset, self.slopes))
        return replace(self, weight=weight, offset=offset, slopes=slopes)

    @property
    def at(self) -> tuple[Tensor, Tensor, Tensor]:
        """The entries of a tensor (rows, groups, inputs) that are the bucket's."""
        return self.rows.unsqueeze(1), self.groups.unsqueeze(1), self.columns

    @property
    def values(self) -> int:
        """How many values the sums over all subsets are, on the inputs that both halves read."""
        return len(self.rows) * (1 << self.members.shape[1]) * self.crossing

    def sums(self, omega: Tensor) -> Sums:
        """Σ ω a and Σ ω b over every subset, for weights ω (n, k)."""
        half = self.members.shape[1] // 2
        weight, offset = omega.unsqueeze(2) * self.weight, omega * self.offset
        low, high = (subsets(k).to(omega) for k in (half, self.members.shape[1] - half))
        return Sums(
            low @ weight[:, :half],
            offset[:, :half] @ low.t(),
            high @ weight[:, half:],
            offset[:, half:] @ high.t(),
            self.crossing,
            self.below,
        )

    def level(self, omega: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """d and c for the weights ω (n, k), and what v_j is apart from g_j·t: [j ∈ S] z_j(t*) − g_j·t*, with S and
        t* those at which d is attained. That is ∂/∂ω_j of d."""
        slope = (omega.unsqueeze(2) * self.slopes).sum(1)
        best, subset = self.sums(omega).highest(slope, 1)
        inside = subset >> torch.arange(omega.shape[1], device=omega.device) & 1
        at = ((inside * omega).unsqueeze(1) @ self.weight - slope.unsqueeze(1)).sign().transpose(1, 2)
        v = inside * ((self.weight @ at).squeeze(2) + self.offset) - (self.slopes @ at).squeeze(2)
        return best.squeeze(1), slope, v


@dataclass(frozen=True)
class Sums:
    """Sums over the subsets of each of n groups, as those of two halves (n, 2^half, width) and (n, 2^half): subset
    i + j · 2^(first half) has the sum of ``low`` i and ``high`` j. ``crossing`` and ``below`` as in ``Bucket``."""

    low: Tensor
    low_offset: Tensor
    high: Tensor
    high_offset: Tensor
    crossing: int
    below: Tensor

    def highest(self, slope: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` highest ‖Σ ω a − c‖₁ + Σ ω b of every group, highest first, and their subsets: (n, count).

        On inputs that one half alone reads the norm is that half's; only the others take all pairs.
        """
        both, alone = slice(self.crossing), slice(self.crossing, None)
        rest = slope[:, alone]
        low = (self.low[:, :, alone] - rest.unsqueeze(1)).abs() @ self.below[:, alone].to(rest).unsqueeze(2)
        high = (self.high[:, :, alone] - rest.unsqueeze(1)).abs() @ (~self.below[:, alone]).to(rest).unsqueeze(2)
        low, high = low.squeeze(2) + self.low_offset, high.squeeze(2) + self.high_offset
        low_least, high_least = low.amin(1, keepdim=True), high.amin(1, keepdim=True)
        # What a half answers for is a coordinate more: |x + y| = x + y for x, y ≥ 0.
        ones = torch.cat([self.low[:, :, both], (low - low_least).unsqueeze(2)], 2).neg_()
        others = torch.cat([self.high[:, :, both] - slope[:, both].unsqueeze(1), (high - high_least).unsqueeze(2)], 2)
        pairs = low.shape[1] * high.shape[1]
        found = []
        for one, other in zip(*(part.split(max(1, _CHUNK // pairs)) for part in (ones, others)), strict=True):
            found.append(torch.cdist(other, one, p=1).flatten(1).topk(min(count, pairs), dim=1))
        best, subset = (torch.cat(parts) for parts in zip(*found, strict=True))
        return best + low_least + high_least, subset

    def of(self, subset: Tensor) -> tuple[Tensor, Tensor]:
        """The sums Σ ω a and Σ ω b over these subsets: (n, count, width) and (n, count)."""
        group = torch.arange(len(subset), device=subset.device).unsqueeze(1)
        low, high = subset % self.low.shape[1], subset // self.low.shape[1]
        return (
            self.low[group, low] + self.high[group, high],
            self.low_offset[group, low] + self.high_offset[group, high],
        )


def subsets(k: int) -> Tensor:
    """The 2ᵏ subsets of k members as rows of zeros and ones."""
    return torch.arange(2**k).unsqueeze(1) >> torch.arange(k) & 1

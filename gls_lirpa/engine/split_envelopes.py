"""Groups of the first layer (``split_groups``) in the backward pass of ``split_bounds``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.engine.split_groups import Groups
from gls_lirpa.engine.split_subsets import Bucket

_SAME = 1e-6
"""Weights that differ by less than this share of the largest are taken for equal where only order matters."""


@dataclass(frozen=True)
class GroupTerms:
    """What the groups add to a pass: the weights ω (b, neurons), 0 for those that are in no bucket, d (b, groups) and
    c (b, groups, width), and per bucket what ``Bucket.level`` says of v."""

    buckets: list[Bucket]
    omega: Tensor
    level: Tensor
    slope: Tensor
    local: list[Tensor]


@dataclass(frozen=True)
class Slopes:
    """Weights ω (families, neurons) and slopes c (families, groups, width) that were made for them."""

    omega: Tensor
    slope: Tensor

    def __getitem__(self, index: Tensor | slice) -> Slopes:
        return Slopes(self.omega[index], self.slope[index])

    def of_neurons(self, groups: Groups) -> Tensor:
        """Slopes g (families, neurons, width) that differ as little from the triangles' as makes Σ ω g = c."""
        change, size = self.slope.clone(), self.slope.new_zeros(self.slope.shape[:2])
        change.index_add_(1, groups.group, -self.omega.unsqueeze(2) * groups.triangle.to(change))
        size.index_add_(1, groups.group, self.omega * self.omega)
        share = self.omega / size[:, groups.group].clamp(min=torch.finfo(size.dtype).tiny)
        return torch.addcmul(groups.triangle.to(change), share.unsqueeze(2), change[:, groups.group])


@dataclass(frozen=True)
class Envelopes:
    """Groups of the first layer, and slopes of their neurons (families, neurons, width); the first family's number."""

    groups: Groups
    slopes: Tensor
    first: int = 0

    def to(self, dtype: torch.dtype) -> Envelopes:
        return Envelopes(self.groups.to(dtype), self.slopes.to(dtype), self.first)

    def terms(
        self,
        omega: Tensor,
        family: Tensor,
        *,
        buckets: list[Bucket] | None = None,
        like: tuple[GroupTerms, Tensor] | None = None,
    ) -> GroupTerms:
        """The terms for weights ω (b, neurons); ``buckets`` and ``like`` as in ``SplitBounds.evaluate``.

        Given buckets were made for other weights: neurons outside them are left to the caller.
        """
        groups = self.groups
        if like is None:
            level = omega.new_zeros(len(omega), len(groups.index))
            slope = omega.new_zeros(len(omega), *groups.index.shape)
            chosen = omega > 0
        else:
            others, which = like
            moved = groups.any_of((omega - others.omega[which]).abs() > _SAME * others.omega.amax())
            level = others.level[which].masked_fill_(moved, 0.0)
            slope = others.slope[which].masked_fill_(moved.unsqueeze(2), 0.0)
            chosen = (omega > 0) & moved[:, groups.group]
        if buckets is None:
            buckets = groups.buckets(chosen, self.slopes, family - self.first)
        inside = (omega > 0) & ~chosen
        for bucket in buckets:
            inside[bucket.rows.unsqueeze(1), bucket.members] = True
        omega = torch.where(inside, omega, 0.0)
        local = []
        for bucket in buckets:
            weights = omega[bucket.rows.unsqueeze(1), bucket.members]
            level[bucket.rows, bucket.groups], slope[bucket.at], v = bucket.level(weights)
            local.append(v)
        return GroupTerms(buckets, omega, level, slope, local)

    def subtract_slopes(self, head: Tensor, terms: GroupTerms) -> None:
        """Take every group's c from the coefficients of t."""
        index = self.groups.index.flatten().expand(len(head), -1)
        head.scatter_add_(1, index, -terms.slope.flatten(1))

    def put_values(self, v: Tensor, t: Tensor, terms: GroupTerms) -> None:
        """Set the first layer's v to what it is where the groups' bounds are attained: ∂/∂λ of the value."""
        windows = t[:, self.groups.index]
        for bucket, local in zip(terms.buckets, terms.local, strict=True):
            at = bucket.rows.unsqueeze(1), bucket.members
            own = (bucket.slopes @ windows[bucket.at].unsqueeze(2)).squeeze(2) + local
            v[at] = torch.where(terms.omega[at] > 0, own, v[at])

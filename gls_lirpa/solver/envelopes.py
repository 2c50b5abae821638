"""The multi-neuron relaxation of the first layer (``groups``) in the backward pass of ``bounds``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.solver.groups import Groups
from gls_lirpa.solver.subsets import Bucket


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
    """Weights ω (n, neurons) and groups' slopes c (n, groups, width) that were made for them."""

    omega: Tensor
    slope: Tensor

    def of_neurons(self, groups: Groups) -> Tensor:
        """Slopes g (n, neurons, width) that differ as little from the triangles' as makes Σ ω g = c."""
        change, size = self.slope.clone(), self.slope.new_zeros(self.slope.shape[:2])
        change.index_add_(1, groups.group, -self.omega.unsqueeze(2) * groups.triangle.to(change))
        size.index_add_(1, groups.group, self.omega * self.omega)
        share = self.omega / size[:, groups.group].clamp(min=torch.finfo(size.dtype).tiny)
        return torch.addcmul(groups.triangle.to(change), share.unsqueeze(2), change[:, groups.group])


@dataclass(frozen=True)
class Envelopes:
    """Groups of the first layer and ``slopes`` (n, neurons, width) of their neurons; domains say by number which of
    these are theirs."""

    groups: Groups
    slopes: Tensor

    def to(self, dtype: torch.dtype) -> Envelopes:
        return Envelopes(self.groups.to(dtype), self.slopes.to(dtype))

    def terms(self, omega: Tensor, number: Tensor, *, buckets: list[Bucket] | None = None) -> GroupTerms:
        """The terms for weights ω (b, neurons) with the slopes of these numbers (b,).

        Given ``buckets`` were made for other weights: neurons outside them are left to the caller.
        """
        if buckets is None:
            buckets = self.groups.buckets(omega > 0, self.slopes, number)
        inside = torch.zeros_like(omega, dtype=torch.bool)
        for bucket in buckets:
            inside[bucket.rows.unsqueeze(1), bucket.members] = True
        omega = torch.where(inside, omega, 0.0)
        level = omega.new_zeros(len(omega), len(self.groups.index))
        slope = omega.new_zeros(len(omega), *self.groups.index.shape)
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
        local_inputs = t[:, self.groups.index]
        for bucket, local in zip(terms.buckets, terms.local, strict=True):
            at = bucket.rows.unsqueeze(1), bucket.members
            own = (bucket.slopes @ local_inputs[bucket.at].unsqueeze(2)).squeeze(2) + local
            v[at] = torch.where(terms.omega[at] > 0, own, v[at])

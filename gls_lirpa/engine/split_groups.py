"""Bounds of weighted sums of ReLUs that read the same inputs, such as the channels at one place of a map.

max(z, 0) is the larger of z and 0, so for a group G of first-layer neurons z_j = a_j·t + b_j and weights ω ≥ 0

    Σ_j ω_j max(z_j, 0) = max over S ⊆ G of Σ_{j ∈ S} ω_j z_j,

and for any slopes c, with t ∈ [−1, 1],

    Σ_j ω_j v_j ≤ c·t + d(c),    d(c) = max over S of ‖Σ_{j ∈ S} ω_j a_j − c‖₁ + Σ_{j ∈ S} ω_j b_j.

With the best c this is the concave envelope of the whole sum; the sum of the single neurons' envelopes
(``split_hull``) lies above it. ``grouped`` maximises the lower bound of rows over c and the lower slopes α;
the inequalities it ends with hold for every subproblem, as ``Cuts`` of ``split_bounds``.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.engine.ascent import adam
from gls_lirpa.engine.split import Layer

MOST = 8
"""Neurons of a group; larger ones are divided. A group of k neurons has 2ᵏ subsets."""

LARGEST = 2**24
"""Values that a layer's weights, the sums of the rows' subsets or the cuts may have; beyond it there are no groups."""

SLOPE_RATE = 0.6
ALPHA_RATE = 0.05


@dataclass(frozen=True)
class Cuts:
    """Per family of subproblems: weight (cuts, inputs + first layer) · [t; v₁] ≤ offset (cuts,), padded with 0 ≤ 0."""

    weight: Tensor
    offset: Tensor

    def to(self, dtype: torch.dtype) -> Cuts:
        return Cuts(self.weight.to(dtype), self.offset.to(dtype))


@dataclass(frozen=True)
class _Bucket:
    """Groups of k members each: the row they belong to, their inputs, and the sums over all 2ᵏ subsets."""

    rows: Tensor
    members: Tensor
    index: Tensor
    present: Tensor
    weights: Tensor
    sums: Tensor
    offsets: Tensor
    slope: Tensor

    def places(self, inputs: int) -> Tensor:
        """Where the groups' inputs lie in the flat (rows, inputs)."""
        return self.rows.unsqueeze(1) * inputs + self.index


def _level(sums: Tensor, offsets: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """d(c) of every group, and the sums minus c of the subset at which it is attained."""
    difference = sums - slope.unsqueeze(1)
    best, subset = (difference.abs().sum(2) + offsets).max(1)
    return best, difference[torch.arange(len(subset), device=subset.device), subset]


@dataclass(frozen=True)
class Grouped:
    """Lower bounds of rows, and the lower slopes α, the groups' slopes c and offsets d(c) behind them."""

    value: Tensor
    alpha: Tensor
    buckets: list[_Bucket]
    slopes: list[Tensor]
    levels: list[Tensor]

    def cuts(self, inputs: int, neurons: int) -> Cuts | None:
        """The groups' inequalities, row by row; None where they are too large to be worth it."""
        rows = len(self.value)
        if sum(len(bucket.rows) for bucket in self.buckets) * (inputs + neurons) > LARGEST:
            return None
        found: list[list[Tensor]] = [[] for _ in range(rows)]
        offsets: list[list[Tensor]] = [[] for _ in range(rows)]
        for bucket, slope, level in zip(self.buckets, self.slopes, self.levels, strict=True):
            weight = slope.new_zeros(len(slope), inputs + neurons).scatter_add_(1, bucket.index, -slope)
            weight.scatter_(1, inputs + bucket.members, bucket.weights)
            for i, row in enumerate(bucket.rows.tolist()):
                found[row].append(weight[i])
                offsets[row].append(level[i])
        most = max((len(cuts) for cuts in found), default=0)
        weight, offset = (self.value.new_zeros(rows, most, *shape) for shape in ((inputs + neurons,), ()))
        for row, cuts in enumerate(found):
            if cuts:
                weight[row, : len(cuts)], offset[row, : len(cuts)] = torch.stack(cuts), torch.stack(offsets[row])
        return Cuts(weight, offset)


def grouped(
    layer: Layer, weight: Tensor, offset: Tensor, *, iterations: int, deadline: float = math.inf
) -> Grouped | None:
    """Lower bounds of the rows ``weight`` · [t; v] + ``offset`` over one layer, with their cuts.

    None where the groups are too large to go through their subsets.

    >>> a, one = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), torch.ones(2).double()
    >>> layer = Layer("z", torch.arange(2), a, 0 * one, -2 * one, 2 * one)
    >>> row = torch.tensor([[0.0, 0.0, -1.0, -1.0]]).double()  # −max(s + t, 0) − max(s − t, 0), at least −2
    >>> round(grouped(layer, row, 0 * one[:1], iterations=100).value.item(), 2)
    -2.0
    """
    buckets = _buckets(layer, weight)
    if buckets is None:
        return None
    rows, inputs = weight.shape[0], layer.weight.shape[1]
    fast, fast_offset = layer.weight.float(), layer.offset.float()
    head, lam = weight[:, :inputs].float(), weight[:, inputs:].clamp(min=0).float()
    alpha = (layer.upper > -layer.lower).float().expand(rows, -1).clone()
    slopes = [bucket.slope.float() for bucket in buckets]
    fast_sums = [(bucket.sums.float(), bucket.offsets.float()) for bucket in buckets]
    places = [bucket.places(inputs) for bucket in buckets]
    sizes = [bucket.slope.abs().mean(1, keepdim=True).float() * bucket.present for bucket in buckets]
    best = torch.full((rows,), -torch.inf, device=weight.device)
    best_alpha, best_slopes = alpha.clone(), [slope.clone() for slope in slopes]
    moments = [(torch.zeros_like(part), torch.zeros_like(part)) for part in (alpha, *slopes)]
    for step in range(iterations):
        bounded = lam * alpha
        value = offset.float() + bounded @ fast_offset
        linear = torch.addmm(head, bounded, fast)
        faces = []
        for bucket, place, sums, slope in zip(buckets, places, fast_sums, slopes, strict=True):
            linear.view(-1).index_add_(0, place.flatten(), -slope.flatten())
            level, difference = _level(*sums, slope)
            value = value.index_add(0, bucket.rows, -level)
            faces.append(difference.sign())
        value = value - linear.abs().sum(1)
        better = value > best
        best = torch.where(better, value, best)
        best_alpha[better] = alpha[better]
        for bucket, slope, kept in zip(buckets, slopes, best_slopes, strict=True):
            chosen = better[bucket.rows]
            kept[chosen] = slope[chosen]
        if step + 1 == iterations or time.monotonic() > deadline:
            break
        rate = 0.5 * (1 + math.cos(math.pi * step / iterations))
        t = -linear.sign()
        gradient = lam * torch.addmm(fast_offset, t, fast.t())
        alpha = (alpha + ALPHA_RATE * rate * adam(gradient, *moments[0], step)).clamp_(0.0, 1.0)
        for i, (place, face) in enumerate(zip(places, faces, strict=True)):
            move = adam(face - t.view(-1)[place], *moments[i + 1], step)
            slopes[i] = slopes[i] + SLOPE_RATE * rate * sizes[i] * move
    return _exact(layer, weight, offset, buckets, best_alpha.double(), [slope.double() for slope in best_slopes])


def _exact(
    layer: Layer, weight: Tensor, offset: Tensor, buckets: list[_Bucket], alpha: Tensor, slopes: list[Tensor]
) -> Grouped:
    """The bounds of these α and c in float64."""
    inputs = layer.weight.shape[1]
    bounded = weight[:, inputs:].clamp(min=0) * alpha
    value = offset + bounded @ layer.offset
    linear = weight[:, :inputs] + bounded @ layer.weight
    levels = []
    for bucket, slope in zip(buckets, slopes, strict=True):
        level, _ = _level(bucket.sums, bucket.offsets, slope)
        levels.append(level)
        value = value.index_add(0, bucket.rows, -level)
        linear.view(-1).index_add_(0, bucket.places(inputs).flatten(), -slope.flatten())
    return Grouped(value - linear.abs().sum(1), alpha, buckets, slopes, levels)


def _buckets(layer: Layer, weight: Tensor) -> list[_Bucket] | None:
    inputs = layer.weight.shape[1]
    if layer.weight.numel() > LARGEST:
        return None
    negative = weight[:, inputs:] < 0
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    size = 0
    for members, index in _same_inputs(layer):
        counts = negative[:, members].sum(1)
        order = negative[:, members].to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        for k in counts.unique().tolist():
            if k:
                rows = (counts == k).nonzero().flatten()
                size += len(rows) * 2**k * len(index)
                found.setdefault(k, []).append((rows, members[order[rows, :k]], index))
    if size > LARGEST:
        return None
    return [_bucket(layer, weight, parts) for parts in found.values()]


def _same_inputs(layer: Layer) -> list[tuple[Tensor, Tensor]]:
    """Neurons with the same inputs, at most ``MOST`` together, and those inputs."""
    used = layer.weight != 0
    patterns, kind = torch.unique(used, dim=0, return_inverse=True)
    groups = []
    for i, pattern in enumerate(patterns):
        index = pattern.nonzero().flatten()
        groups += [(members, index) for members in (kind == i).nonzero().flatten().split(MOST)]
    return groups


def _bucket(layer: Layer, weight: Tensor, parts: list[tuple[Tensor, Tensor, Tensor]]) -> _Bucket:
    inputs, k = layer.weight.shape[1], parts[0][1].shape[1]
    width = max(len(index) for _, _, index in parts)
    rows = torch.cat([r for r, _, _ in parts])
    members = torch.cat([m for _, m, _ in parts])
    # Padded with the input 0, whose slope stays 0.
    index = torch.cat([torch.nn.functional.pad(i, (0, width - len(i))).expand(len(r), -1) for r, _, i in parts])
    present = torch.cat([(torch.arange(width) < len(i)).expand(len(r), -1) for r, _, i in parts]).to(weight.device)
    omega = -weight[rows.unsqueeze(1), inputs + members]
    own = layer.weight[members].gather(2, index.unsqueeze(1).expand(-1, k, -1)) * present.unsqueeze(1)
    own = omega.unsqueeze(2) * own
    subsets = torch.tensor([[code >> bit & 1 for bit in range(k)] for code in range(2**k)]).to(own)
    slope = layer.upper / (layer.upper - layer.lower)
    return _Bucket(
        rows,
        members,
        index,
        present,
        omega,
        subsets @ own,
        (omega * layer.offset[members]) @ subsets.t(),
        (slope[members].unsqueeze(2) * own).sum(1),
    )

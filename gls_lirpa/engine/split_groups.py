"""Upper bounds of weighted sums of ReLUs that read the same inputs, such as the channels at one place of a map.

max(z, 0) is the larger of z and 0, so for a group G of first-layer neurons z_j = a_j·t + b_j and weights ω ≥ 0

    Σ_j ω_j max(z_j, 0) = max over S ⊆ G of Σ_{j ∈ S} ω_j z_j,

and for any slopes g_j of its neurons, with t ∈ [−1, 1] and c = Σ_j ω_j g_j,

    Σ_j ω_j v_j ≤ c·t + d,    d = max over S of ‖Σ_{j ∈ S} ω_j a_j − c‖₁ + Σ_{j ∈ S} ω_j b_j.

With the best slopes this is the concave envelope of the whole sum; the sum of the single neurons' envelopes
(``split_hull``) lies above it. Slopes belong to neurons, so that the bound follows the weights, which differ
between subproblems. ``split_ascend`` finds slopes that are good for given weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gls_lirpa.engine.split import Layer

MOST = 8
"""Neurons of a group; larger ones are divided. A group of k neurons has 2ᵏ subsets."""

AT_ONCE = 10
"""Neurons of a group that are bounded together: more than ``MOST``, because groups are joined for one row's weights
and other rows have other signs. What is left keeps its triangles."""

LARGEST = 2**25
"""Values that a layer's weights, its slopes or the sums over subsets may have; beyond it there are no groups."""

_CHUNK = 2**20
"""Values of the sums over subsets that are computed at a time."""


@dataclass(frozen=True)
class Groups:
    """A layer's neurons by the inputs they read.

    ``members`` (groups, most), padded with −1; ``index`` (groups, width), the inputs, padded with 0, and ``widths``
    (groups,), how many they are;
    ``group`` (neurons,); ``weight`` (neurons, width), a_j on those inputs, 0 where padded; ``offset`` (neurons,);
    ``triangle`` (neurons, width), the slopes of the neurons' triangles.
    """

    members: Tensor
    index: Tensor
    widths: Tensor
    group: Tensor
    weight: Tensor
    offset: Tensor
    triangle: Tensor

    @classmethod
    def of(cls, layer: Layer, omega: Tensor | None = None) -> Groups | None:
        """Neurons with the same inputs; where weights ω (neurons,) are given, overlapping groups are joined.

        None where the layer has no neurons or the groups would be too large.
        """
        if not len(layer) or layer.weight.numel() > LARGEST:
            return None
        found = _same_inputs(layer)
        if omega is not None:
            found = _joined(layer, found, omega)
        width, most = max(len(index) for _, index in found), max(len(members) for members, _ in found)
        members = layer.index.new_full((len(found), most), -1)
        index = layer.index.new_zeros(len(found), width)
        group = torch.empty_like(layer.index)
        weight = layer.weight.new_zeros(len(layer), width)
        for i, (those, inputs) in enumerate(found):
            members[i, : len(those)], index[i, : len(inputs)], group[those] = those, inputs, i
            weight[those, : len(inputs)] = layer.weight[those][:, inputs]
        slope = layer.upper / (layer.upper - layer.lower)
        widths = torch.tensor([len(inputs) for _, inputs in found], device=index.device)
        return cls(members, index, widths, group, weight, layer.offset, slope.unsqueeze(1) * weight)

    def to(self, dtype: torch.dtype) -> Groups:
        weight, offset, triangle = (part.to(dtype) for part in (self.weight, self.offset, self.triangle))
        return replace(self, weight=weight, offset=offset, triangle=triangle)

    def any_of(self, chosen: Tensor) -> Tensor:
        """Groups (b, groups) of which a neuron is ``chosen`` (b, neurons)."""
        return self._picked(chosen).any(2)

    def _picked(self, chosen: Tensor) -> Tensor:
        return chosen[:, self.members] & (self.members >= 0)

    def buckets(self, chosen: Tensor, slopes: Tensor, family: Tensor) -> list[Bucket]:
        """The ``chosen`` (b, neurons) of every group, groups with equally many together; slopes by ``family``."""
        picked = self._picked(chosen)
        count = picked.sum(2)
        sizes = self.widths.log2().ceil()
        found = []
        for k in range(1, int(count.max()) + 1 if count.numel() else 1):
            of_k = count == k
            for size in sizes.unique():
                rows, groups = (of_k & (sizes == size)).nonzero(as_tuple=True)
                if len(rows):
                    width = int(self.widths[groups].max())
                    order = picked[rows, groups].to(torch.uint8).argsort(dim=1, descending=True, stable=True)
                    members = self.members[groups].gather(1, order[:, : min(k, AT_ONCE)])
                    own = slopes[family[rows].unsqueeze(1), members, :width]
                    weight = self.weight[members, :width]
                    found.append(Bucket(rows, groups, members, weight, self.offset[members], own))
        return found


@dataclass(frozen=True)
class Bucket:
    """Groups of k members: the row and group they are (n,), ``members`` (n, k), their a and slopes (n, k, width)
    and their b (n, k)."""

    rows: Tensor
    groups: Tensor
    members: Tensor
    weight: Tensor
    offset: Tensor
    slopes: Tensor

    def to(self, dtype: torch.dtype) -> Bucket:
        weight, offset, slopes = (part.to(dtype) for part in (self.weight, self.offset, self.slopes))
        return replace(self, weight=weight, offset=offset, slopes=slopes)

    @property
    def width(self) -> int:
        return self.weight.shape[2]

    @property
    def values(self) -> int:
        """How many values the sums over all subsets are."""
        return len(self.rows) * (1 << self.members.shape[1]) * self.width

    def sums(self, omega: Tensor) -> tuple[Tensor, Tensor]:
        """Σ ω a and Σ ω b over every subset: (n, 2ᵏ, width) and (n, 2ᵏ), for weights ω (n, k)."""
        codes = subsets(self.members.shape[1]).to(omega)
        return codes @ (omega.unsqueeze(2) * self.weight), (omega * self.offset) @ codes.t()

    def level(self, omega: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """d and c for the weights ω (n, k), and what v_j is apart from g_j·t: [j ∈ S] z_j(t*) − g_j·t*, with S and
        t* those at which d is attained. That is ∂/∂ω_j of d."""
        slope = (omega.unsqueeze(2) * self.slopes).sum(1)
        codes = subsets(self.members.shape[1]).to(omega)
        best, subset, face = torch.empty_like(omega[:, 0]), torch.empty_like(self.rows), torch.empty_like(slope)
        step = max(1, _CHUNK * len(omega) // self.values)
        for begin in range(0, len(omega), step):
            some = slice(begin, begin + step)
            sums, offsets = replace(self, weight=self.weight[some], offset=self.offset[some]).sums(omega[some])
            best[some], subset[some], face[some] = highest(sums, offsets, slope[some])
        at = face.sign().unsqueeze(2)
        v = codes[subset] * ((self.weight @ at).squeeze(2) + self.offset) - (self.slopes @ at).squeeze(2)
        return best, slope, v


def highest(sums: Tensor, offsets: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d of every group, the subset at which it is attained, and that subset's sum minus c."""
    best, subset = (torch.cdist(sums, slope.unsqueeze(1), p=1).squeeze(2) + offsets).max(1)
    return best, subset, sums[torch.arange(len(subset), device=subset.device), subset] - slope


def subsets(k: int) -> Tensor:
    """The 2ᵏ subsets of k members as rows of zeros and ones."""
    return torch.arange(2**k).unsqueeze(1) >> torch.arange(k) & 1


def _same_inputs(layer: Layer) -> list[tuple[Tensor, Tensor]]:
    """Neurons with the same inputs, at most ``MOST`` together, and those inputs."""
    used = layer.weight != 0
    patterns, kind = torch.unique(used, dim=0, return_inverse=True)
    groups = []
    for i, pattern in enumerate(patterns):
        index = pattern.nonzero().flatten()
        groups += [(members, index) for members in (kind == i).nonzero().flatten().split(MOST)]
    return groups


def _joined(layer: Layer, groups: list[tuple[Tensor, Tensor]], omega: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Groups joined in the order of how much they overlap, as far as at most ``MOST`` weights are positive in each."""
    pull = torch.stack([(omega[members].unsqueeze(1) * layer.weight[members].abs()).sum(0) for members, _ in groups])
    first, second = torch.triu_indices(len(groups), len(groups), 1)
    overlap = (pull @ pull.t())[first, second]
    counts = [int((omega[members] > 0).sum()) for members, _ in groups]
    part_of = list(range(len(groups)))
    parts = [[i] for i in part_of]
    for pair in overlap.argsort(descending=True)[: int((overlap > 0).sum())].tolist():
        one, other = part_of[int(first[pair])], part_of[int(second[pair])]
        if one != other and counts[one] + counts[other] <= MOST:
            counts[one] += counts[other]
            parts[one] += parts[other]
            for i in parts[other]:
                part_of[i] = one
    found = []
    for i in sorted(set(part_of)):
        members = torch.cat([groups[j][0] for j in parts[i]])
        found.append((members, (layer.weight[members] != 0).any(0).nonzero().flatten()))
    return found

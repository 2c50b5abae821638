"""A multi-neuron relaxation: upper bounds of weighted sums of ReLUs with overlapping receptive fields.

The receptive field of a first-layer neuron are the inputs it reads; the channels at one position of a map share theirs.
max(z, 0) is the larger of z and 0, so for a group G of first-layer neurons z_j = a_j·t + b_j and weights ω ≥ 0

    Σ_j ω_j max(z_j, 0) = max over S ⊆ G of Σ_{j ∈ S} ω_j z_j,

and for any slopes g_j of its neurons, with t ∈ [−1, 1] and c = Σ_j ω_j g_j,

    Σ_j ω_j v_j ≤ c·t + d,    d = max over S of ‖Σ_{j ∈ S} ω_j a_j − c‖₁ + Σ_{j ∈ S} ω_j b_j.

With the best slopes this is the concave envelope of the whole sum; the sum of the single neurons' envelopes lies above
it, and the sum of their triangles above that. Slopes belong to neurons, so that the bound follows the weights, which
differ between domains. ``group_ascent`` finds slopes that are good for given weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gls_lirpa.solver.form import UnstableLayer
from gls_lirpa.solver.subsets import Bucket

MOST = 12
"""Neurons of positive weight in a group, for the row it is made for; the work doubles with each. Groups of 16 and 18
gained 0.003 to 0.03 at 1.4 to 3.7 times the cost."""

AT_ONCE = 14
"""Neurons of a group that are bounded together. For another row than the one a group was made for, more than ``MOST``
of its neurons may have positive weight: those beyond this number keep their triangles."""

LARGEST = 2**25
"""Values (256 MiB of float64) that a layer's weights or its slopes may have; beyond it there are no groups."""

MOST_WORK = 2**29
"""Values that the sums over all subsets may have, a second's work; beyond it there are no groups."""


@dataclass(frozen=True)
class Groups:
    """A layer's neurons by receptive field.

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
    def of(cls, layer: UnstableLayer, omega: Tensor | None = None) -> Groups | None:
        """Neurons with the same receptive field; where weights ω (neurons,) are given, overlapping groups are joined.

        None where the layer has no neurons or the groups would be too large.
        """
        if not len(layer) or layer.weight.numel() > LARGEST:
            return None
        found = _by_receptive_field(layer)
        if omega is not None:
            found = _joined(layer, found, omega)
        width, most = max(len(index) for _, index in found), max(len(members) for members, _ in found)
        members = layer.index.new_full((len(found), most), -1)
        index = layer.index.new_zeros(len(found), width)
        group = torch.empty_like(layer.index)
        weight = layer.weight.new_zeros(len(layer), width)
        position = torch.arange(layer.weight.shape[1], device=weight.device).double()
        for i, (those, inputs) in enumerate(found):
            # By the centre of the receptive field, so that halves of a group have few inputs in common.
            center = ((layer.weight[those] != 0).double() @ position) / (layer.weight[those] != 0).sum(1)
            those = those[center.argsort(stable=True)]
            members[i, : len(those)], index[i, : len(inputs)], group[those] = those, inputs, i
            weight[those, : len(inputs)] = layer.weight[those][:, inputs]
        slope = layer.upper / (layer.upper - layer.lower)
        widths = torch.tensor([len(inputs) for _, inputs in found], device=index.device)
        return cls(members, index, widths, group, weight, layer.offset, slope.unsqueeze(1) * weight)

    def to(self, dtype: torch.dtype) -> Groups:
        weight, offset, triangle = (part.to(dtype) for part in (self.weight, self.offset, self.triangle))
        return replace(self, weight=weight, offset=offset, triangle=triangle)

    def buckets(self, chosen: Tensor, slopes: Tensor, number: Tensor) -> list[Bucket]:
        """The ``chosen`` (b, neurons) of every group, similar groups together; slopes by ``number`` (b,)."""
        picked = chosen[:, self.members] & (self.members >= 0)
        count = picked.sum(2)
        found = []
        for k in range(1, int(count.max()) + 1 if count.numel() else 1):
            rows, groups = (count == k).nonzero(as_tuple=True)
            if not len(rows):
                continue
            order = picked[rows, groups].to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            members = self.members[groups].gather(1, order[:, : min(k, AT_ONCE)])
            read = torch.stack(
                [half.any(1) for half in (self.weight[members] != 0).tensor_split([members.shape[1] // 2], 1)]
            )
            sizes = torch.maximum(read.all(0).sum(1), self.widths[groups] // 4).log2().ceil()
            for size in sizes.unique():
                some = (sizes == size).nonzero().flatten()
                own = slopes[number[rows[some]].unsqueeze(1), members[some]]
                found.append(self._bucket(rows[some], groups[some], members[some], read[:, some], own))
        return found

    def _bucket(self, rows: Tensor, groups: Tensor, members: Tensor, read: Tensor, slopes: Tensor) -> Bucket:
        """``read`` (2, n, inputs): the inputs of the first half of the members and of the second."""
        width, crossing = int(self.widths[groups].max()), int(read.all(0).sum(1).max())
        columns = read.sum(0).argsort(dim=1, descending=True, stable=True)[:, :width]
        at = columns.unsqueeze(1).expand(-1, members.shape[1], -1)
        weight, slopes = self.weight[members].gather(2, at), slopes.gather(2, at)
        return Bucket(
            rows, groups, members, columns, crossing, read[0].gather(1, columns), weight, self.offset[members], slopes
        )


def _by_receptive_field(layer: UnstableLayer) -> list[tuple[Tensor, Tensor]]:
    """Neurons with the same receptive field, at most ``MOST`` together, and that field."""
    used = layer.weight != 0
    patterns, kind = torch.unique(used, dim=0, return_inverse=True)
    groups = []
    for i, pattern in enumerate(patterns):
        index = pattern.nonzero().flatten()
        groups += [(members, index) for members in (kind == i).nonzero().flatten().split(MOST)]
    return groups


def _joined(layer: UnstableLayer, groups: list[tuple[Tensor, Tensor]], omega: Tensor) -> list[tuple[Tensor, Tensor]]:
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

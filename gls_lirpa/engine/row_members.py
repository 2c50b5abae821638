"""Several networks of the same layers over the same boxes: members of a population, bounded in one pass.

Tensors of weights have the members as their first axis, one of them in the ordinary case. Values that depend on
member and sample have both in one axis, all samples of the first member first; the boxes are those of samples alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gls_lirpa.engine.row_network import Layer, Tensors, convolved

Sections = Sequence[tuple[int, slice]]
"""By member: the part of some rows that are its own."""


def stacked(members: Sequence[Tensors]) -> Tensors:
    """The weights of networks of the same layers, members first.

    >>> member = {"fc": (torch.ones(2, 3), None)}
    >>> stacked([member, member])["fc"][0].shape
    torch.Size([2, 2, 3])
    """
    if len(members) == 1:
        return {name: (w.unsqueeze(0), None if b is None else b.unsqueeze(0)) for name, (w, b) in members[0].items()}
    found: Tensors = {}
    for name in members[0]:
        weights, offsets = zip(*(member[name] for member in members), strict=True)
        found[name] = torch.stack(weights), None if offsets[0] is None else torch.stack(offsets)
    return found


def copied(tensors: Tensors) -> Tensors:
    """One member's weights, which stay when those of the network change."""
    return {name: (w.detach().clone(), None if b is None else b.detach().clone()) for name, (w, b) in tensors.items()}


def count(tensors: Tensors) -> int:
    """How many members there are."""
    return max((len(weight) for weight, _ in tensors.values()), default=1)


def chosen(tensors: Tensors, part: slice) -> Tensors:
    """The weights of some members."""
    return {name: (w[part], None if b is None else b[part]) for name, (w, b) in tensors.items()}


# Where there is one member its axis is squeezed away: the derivative of an index would write a tensor of zeros.


def mapped(layer: Layer, x: Tensor, weight: Tensor, offset: Tensor | None, *, shared: bool) -> Tensor:
    """What an affine layer makes of ``x``; ``shared``: of samples that are the same for all members."""
    members = len(weight)
    if layer.kind == "conv":
        if members == 1:
            return convolved(x, weight.squeeze(0), None if offset is None else offset.squeeze(0), layer)
        offsets = [None] * members if offset is None else list(offset)
        if not shared:
            parts = zip(x.chunk(members), weight, offsets, strict=True)
            return torch.cat([convolved(part, kernel, shift, layer) for part, kernel, shift in parts])
        # The members' output channels as those of one convolution.
        y = convolved(x, weight.flatten(0, 1), None if offset is None else offset.flatten(), layer)
        return y.reshape(*y.shape[:3], members, -1).permute(3, 0, 1, 2, 4).flatten(0, 1)
    if layer.kind == "dense":
        x = x.flatten(1)
        if members == 1:
            own = weight.squeeze(0).t()
            return (x @ own if offset is None else torch.addmm(offset.squeeze(0), x, own)).view(-1, *layer.shape)
        x = x.expand(members, *x.shape) if shared else x.unflatten(0, (members, -1))
        matrix = weight.transpose(1, 2)
        y = torch.bmm(x, matrix) if offset is None else torch.baddbmm(offset.unsqueeze(1), x, matrix)
        return y.view(-1, *layer.shape)
    x = x.unsqueeze(0) if shared or members == 1 else x.unflatten(0, (members, -1))
    y = x * weight.unsqueeze(1)
    return (y if offset is None else y + offset.unsqueeze(1)).flatten(0, 1)


def times(values: Tensor, weight: Tensor, sections: Sections) -> Tensor:
    """Rows (·, ·, in) with the matrices (members, in, out) of those they belong to."""
    if len(weight) == 1:
        return values @ weight.squeeze(0)
    found = values.new_empty(*values.shape[:2], weight.shape[2])
    for member, part in sections:
        torch.mm(values[part].flatten(0, 1), weight[member], out=found[part].view(-1, weight.shape[2]))
    return found


def dots(values: Tensor, vectors: Tensor, sections: Sections) -> Tensor:
    """Rows (·, ·, in) with the vectors (members, in) of those they belong to."""
    if len(vectors) == 1:
        return values @ vectors.squeeze(0)
    found = values.new_empty(values.shape[:2])
    for member, part in sections:
        torch.mv(values[part].flatten(0, 1), vectors[member], out=found[part].view(-1))
    return found

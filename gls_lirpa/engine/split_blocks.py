"""A row of a split form divided among blocks of its last layer's neurons, each with a copy of all it reads.

Block p holds neurons j of the last layer that read the same, such as the channels at one place of a map, and copies
of the inputs and earlier neurons they depend on. For any coefficients c_p of these, with the rest
ρ = row − Σ_p c_p on the inputs t and the earlier neurons v (0 ≤ v ≤ u),

    min row ≥ offset + Σ_p min (c_p·[t; v] + Σ_j w_j v_j) − ‖ρ_t‖₁ + Σ_i min(ρ_i, 0) u_i,

where every block is minimised by itself. A block is small enough for a tree of its own (``split_leaves``), and the
trees' sizes add up, where those of one tree over the whole row multiply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from gls_lirpa.engine.split import Layer, SplitForm

LARGEST_SHARE = 0.5
"""Of the form's neurons; where a block reads more of them, blocks would save nothing."""

MOST_VALUES = 2**26
"""Values that the blocks' weights may have."""


@dataclass(frozen=True)
class Part:
    """One layer's neurons of all blocks, padded: z = ``weight`` (blocks, n, before) · [t; earlier v] + ``offset``.

    ``index``: which neurons of the layer; ``real``: not padding. Padding has weight 0 and is read by nothing.
    """

    index: Tensor
    real: Tensor
    weight: Tensor
    offset: Tensor
    lower: Tensor
    upper: Tensor

    def to(self, dtype: torch.dtype) -> Part:
        weight, offset, lower, upper = (x.to(dtype) for x in (self.weight, self.offset, self.lower, self.upper))
        return Part(self.index, self.real, weight, offset, lower, upper)


@dataclass(frozen=True)
class Blocks:
    """See the module. ``inputs``: columns of t per block; ``starts``: the row's first column of every layer;
    ``columns`` and ``real`` (blocks, inputs + earlier neurons): which of the row's [t; earlier v] they are;
    ``last`` (blocks, n): the row on the last layer; ``row``, ``offset``: the row elsewhere; ``upper``: u of the
    earlier neurons; ``copies``: in how many blocks each of [t; earlier v] is.
    """

    inputs: int
    starts: tuple[int, ...]
    columns: Tensor
    real: Tensor
    parts: tuple[Part, ...]
    last: Tensor
    row: Tensor
    offset: Tensor
    upper: Tensor
    copies: Tensor

    @classmethod
    def of(cls, form: SplitForm, row: int) -> Blocks | None:
        """The blocks of one row; None where its last layer does not fall into blocks that are worth it."""
        if len(form.layers) < 2 or not all(len(layer) for layer in form.layers):
            return None
        members = _places(form.layers[-1])
        read = _read(form, row, members)
        earlier = form.neurons - len(form.layers[-1])
        if len(members) < 2 or int(read[:, form.inputs :].sum(1).max()) > LARGEST_SHARE * earlier:
            return None
        starts = _starts(form)
        spans = [slice(0, form.inputs), *(slice(a, b) for a, b in pairwise(starts))]
        chosen = [_padded([block.nonzero().flatten() for block in read[:, span]]) for span in spans]
        wide = sum(index.shape[1] for index, _ in chosen)
        if len(members) * wide * wide > MOST_VALUES:
            return None
        columns = torch.cat([index + span.start for (index, _), span in zip(chosen, spans, strict=True)], 1)
        real = torch.cat([some for _, some in chosen], 1)
        parts, before = [], chosen[0][0].shape[1]
        for layer, (index, some) in zip(form.layers, [*chosen[1:], _padded(members)], strict=True):
            parts.append(_part(layer, index, some, columns[:, :before], real[:, :before]))
            before += index.shape[1]
        last, some = parts[-1].index, parts[-1].real
        whole = form.weight[row]
        copies = torch.zeros(starts[-1], dtype=whole.dtype, device=whole.device)
        copies.index_add_(0, columns[real], torch.ones_like(whole[columns[real]]))
        return cls(
            chosen[0][0].shape[1],
            tuple(starts),
            columns,
            real,
            tuple(parts),
            whole[starts[-1] :][last] * some,
            whole[: starts[-1]],
            form.offset[row],
            form.upper[:earlier],
            copies,
        )

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def neurons(self) -> int:
        """Neurons of a block, with padding."""
        return sum(part.index.shape[1] for part in self.parts)

    def to(self, dtype: torch.dtype) -> Blocks:
        last, row, offset, upper, copies = (
            x.to(dtype) for x in (self.last, self.row, self.offset, self.upper, self.copies)
        )
        parts = tuple(part.to(dtype) for part in self.parts)
        return replace(self, parts=parts, last=last, row=row, offset=offset, upper=upper, copies=copies)

    def rest(self, c: Tensor) -> Tensor:
        """ρ for coefficients c (blocks, columns)."""
        return self.row.index_add(0, self.columns.flatten(), -(c * self.real).flatten())

    def constant(self, c: Tensor) -> Tensor:
        """What the bound is apart from the blocks' minima."""
        t, v = self.rest(c).tensor_split([self.starts[0]])
        return self.offset - t.abs().sum() + (v.clamp(max=0) * self.upper).sum()

    def shared(self, c: Tensor) -> Tensor:
        """c, with what is left of the row on earlier neurons divided among their copies: ρ = 0 there."""
        rest = self.rest(c) / self.copies.clamp(min=1)
        rest[: self.starts[0]] = 0.0
        return c + rest[self.columns] * self.real

    def coefficients(self, slope: Tensor, lam: Tensor) -> Tensor:
        """The c that repeat a backward pass over the whole row, from its neurons' slopes and coefficients λ.

        Each copy of an earlier neuron gets an equal share of its λ, and the slopes cancel all of t, so that the blocks'
        bounds add up to that pass's.
        """
        c = torch.zeros_like(self.columns, dtype=self.row.dtype)
        through, end = torch.zeros_like(c), c.shape[1]
        first = self.starts[0]
        share = lam.clone()
        share[: len(self.upper)] /= self.copies[first:].clamp(min=1)
        for number, part in reversed(list(enumerate(self.parts))):
            at = self.starts[number] - first + part.index
            own = share[at] * part.real
            if number + 1 < len(self.parts):
                span = slice(end - part.index.shape[1], end)
                c[:, span] = own - through[:, span]
                end = span.start
            through[:, :end] += ((own * slope[at]).unsqueeze(1) @ part.weight).squeeze(1)
        c[:, :end] = -through[:, :end]
        return self.shared(c * self.real)


def _places(layer: Layer) -> list[Tensor]:
    """The layer's neurons by what they read; those that read a part of what others do are among these."""
    patterns, kind = torch.unique(layer.weight != 0, dim=0, return_inverse=True)
    sizes = patterns.sum(1)
    common = patterns.double() @ patterns.double().t()
    home = torch.arange(len(patterns), device=kind.device)
    for i in sizes.argsort().tolist():
        inside = (common[i] == sizes[i]) & (sizes > sizes[i])
        if inside.any():
            home[i] = int(torch.where(inside, sizes, -1).argmax())
    # The largest are in none, so the ones above a part of a part are reached in a few steps.
    while not torch.equal(home, home[home]):
        home = home[home]
    return [(home[kind] == place).nonzero().flatten() for place in home.unique()]


def _read(form: SplitForm, row: int, members: list[Tensor]) -> Tensor:
    """What each block depends on: (blocks, inputs + earlier neurons).

    A neuron of the row that no block depends on goes to the one that reads most of what it does.
    """
    starts = _starts(form)
    read = torch.stack([(form.layers[-1].weight[block] != 0).any(0) for block in members])
    uses = form.weight[row, : starts[-1]] != 0
    for number in reversed(range(len(form.layers) - 1)):
        span = slice(starts[number], starts[number + 1])
        used = (form.layers[number].weight != 0).double()
        for i in (uses[span] & ~read[:, span].any(0)).nonzero().flatten().tolist():
            nearest = int((read[:, : span.start].double() @ used[i]).argmax())
            read[nearest, span.start + i] = True
        read[:, : span.start] |= (read[:, span].double() @ used) > 0
    return read


def _starts(form: SplitForm) -> list[int]:
    """The row's first column of every layer."""
    starts = [form.inputs]
    for layer in form.layers[:-1]:
        starts.append(starts[-1] + len(layer))
    return starts


def _padded(found: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Index tensors as one (n, longest), padded with 0, and where it is not padding."""
    width = max(1, max(len(index) for index in found))
    index = found[0].new_zeros(len(found), width)
    real = torch.zeros_like(index, dtype=torch.bool)
    for i, some in enumerate(found):
        index[i, : len(some)], real[i, : len(some)] = some, True
    return index, real


def _part(layer: Layer, index: Tensor, real: Tensor, columns: Tensor, known: Tensor) -> Part:
    weight = layer.weight[index.unsqueeze(2), columns.unsqueeze(1)] * (real.unsqueeze(2) & known.unsqueeze(1))
    one = torch.ones_like(layer.lower[index])
    return Part(
        index,
        real,
        weight,
        layer.offset[index] * real,
        torch.where(real, layer.lower[index], -one),
        torch.where(real, layer.upper[index], one),
    )

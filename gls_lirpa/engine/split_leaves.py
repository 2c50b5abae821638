"""Trees of the blocks of one row (``split_blocks``), bounded together with the coefficients between the blocks.

A leaf fixes signs of some of a block's neurons; the block's bound is its lowest leaf's. The pass is that of
``split_bounds``, except that a first-layer neuron z = a·t + b has an upper bound of its own in all leaves of its block,

    v ≤ g·t + max(‖g‖₁, ‖a − g‖₁ + b),

which for the best slopes g is the concave envelope of v over the box and for g = a u / (u − l) the triangle.
Every leaf's α and β ascend its own bound; the coefficients c and the slopes g ascend the sum of the blocks'
bounds, with the leaves of each block weighted by how near they are to its lowest.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gls_lirpa.engine.ascent import adam
from gls_lirpa.engine.split_blocks import Blocks

ALPHA_RATE = 0.1
BETA_RATE = 0.5
INPUT_RATE = 0.5
NEURON_RATE = 0.05
SLOPE_RATE = 0.05
"""Steps in units of the values' mean size at the start."""

HALF_LIFE = 20
"""After so many rounds the steps of c and g are half as large."""

_NEAR = 0.05
"""Leaves nearer to the lowest than this share of a block's part of the gap at the start weigh most."""

_FLOOR = 0.01
"""Adam's floor for c, in units of the range of a variable, so that settled coefficients rest."""

_CHUNK = 4096
"""Leaves that are evaluated at a time in float64."""


@dataclass(frozen=True)
class Leaves:
    """Sorted by ``block``: ``signs`` (n, neurons) in {−1, 0, +1}, α, β, and Adam's moments of both."""

    block: Tensor
    signs: Tensor
    alpha: Tensor
    beta: Tensor
    moments: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.block)

    def __getitem__(self, index: Tensor | slice) -> Leaves:
        moments = tuple(moment[index] for moment in self.moments)
        return Leaves(self.block[index], self.signs[index], self.alpha[index], self.beta[index], moments)

    def to(self, dtype: torch.dtype) -> Leaves:
        signs, alpha, beta = (x.to(dtype) for x in (self.signs, self.alpha, self.beta))
        return Leaves(self.block, signs, alpha, beta, ())

    def by_block(self, blocks: int) -> list[tuple[int, slice]]:
        """The leaves of every block that has some."""
        ends = torch.bincount(self.block, minlength=blocks).cumsum(0).tolist()
        return [(i, slice(a, b)) for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if b > a]

    @staticmethod
    def joined(parts: list[Leaves]) -> Leaves:
        order = torch.cat([part.block for part in parts]).argsort(stable=True)
        columns = zip(*((p.block, p.signs, p.alpha, p.beta, *p.moments) for p in parts), strict=True)
        block, signs, alpha, beta, *moments = (torch.cat(column)[order] for column in columns)
        return Leaves(block, signs, alpha, beta, tuple(moments))


@dataclass(frozen=True)
class LeafPass:
    """Bounds (n,), and at the minimising point [t; v] (n, columns), z and λ (n, neurons) and λ's part that g bounds."""

    value: Tensor
    known: Tensor
    z: Tensor
    lam: Tensor
    bounded: Tensor


class LeafBounds:
    """The coefficients c of blocks and the slopes g, and what leaves' bounds are with them."""

    def __init__(self, blocks: Blocks, c: Tensor) -> None:
        self.blocks = blocks
        self.c = c
        self.upper_slopes = [part.upper / (part.upper - part.lower) for part in blocks.parts]
        self.slopes = self.upper_slopes[0].unsqueeze(2) * blocks.parts[0].weight
        self._moments = [(torch.zeros_like(x), torch.zeros_like(x)) for x in (c, self.slopes)]
        self._steps = 0
        self._rate = torch.cat(
            [
                part.new_full(part.shape[1:], rate * float(part.abs().sum() / real.sum().clamp(min=1)))
                for part, real, rate in zip(
                    c.tensor_split([blocks.inputs], 1),
                    blocks.real.tensor_split([blocks.inputs], 1),
                    (INPUT_RATE, NEURON_RATE),
                    strict=True,
                )
            ]
        )
        ends = torch.tensor([part.index.shape[1] for part in blocks.parts]).cumsum(0).tolist()
        self._spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """c and g, to come back to."""
        return self.c, self.slopes

    @state.setter
    def state(self, state: tuple[Tensor, Tensor]) -> None:
        self.c, self.slopes = state

    def start(self, alpha: Tensor) -> Leaves:
        """One leaf per block, with lower slopes α (neurons of the form,)."""
        blocks = self.blocks
        first = [start - blocks.starts[0] for start in blocks.starts]
        own = torch.cat([alpha[i + part.index] for i, part in zip(first, blocks.parts, strict=True)], 1).to(self.c)
        zero = torch.zeros_like(own)
        moments = tuple(zero.clone() for _ in range(4))
        return Leaves(torch.arange(len(blocks), device=own.device), zero, own, zero, moments)

    def evaluate(self, leaves: Leaves) -> LeafPass:
        """The leaves' bounds in the precision of the blocks; without what is between the blocks."""
        blocks, block, inputs = self.blocks, leaves.block, self.blocks.inputs
        rows = leaves.by_block(len(blocks))
        unsplit = leaves.signs == 0
        level = self._level()
        coefficients = torch.cat([self.c, blocks.last], 1)[block]
        value = torch.zeros_like(coefficients[:, 0])
        lines: list[tuple[Tensor, Tensor]] = []
        bounded = value
        for number, part in reversed(list(enumerate(blocks.parts))):
            span = self._spans[number]
            before = inputs + span.start
            lam = coefficients[:, before : inputs + span.stop]
            signs, above = leaves.signs[:, span], unsplit[:, span] & (lam < 0)
            if number:
                upper = self.upper_slopes[number][block]
                shift = torch.where(above, -part.lower[block] * upper, 0.0)
                value = value + (shift * lam).sum(1)
            else:
                upper, shift = torch.zeros_like(lam), above
                bounded = torch.where(above, lam, 0.0)
                value = value + (bounded * level[block]).sum(1)
            slope = torch.where(above, upper, leaves.alpha[:, span])
            slope = torch.where(unsplit[:, span], slope, signs.clamp(min=0))
            through = slope * lam - signs * leaves.beta[:, span]
            value = value + (through * part.offset[block]).sum(1)
            for i, some in rows:
                coefficients[some, :before].addmm_(through[some], part.weight[i])
                if not number:
                    coefficients[some, :before].addmm_(bounded[some], self.slopes[i])
            lines.append((slope, shift))
        value = value - coefficients[:, :inputs].abs().sum(1)
        known = torch.empty_like(coefficients)
        known[:, :inputs] = -coefficients[:, :inputs].sign()
        z = torch.empty_like(leaves.alpha)
        for number, (part, span) in enumerate(zip(blocks.parts, self._spans, strict=True)):
            (slope, shift), before = lines[-1 - number], inputs + span.start
            other = torch.empty_like(slope) if not number else slope
            for i, some in rows:
                z[some, span] = torch.addmm(part.offset[i], known[some, :before], part.weight[i].t())
                if not number:
                    other[some] = torch.addmm(level[i], known[some, :before], self.slopes[i].t())
            v = slope * z[:, span]
            known[:, before : inputs + span.stop] = v + shift if number else torch.where(shift, other, v)
        return LeafPass(value, known, z, coefficients[:, inputs:], bounded)

    def bound(self, block: Tensor, value: Tensor) -> Tensor:
        """The row's bound from its leaves' values."""
        return self.blocks.constant(self.c) + self.lowest(block, value).sum()

    def lowest(self, block: Tensor, value: Tensor) -> Tensor:
        return value.new_full((len(self.blocks),), torch.inf).scatter_reduce(0, block, value, "amin")

    def ascend(
        self, leaves: Leaves, *, iterations: int, decay: float, near: float, target: float, deadline: float = math.inf
    ) -> tuple[Leaves, float]:
        """The leaves with better α, β after fewer than so many steps of everything, and the row's bound with them.

        ``decay``: of the steps of c and g; ``near``: how far above the lowest leaf another still weighs.
        Ends above ``target``.
        """
        for left in reversed(range(iterations)):
            done = self.evaluate(leaves)
            lowest = self.lowest(leaves.block, done.value)
            bound = float(self.blocks.constant(self.c) + lowest.sum())
            if not left or bound > target or time.monotonic() > deadline:
                break
            weight = torch.exp((lowest[leaves.block] - done.value) / near)
            weight = weight / weight.new_zeros(len(self.blocks)).index_add(0, leaves.block, weight)[leaves.block]
            leaves = self._step(leaves, done)
            self._move(leaves, done, weight, decay)
            self._steps += 1
        return leaves, bound

    def _step(self, leaves: Leaves, done: LeafPass) -> Leaves:
        """A step of every leaf's α and β."""
        first, second, third, fourth = leaves.moments
        size = done.lam.abs().mean()
        rising = torch.where(leaves.signs == 0, done.lam.clamp(min=0) * done.z, 0.0)
        alpha = leaves.alpha + ALPHA_RATE * adam(rising, first, second, self._steps, memory=0.99)
        beta = leaves.beta + BETA_RATE * size * adam(-leaves.signs * done.z, third, fourth, self._steps, memory=0.99)
        return replace(leaves, alpha=alpha.clamp_(0.0, 1.0), beta=beta.clamp_(min=0.0))

    def _move(self, leaves: Leaves, done: LeafPass, weight: Tensor, decay: float) -> None:
        """A step of c and g."""
        blocks, inputs, first = self.blocks, self.blocks.inputs, self.blocks.parts[0]
        at, pull = torch.zeros_like(self.c), torch.zeros_like(self.slopes)
        used = torch.zeros_like(first.offset)
        for i, some in leaves.by_block(len(blocks)):
            at[i] = weight[some] @ done.known[some, : self.c.shape[1]]
            bounded = weight[some].unsqueeze(1) * done.bounded[some]
            pull[i], used[i] = bounded.t() @ done.known[some, :inputs], bounded.sum(0)
        rest = blocks.rest(self.c)
        gradient = at * blocks.real
        gradient[:, :inputs] += rest[blocks.columns[:, :inputs]].sign() * blocks.real[:, :inputs]
        mean = torch.zeros_like(rest).index_add_(0, blocks.columns.flatten(), gradient.flatten())
        mean = mean / blocks.copies.clamp(min=1)
        gradient[:, inputs:] -= (mean[blocks.columns] * blocks.real)[:, inputs:]
        gradient[:, inputs:] /= blocks.upper.mean()
        move = decay * adam(gradient, *self._moments[0], self._steps, floor=_FLOOR, memory=0.99)
        self.c = blocks.shared(self.c + self._rate * move * blocks.real)
        outer = (self.slopes.abs().sum(2) > self._other_level()).unsqueeze(2)
        side = torch.where(outer, self.slopes.sign(), (self.slopes - first.weight).sign())
        pull = (pull + used.unsqueeze(2) * side) * (first.weight != 0)
        size = first.weight.abs().sum(2, keepdim=True) / (first.weight != 0).sum(2, keepdim=True).clamp(min=1)
        floor = 1e-3 * float(done.lam.abs().mean())
        move = adam(pull, *self._moments[1], self._steps, floor=floor, memory=0.99)
        self.slopes = self.slopes + SLOPE_RATE * decay * size * move * (first.weight != 0)

    def _level(self) -> Tensor:
        return torch.maximum(self.slopes.abs().sum(2), self._other_level())

    def _other_level(self) -> Tensor:
        first = self.blocks.parts[0]
        return (first.weight - self.slopes).abs().sum(2) + first.offset


def exact_bound(blocks: Blocks, state: tuple[Tensor, Tensor], leaves: Leaves) -> float:
    """The row's bound over blocks in float64 with c and g of a ``state`` of ``LeafBounds``."""
    c, slopes = (part.double() for part in state)
    bounds = LeafBounds(blocks, c)
    bounds.slopes = slopes
    value = torch.cat([bounds.evaluate(part.to(torch.float64)).value for part in _chunks(leaves)])
    return float(bounds.bound(leaves.block, value))


def nearness(bound: float, blocks: int) -> float:
    """``near`` for a row that begins at this bound."""
    return _NEAR * max(-bound, 1e-6) / blocks


def _chunks(leaves: Leaves) -> list[Leaves]:
    return [leaves[i : i + _CHUNK] for i in range(0, len(leaves), _CHUNK)]

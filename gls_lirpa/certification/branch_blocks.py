"""Branch and bound in every block of a row at once (``engine.split_blocks``).

Each block has a tree of its own, whose leaves and the coefficients between the blocks are bounded together
(``engine.split_leaves``). This proves rows for which one tree would be far too large, and cannot refute any: even with
exact minima of the blocks the bound may stay below the row's minimum. Only a float64 bound is returned.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from gls_lirpa.certification.branch_settings import Settings
from gls_lirpa.engine.split import SplitForm
from gls_lirpa.engine.split_blocks import Blocks
from gls_lirpa.engine.split_bounds import SplitBounds
from gls_lirpa.engine.split_leaves import HALF_LIFE, LeafBounds, LeafPass, Leaves, exact_bound, nearness

_BYTES = 4 * 12
"""Per column of a leaf, with what a pass over it takes."""

_FALL = 0.1
"""Where steps take the bound down by this share of it they were too large: back to the best, with half of them."""


def bound_in_blocks(
    form: SplitForm,
    row: int,
    settings: Settings,
    *,
    target: float,
    max_nodes: float = math.inf,
    deadline: float = math.inf,
) -> tuple[float, int]:
    """A lower bound of the row in float64, and the leaves bounded for it; −inf and 0 where there are no blocks.

    Ends above ``target``, at a limit, or where no leaf can be split.
    """
    exact = Blocks.of(form, row)
    if exact is None or max_nodes < len(exact):
        return -math.inf, 0
    whole = SplitBounds(form, dtype=torch.float64)
    root, done = whole.optimise(
        whole.start(torch.tensor([row], device=form.weight.device)),
        iterations=settings.root_iterations,
        target=math.inf,
        deadline=deadline,
    )
    lam = done.coefficient[0]
    slope = torch.where(lam < 0, form.upper / (form.upper - form.lower), root.alpha[0])
    bounds = LeafBounds(exact.to(torch.float32), exact.coefficients(slope, lam).float())
    leaves = bounds.start(root.alpha[0])
    near = nearness(float(done.value), len(exact))
    most = settings.queue_mib * 2**20 / (_BYTES * (exact.columns.shape[1] + exact.neurons))
    nodes, rounds, scale = len(leaves), 0, 1.0
    steps, splits = settings.block_warmup, settings.block_splits
    best = (-math.inf, bounds.state, leaves)
    while True:
        leaves, bound = bounds.ascend(
            leaves,
            iterations=steps,
            decay=scale / (1 + rounds / HALF_LIFE),
            near=near,
            # Less than the margin for float32 rounding above the target may be nothing in float64.
            target=1.5 * target,
            deadline=deadline,
        )
        if bound < best[0] - _FALL * abs(best[0]):
            bounds.state, scale = best[1], scale / 2
        elif bound > best[0]:
            best = (bound, bounds.state, leaves)
        room = int(min(splits, (max_nodes - nodes) // 2, most - len(leaves)))
        late = time.monotonic() > deadline or room < 1
        if late or bound > 1.5 * target:
            proven = exact_bound(exact, *best[1:])
            if late or proven > target:
                return proven, nodes
        done_leaves = bounds.evaluate(leaves)
        chosen, neurons = _to_split(bounds, leaves, done_leaves, room, settings.candidates)
        if not len(chosen):
            return exact_bound(exact, *best[1:]), nodes
        keep = torch.ones(len(leaves), dtype=torch.bool, device=chosen.device)
        keep[chosen] = False
        leaves = Leaves.joined([leaves[keep], *_children(leaves[chosen], neurons, done_leaves.lam[chosen])])
        nodes += 2 * len(chosen)
        rounds, steps = rounds + 1, settings.block_iterations


def _to_split(bounds: LeafBounds, leaves: Leaves, done: LeafPass, count: int, candidates: int) -> tuple[Tensor, Tensor]:
    """The lowest leaves of every block, about ``count`` in all and more where a block's gap is large, and the neuron of
    each whose worse half is highest among the first ``candidates``."""
    blocks = bounds.blocks
    score = torch.where(leaves.signs == 0, _scores(bounds, leaves, done), 0.0)
    lowest = bounds.lowest(leaves.block, done.value)
    reached = bounds.lowest(leaves.block, _values(bounds, leaves, done.known[:, : blocks.inputs]))
    share = (reached - lowest).clamp(min=0).sqrt()
    quota = (count * share / share.sum().clamp(min=torch.finfo(share.dtype).tiny)).ceil()
    order = done.value.argsort(stable=True)
    order = order[leaves.block[order].argsort(stable=True)]
    first = torch.bincount(leaves.block, minlength=len(blocks)).cumsum(0).roll(1)
    first[0] = 0
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - first[leaves.block[order]]
    chosen = ((place < quota[leaves.block]) & (score.amax(1) > 0)).nonzero().flatten()
    chosen = chosen[done.value[chosen].argsort(stable=True)][:count].sort().values
    tried = score[chosen].topk(min(candidates, score.shape[1]), dim=1)
    if not len(chosen) or tried.indices.shape[1] == 1:
        return chosen, tried.indices[:, 0]
    which = chosen.repeat_interleave(tried.indices.shape[1])
    halves = _children(leaves[which], tried.indices.flatten(), done.lam[which])
    worse = torch.minimum(*(bounds.evaluate(half).value for half in halves)).reshape(tried.indices.shape)
    best = torch.where(tried.values > 0, worse, -torch.inf).argmax(1, keepdim=True)
    return chosen, tried.indices.gather(1, best)[:, 0]


def _scores(bounds: LeafBounds, leaves: Leaves, done: LeafPass) -> Tensor:
    """What a neuron's relaxation costs the bound: the error at the minimising point, and the triangle's offset."""
    parts = bounds.blocks.parts
    lower, upper = torch.cat([p.lower for p in parts], 1), torch.cat([p.upper for p in parts], 1)
    intercept = (-lower * upper / (upper - lower))[leaves.block]
    v = done.known[:, bounds.blocks.inputs :]
    return done.lam.abs() * (v - done.z.clamp(min=0)).abs() - done.lam.clamp(max=0) * intercept


def _values(bounds: LeafBounds, leaves: Leaves, t: Tensor) -> Tensor:
    """What the leaves' blocks are at inputs t, exactly."""
    blocks = bounds.blocks
    known = t
    coefficients = torch.cat([bounds.c, blocks.last], 1)
    for part in blocks.parts:
        z = torch.cat(
            [torch.addmm(part.offset[i], known[some], part.weight[i].t()) for i, some in leaves.by_block(len(blocks))]
        )
        known = torch.cat([known, z.clamp(min=0)], 1)
    return (known * coefficients[leaves.block]).sum(1)


def _children(leaves: Leaves, neurons: Tensor, lam: Tensor) -> list[Leaves]:
    """Both halves of every leaf, split by one neuron each.

    Their β begin so that a half's linear function is its leaf's where λ > 0, v ≥ α z: λ z − β z, and 0 + β z.
    """
    at = neurons.unsqueeze(1)
    own, alpha = lam.gather(1, at).clamp(min=0), leaves.alpha.gather(1, at)
    found = []
    for sign, beta in ((-1.0, alpha * own), (1.0, (1 - alpha) * own)):
        signs = leaves.signs.scatter(1, at, sign)
        moments = tuple(moment.clone() for moment in leaves.moments)
        found.append(Leaves(leaves.block, signs, leaves.alpha, leaves.beta.scatter(1, at, beta), moments))
    return found

"""Rows through convolutions and ReLUs by compiled kernels, where numba is installed and values are on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gls_lirpa.engine.row_network import Chain, Pair
from gls_lirpa.engine.row_patches import Patch, Rows, plain
from gls_lirpa.engine.row_relaxation import Slopes

if TYPE_CHECKING:
    from gls_lirpa.engine.row_walk import Relaxed

PARTS, LEAST_ROWS = 8, 128
"""Rows are done in so many parts, each of at least so many rows, whatever the number of threads: sums of derivatives
are then the same for any."""

WIDE_CHANNELS, ALIVE_SHARE = 48, 0.6
"""ReLUs of so many channels are left to torch's convolutions where more of their neurons are alive: with all alive,
cnn5-l took 1.4 to 1.8 times as long in kernels, cnn5 (16 and 32 channels) 0.9 times."""

Array = Any


@lru_cache
def kernels() -> Any:
    """The module of compiled kernels; None without numba."""
    try:
        from gls_lirpa.engine import row_kernels
    except (ImportError, SystemError):  # the latter where numba does not know the installed numpy
        return None
    return row_kernels


def is_compiled(values: Tensor) -> bool:
    """Whether there are kernels for values of this type, where they are."""
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64) and kernels() is not None


@lru_cache(maxsize=1)
def _workers(count: int) -> ThreadPoolExecutor:
    """Threads that stay: new ones would begin without memory, and took a third of a pass's time."""
    return ThreadPoolExecutor(count, thread_name_prefix="bounds")


if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's threads; Windows does not fork
    os.register_at_fork(after_in_child=_workers.cache_clear)


def compiled_chain(over: Relaxed, name: str) -> Chain | None:
    """The layers from the ReLU ``name`` down to the input, where kernels take rows through them."""
    chain, center = over.network.chains.get(name), over.center
    if chain is None or over.row_slopes or not is_compiled(center):
        return None
    if any(relu.name in over.crowded for relu, _ in chain.pairs):
        return None
    # Derivatives in the box are left to torch.
    return None if torch.is_grad_enabled() and (center.requires_grad or over.radius.requires_grad) else chain


def is_crowded(slopes: Slopes) -> bool:
    """Whether a ReLU has so many channels, and so many of its neurons alive, that torch's convolutions are faster."""
    alpha, excess, _ = slopes
    if alpha.shape[-1] < WIDE_CHANNELS or kernels() is None:
        return False
    return int(((alpha != 0) | (excess != 0)).sum()) > ALIVE_SHARE * alpha.numel()


def chain_bounds(over: Relaxed, chain: Chain, patch: Patch, rows: Rows) -> Tensor:
    """Lower bounds of rows given by their coefficients at the output of the chain's first ReLU: (·, ·)."""
    patch = plain(patch, chain.pairs[0][0])
    tensors: list[Tensor] = []
    for relu, conv in chain.pairs:
        weight, offset = over.tensors[conv.name]
        for number, slope in enumerate(over.slopes[relu.name]):
            tensors.append(over.prepared((relu.name, "flat", number), partial(_flat, slope)))
        tensors.append(over.prepared((conv.name, "lanes"), partial(_filled, weight)))
        shift = torch.zeros_like(weight[:, :, 0, 0, 0]) if offset is None else offset
        tensors.append(over.prepared((conv.name, "shift"), partial(_flat, shift)))
    groups = _groups(patch, rows)
    box = [_flat(end) for end in (over.center, over.radius)]
    values = patch.values.flatten(2).expand(len(rows.sample) if rows.sample is not None else -1, -1, -1)
    job = _Job(_plan(chain, patch.full, patch.grid), patch.full, groups, len(over.center), box, over.valued)
    found: Tensor = _ChainBounds.apply(job, values.contiguous(), *tensors)  # type: ignore[no-untyped-call]
    return found


def _flat(value: Tensor) -> Tensor:
    return value.flatten(1).contiguous()


def _filled(weight: Tensor) -> Tensor:
    """Kernels (members, out, in, height, width) as (members, out · rows of one · entries in whole lanes)."""
    members, out, channels, height, width = weight.shape
    lines = weight.permute(0, 1, 3, 4, 2).reshape(members, out, height, width * channels)
    return F.pad(lines, (0, -lines.shape[3] % kernels().LANES)).flatten(1)


def _plan(chain: Chain, full: bool, window: Pair) -> Array:
    """The lines that kernels go by, for rows that begin with a ``window`` of the first ReLU; see ``row_kernels``."""
    own, begin, lines = kernels(), 0, []
    below = [*(relu.shape[2] for relu, _ in chain.pairs[1:]), chain.input.shape[2]]
    for (relu, conv), channels in zip(chain.pairs, below, strict=True):
        size = window[0] * window[1] * relu.shape[2] + own.LANES
        across = conv.kernel[1] * channels
        kernel = (conv.kernel[0], across + -across % own.LANES)
        lines.append([*relu.shape, *window, size, begin, *kernel, *conv.stride, *conv.padding])
        begin += own.ROWS * size
        high, wide = relu.shape[:2] if full else window
        window = (high - 1) * conv.stride[0] + conv.kernel[0], (wide - 1) * conv.stride[1] + conv.kernel[1]
    size = window[0] * window[1] * chain.input.shape[2] + own.LANES
    lines.append([*chain.input.shape, *window, size, begin, 0, 0, 0, 0, 0, 0])
    return np.array(lines, dtype=np.int64)


@dataclass(frozen=True)
class _Groups:
    """Rows ``first[g]`` to ``first[g + 1]`` have the sample ``sample[g]``, and windows that begin at ``place[g]``."""

    first: Array
    sample: Array
    place: Array

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """Parts of about as many rows, no sample in two of them."""
        rows = int(self.first[-1])
        count = max(1, min(PARTS, rows // LEAST_ROWS))
        cuts = np.searchsorted(self.first, np.arange(1, count) * rows // count)
        fresh = np.flatnonzero(np.diff(self.sample)) + 1
        ends = fresh[np.searchsorted(fresh, cuts[cuts <= (fresh[-1] if len(fresh) else -1)])]
        edges = np.unique([0, *ends, len(self.sample)])
        return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _groups(patch: Patch, rows: Rows) -> _Groups:
    each = patch.values.shape[1]
    if rows.sample is None:
        count = len(patch.values)
        return _Groups(np.arange(count + 1) * each, np.arange(count), np.zeros((count, 2), np.int64))
    sample = rows.sample.numpy()
    place = np.zeros((len(sample), 2), np.int64)
    if rows.place is not None and not patch.full:
        for a in (0, 1):
            place[:, a] = rows.place[a].numpy() * patch.step[a] + patch.offset[a]
    fresh = (np.diff(sample) != 0) | (np.diff(place, axis=0) != 0).any(1)
    first = np.concatenate([[0], np.flatnonzero(fresh) + 1])
    return _Groups(np.append(first, len(sample)) * each, sample[first], place[first])


KINDS = 5
"""Tensors of a ReLU and its convolution: three of slopes (samples, neurons), kernels and offsets (members, ·)."""


@dataclass(frozen=True)
class _Job:
    plan: Array
    full: bool
    groups: _Groups
    batch: int
    box: list[Tensor]
    valued: bool

    def bounds(self, values: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Lower bounds of rows (·, ·, coefficients)."""
        found = values.new_empty(values.shape[:2])
        nothing = [tuple(np.empty((len(t), 0), _numpy(t).dtype) for t in tensors[k::KINDS]) for k in range(1, KINDS)]
        self._run(values, tensors, found, False, _numpy(found).reshape(-1, 1), lambda part: nothing)
        return found

    def derivatives(self, values: Tensor, tensors: Sequence[Tensor], down: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Those in ``values``, and in all ``tensors`` but lower slopes, where those in the bounds are ``down``."""
        found = torch.empty_like(values)
        slopes = [[torch.zeros_like(t) for t in tensors[k::KINDS]] for k in (1, 2)]
        # No sample is in two parts, but weights are.
        shared = [[t.new_zeros(len(self.groups.parts), *t.shape) for t in tensors[k::KINDS]] for k in (3, 4)]

        def own(part: int) -> list[tuple[Array, ...]]:
            return [
                *(tuple(_numpy(t) for t in kind) for kind in slopes),
                *(tuple(_numpy(t[part]) for t in kind) for kind in shared),
            ]

        self._run(values, tensors, down.contiguous(), True, _numpy(found.flatten(0, 1)), own)
        sums = [[t.sum(0) for t in kind] for kind in shared]
        return found, [tensor for level in zip(*slopes, *sums, strict=True) for tensor in level]

    def _run(
        self,
        values: Tensor,
        tensors: Sequence[Tensor],
        bounds: Tensor,
        differentiate: bool,
        d_values: Array,
        results: Callable[[int], list[tuple[Array, ...]]],
    ) -> None:
        own, parts = kernels(), self.groups.parts
        kinds = [tuple(_numpy(t) for t in tensors[k::KINDS]) for k in range(KINDS)]
        rows, ends = _numpy(values.flatten(0, 1)), _numpy(bounds.flatten())
        center, radius = (_numpy(end) for end in self.box)
        groups = self.groups
        # Kernels visit neurons that are alive: a weight that is not finite must be seen elsewhere too.
        spoilt = float(sum((tensor.detach() * 0).sum() for k in (3, 4) for tensor in tensors[k::KINDS]))

        def run(part: int) -> None:
            own.lower_bounds(
                self.plan, self.full, rows, groups.first, groups.sample, groups.place, self.batch,
                *kinds, center, radius, spoilt, ends, differentiate, d_values, *results(part), *parts[part],
            )  # fmt: skip

        threads = min(torch.get_num_threads(), len(parts))
        if threads == 1:
            for part in range(len(parts)):
                run(part)
            return
        list(_workers(threads).map(run, range(len(parts))))


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().numpy()


class _ChainBounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, values: Tensor, *tensors: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(values, *tensors)
        return job.bounds(values, tensors) if job.valued else values.new_zeros(values.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, down: Tensor) -> tuple[Tensor | None, ...]:
        values, *tensors = ctx.saved_tensors
        d_values, rest = ctx.job.derivatives(values, tensors, down)
        levels = [rest[first : first + KINDS - 1] for first in range(0, len(rest), KINDS - 1)]
        return None, d_values, *(tensor for level in levels for tensor in (None, *level))

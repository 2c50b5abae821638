"""How much memory a bound's graph takes, and how much it may."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

CPU_CHUNK_MIB = 192
"""Retained memory per chunk on a CPU. Larger chunks of CROWN leave the caches and were slower."""


def budget(device: torch.device, chunk_mib: int | None) -> float:
    """Bytes that the graph of one chunk may take."""
    if chunk_mib is not None:
        return chunk_mib * 2.0**20
    if device.type == "cuda":
        return 0.25 * torch.cuda.mem_get_info(device)[0]
    return CPU_CHUNK_MIB * 2.0**20


def retained_bytes(compute: Callable[[], object], weights: Iterable[Tensor]) -> float:
    """Bytes that autograd keeps for the backward pass of ``compute()``, the weights themselves aside.

    >>> w = torch.ones(1000, requires_grad=True)
    >>> retained_bytes(lambda: (w * 2).exp(), [w])
    4000.0
    """
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = compute()
    del kept
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    return float(max(sum(size for pointer, size in seen.items() if pointer not in own), 1))


def keep_freed_pages() -> None:
    """Let the C library reuse what is freed, up to some 60 MiB, instead of handing it back at every call.

    glibc returns large blocks to the system at once, and touching new ones took a fifth of a bound computation. Its
    limit is the largest block of up to 32 MiB that was ever freed: one is, here, that nobody writes to.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)

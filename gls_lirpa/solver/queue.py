"""Open domains in order of their bounds, within a memory budget."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.envelopes import Slopes


@dataclass(frozen=True)
class _Entry:
    bound: float
    row: int
    domain: Domains
    neuron: int
    slopes: Slopes | None

    @property
    def bytes(self) -> int:
        d = self.domain
        parts = (d.signs, d.alpha, d.beta, d.gamma)
        return 1000 + sum(part.numel() * part.element_size() for part in parts)


class Queue:
    """Domains, lowest bound first; those of equal bound in the order they came.

    Where more than ``max_mib`` are held, the highest bounds are taken first instead: those are nearest
    to being proven, so the queue grows by at most the depth of the tree per domain taken.
    """

    def __init__(self, *, max_mib: float) -> None:
        self._entries: list[_Entry] = []
        self._bytes = 0
        self._max_bytes = max_mib * 2**20

    def __len__(self) -> int:
        return len(self._entries)

    def lowest(self, row: int) -> float:
        """The lowest bound of an open domain of this row, inf if there is none."""
        return next((entry.bound for entry in self._entries if entry.row == row), float("inf"))

    def push(self, batch: Domains, neurons: Tensor, slopes: Sequence[Slopes] = ()) -> None:
        """Add domains with the neuron to split each by (b,), and ``slopes`` by their number."""
        keys = zip(*(part.tolist() for part in (batch.bound, batch.rows, neurons, batch.slopes)), strict=True)
        for i, (bound, row, neuron, number) in enumerate(keys):
            # Copies: a view would keep the whole batch in memory.
            domain = batch[torch.tensor([i], device=batch.rows.device)]
            entry = _Entry(bound, row, domain, neuron, slopes[number] if slopes else None)
            bisect.insort_right(self._entries, entry, key=lambda item: item.bound)
            self._bytes += entry.bytes

    def pop(self, count: int) -> tuple[Domains, Tensor, list[Slopes | None]]:
        """Up to ``count`` domains, and the neurons and slopes they came with."""
        if self._bytes > self._max_bytes:
            taken, self._entries = self._entries[-count:], self._entries[:-count]
        else:
            taken, self._entries = self._entries[:count], self._entries[count:]
        self._bytes -= sum(entry.bytes for entry in taken)
        batch = Domains.joined([entry.domain for entry in taken])
        neurons = torch.tensor([entry.neuron for entry in taken], device=batch.rows.device)
        return batch, neurons, [entry.slopes for entry in taken]

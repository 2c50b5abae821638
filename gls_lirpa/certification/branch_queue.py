"""Open subproblems in order of their bounds, within a memory budget."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.engine.split_bounds import Subproblems


@dataclass(frozen=True)
class _Entry:
    bound: float
    row: int
    family: int
    signs: Tensor
    values: Tensor


class Queue:
    """Subproblems, lowest bound first; those of equal bound in the order they came.

    Where more than ``max_mib`` are held, the highest bounds are taken first instead: those are nearest
    to being proven, so the queue grows by at most the depth of the tree per subproblem taken.
    """

    def __init__(self, *, max_mib: float) -> None:
        self._entries: list[_Entry] = []
        self._bytes = 0
        self._max_bytes = max_mib * 2**20

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return self._bytes > self._max_bytes

    def lowest(self, row: int) -> float:
        """The lowest bound of an open subproblem of this row, inf if there is none."""
        return next((entry.bound for entry in self._entries if entry.row == row), float("inf"))

    def families(self) -> set[int]:
        """The families of its subproblems."""
        return {entry.family for entry in self._entries}

    def drop(self, row: int) -> None:
        """Forget the subproblems of a row."""
        self._entries = [entry for entry in self._entries if entry.row != row]
        self._bytes = sum(_size(entry) for entry in self._entries)

    def move_to(self, other: Queue) -> None:
        """Hand over everything."""
        if self._entries:
            other.push(*self.pop(len(self._entries)))

    def push(self, batch: Subproblems, ranked: Tensor) -> None:
        """Add subproblems with the neurons to split them by, best first."""
        values = torch.cat([batch.alpha, batch.beta, batch.gamma, ranked.to(batch.alpha)], 1)
        keys = zip(batch.bound.tolist(), batch.rows.tolist(), batch.family.tolist(), strict=True)
        for i, (bound, row, family) in enumerate(keys):
            # Copies: a view would keep the whole batch in memory.
            entry = _Entry(bound, row, family, batch.signs[i].clone(), values[i].clone())
            bisect.insort_right(self._entries, entry, key=lambda item: item.bound)
            self._bytes += _size(entry)

    def pop(self, count: int) -> tuple[Subproblems, Tensor]:
        """Up to ``count`` subproblems and the neurons they came with."""
        if self.full:
            taken, self._entries = self._entries[-count:], self._entries[:-count]
        else:
            taken, self._entries = self._entries[:count], self._entries[count:]
        self._bytes -= sum(_size(entry) for entry in taken)
        signs = torch.stack([entry.signs for entry in taken])
        values = torch.stack([entry.values for entry in taken])
        n = signs.shape[1]
        batch = Subproblems(
            torch.tensor([entry.row for entry in taken], device=signs.device),
            torch.tensor([entry.family for entry in taken], device=signs.device),
            signs,
            values[:, :n].contiguous(),
            values[:, n : 2 * n].contiguous(),
            values[:, 2 * n : 3 * n].contiguous(),
            torch.tensor([entry.bound for entry in taken], dtype=torch.float64, device=signs.device),
        )
        return batch, values[:, 3 * n :].long()


def _size(entry: _Entry) -> int:
    return 400 + entry.signs.numel() + 4 * entry.values.numel()

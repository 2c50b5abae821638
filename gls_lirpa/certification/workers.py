"""Samples certified in parallel, each by a whole cascade in a process of its own, on Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from gls_lirpa.base.checks import require
from gls_lirpa.base.parcels import unpacked
from gls_lirpa.base.ray_pool import WorkerPool
from gls_lirpa.certification.cascade import Cascade
from gls_lirpa.certification.records import Record
from gls_lirpa.certification.settings import Settings
from gls_lirpa.data import Split

LARGEST_PART = 64


class CascadeWorker:
    """Certifies some of the samples in an actor."""

    def __init__(self, parcel: bytes) -> None:
        torch.set_num_threads(1)
        model, self._split, settings, folder = unpacked(parcel)
        self._cascade = Cascade(model, self._split.batch([0])[0], settings, folder=folder)

    def work(self, part: list[tuple[int, int]]) -> Iterator[Record | dict[str, str]]:
        """Records of the samples at (position in the split, index), each as soon as it is decided; then the stages
        that were left out, and why."""
        x, labels = self._split.batch([position for position, _ in part])
        # Ray sends into the generator, which `yield from` would pass on to iterators that take nothing.
        for record in self._cascade.run(x, labels, torch.tensor([index for _, index in part])):  # noqa: UP028
            yield record
        yield self._cascade.unusable


class CascadePool:
    """Cascades on Ray actors. A sample's record does not depend on the part or the worker it came to.

    Parts shrink towards the end, so that no worker waits long for another.
    """

    def __init__(self, model: nn.Module, settings: Settings, *, workers: int, folder: Path) -> None:
        require(workers >= 1, "workers >= 1", workers)
        self._model, self._settings, self._folder = model.cpu(), settings, folder
        self._workers = workers
        self.unusable: dict[str, str] = {}

    def run(self, split: Split, indices: Sequence[int]) -> Iterator[Record]:
        """The records of some samples of a split, in the order in which they are decided."""
        if not indices:
            return
        used = split.subset(list(indices))
        size = used.images.numel() * used.images.element_size()
        weights = sum(tensor.numel() * tensor.element_size() for tensor in self._model.state_dict().values())
        workers = min(self._workers, len(indices))
        waiting = list(enumerate(indices))

        def take() -> list[tuple[int, int]] | None:
            width = max(1, min(LARGEST_PART, len(waiting) // (2 * workers)))
            part = waiting[:width]
            del waiting[:width]
            return part or None

        pool = WorkerPool(
            CascadeWorker,
            (self._model, used, self._settings, str(self._folder)),
            workers=workers,
            what="this network",
            store_bytes=4 * (size + weights),
        )
        for event in pool.stream(take):
            if event is None:
                continue
            part, found = event
            if isinstance(found, Record):
                part[:] = [item for item in part if item[1] != found.index]
                yield found
            else:
                self.unusable |= found

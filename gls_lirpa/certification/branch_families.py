"""Slopes of groups of neurons in a tree: which subproblems were given some of their own, and where new ones begin."""

from __future__ import annotations

import math

import torch

from gls_lirpa.certification.branch_settings import Settings
from gls_lirpa.engine.split_bounds import SplitBounds, Subproblems
from gls_lirpa.engine.split_envelopes import Envelopes, Slopes
from gls_lirpa.engine.split_groups import Groups
from gls_lirpa.engine.split_tighten import envelopes_of


class Families:
    """A family is a subproblem with slopes of its own and what is below it. ``at_once``: how many are made at a time,
    0 where there are none to be had."""

    def __init__(self, settings: Settings, *, rows: int) -> None:
        self.at_once = settings.families if settings.group_iterations else 0
        self._settings = settings
        self._groups: Groups | None = None
        self._slopes: dict[int, Slopes] = {}
        # The rows are the first families, without slopes.
        self._numbered = rows

    @property
    def lifetime(self) -> int:
        """Subproblems to bound before new slopes; more where groups are so large that few get slopes at a time."""
        return self._settings.families if self.at_once < self._settings.families else 1

    def make(
        self, bounds: SplitBounds, batch: Subproblems, *, others: set[int], deadline: float = math.inf
    ) -> tuple[Envelopes, Subproblems] | None:
        """Slopes for every subproblem of the batch, which is lowest first, beginning with those of its family.

        Groups are joined for the lowest at the first call. ``others``: families of other open subproblems; the slopes
        of the rest are forgotten. None where groups are too large for so many, and then half as many fit ``at_once``.
        """
        if self._groups is None:
            weight, _ = bounds.over_first_layer(batch[:1])
            self._groups = Groups.of(bounds.form.layers[0], (-weight[0, bounds.form.inputs :]).clamp(min=0))
        if self._groups is None:
            self.at_once = 0
            return None
        start = self._slopes_of(batch) if self._slopes else None
        found = envelopes_of(
            bounds,
            batch,
            self._groups,
            iterations=self._settings.group_iterations if start is None else self._settings.renewal_iterations,
            start=start,
            first=self._numbered,
            deadline=deadline,
        )
        if found is None:
            self.at_once = len(batch) // 2
            return None
        envelopes, slopes, batch = found
        self._slopes = {number: kept for number, kept in self._slopes.items() if number in others}
        for i, number in enumerate(batch.family.tolist()):
            # Copies: a view would keep the whole batch in memory.
            self._slopes[number] = Slopes(slopes.omega[i].float(), slopes.slope[i].float())
        self._numbered += len(batch)
        return envelopes, batch

    def _slopes_of(self, batch: Subproblems) -> Slopes:
        some = next(iter(self._slopes.values()))
        # Of weight 0 they are the triangles'.
        triangles = Slopes(torch.zeros_like(some.omega), torch.zeros_like(some.slope))
        kept = [self._slopes.get(number, triangles) for number in batch.family.tolist()]
        return Slopes(torch.stack([one.omega for one in kept]), torch.stack([one.slope for one in kept]))

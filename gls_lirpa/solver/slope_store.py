"""Multi-neuron slopes in a tree: which domains were given some of their own, and where new ones begin."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.envelopes import Envelopes, Slopes
from gls_lirpa.solver.group_ascent import ascend_groups
from gls_lirpa.solver.groups import Groups
from gls_lirpa.solver.settings import SolverSettings


def envelopes_of(
    bounds: SplitBounds,
    batch: Domains,
    groups: Groups,
    *,
    iterations: int,
    start: Slopes | None = None,
    first: int = 0,
    deadline: float = math.inf,
) -> tuple[Envelopes, Slopes, Domains] | None:
    """Slopes for every domain of a batch, numbered from ``first``, and the batch with these and new α.

    They are made for the linear function of [t; v₁] that the domain's bound rests on, and hold for every other.
    ``start``: slopes of similar domains, to begin with.
    """
    layer = bounds.form.layers[0]
    weight, constant = bounds.over_first_layer(batch)
    begin = None if start is None else (batch.alpha[:, : len(layer)], start)
    found = ascend_groups(layer, groups, weight, constant, iterations=iterations, start=begin, deadline=deadline)
    if found is None:
        return None
    alpha = batch.alpha.clone()
    alpha[:, : len(layer)] = found.alpha.to(alpha)
    numbers = first + torch.arange(len(batch), device=batch.rows.device)
    envelopes = Envelopes(groups, found.slopes.of_neurons(groups), first)
    return envelopes, found.slopes, replace(batch, slopes=numbers, alpha=alpha)


class SlopeStore:
    """Slopes of domains by number; children share their parent's until they get their own.

    ``at_once``: how many domains are given slopes at a time, 0 where there are none to be had.
    """

    def __init__(self, settings: SolverSettings, *, rows: int) -> None:
        self.at_once = settings.slopes_at_once if settings.group_iterations else 0
        self._settings = settings
        self._groups: Groups | None = None
        self._slopes: dict[int, Slopes] = {}
        # The first numbers are the rows', which have no slopes.
        self._numbered = rows

    @property
    def lifetime(self) -> int:
        """Domains to bound before new slopes; more where groups are so large that few get slopes at a time."""
        return self._settings.slopes_at_once if self.at_once < self._settings.slopes_at_once else 1

    def make(
        self, bounds: SplitBounds, batch: Domains, *, others: set[int], deadline: float = math.inf
    ) -> tuple[Envelopes, Domains] | None:
        """Slopes for every domain of the batch, which is lowest first, beginning with those it has.

        Groups are joined for the lowest at the first call. ``others``: numbers that other open domains use; the slopes
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
        for i, number in enumerate(batch.slopes.tolist()):
            # Copies: a view would keep the whole batch in memory.
            self._slopes[number] = Slopes(slopes.omega[i].float(), slopes.slope[i].float())
        self._numbered += len(batch)
        return envelopes, batch

    def _slopes_of(self, batch: Domains) -> Slopes:
        some = next(iter(self._slopes.values()))
        # Of weight 0 they are the triangles'.
        triangles = Slopes(torch.zeros_like(some.omega), torch.zeros_like(some.slope))
        kept = [self._slopes.get(number, triangles) for number in batch.slopes.tolist()]
        return Slopes(torch.stack([one.omega for one in kept]), torch.stack([one.slope for one in kept]))

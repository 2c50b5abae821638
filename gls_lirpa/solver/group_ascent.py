"""Slopes of groups of neurons (``groups``) that are good for given rows, by ascent of the rows' bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gls_lirpa.solver.ascent import Evaluated, Variable, ascend
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.envelopes import Envelopes, Slopes
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.groups import LARGEST, MOST_WORK, Groups
from gls_lirpa.solver.settings import SolverSettings
from gls_lirpa.solver.subsets import Bucket

SLOPE_RATE = 0.8
RENEWAL_RATE = 0.3
ALPHA_RATE = 0.05
"""Adam's first steps, which fall to 0 with the cosine: of slopes from the triangles' and from those of similar rows, in
units of the slopes' mean size; of α."""

_EVERY = 8
_KEPT = 64
"""The maximum over all 2ᵏ subsets is taken at every eighth step and the last; the steps between them maximise over the
64 subsets that were highest then. Only values of the former are bounds."""


@dataclass(frozen=True)
class Ascended:
    """Lower bounds of rows, and the lower slopes α (rows, neurons) and groups' slopes behind them."""

    value: Tensor
    alpha: Tensor
    slopes: Slopes


def ascend_groups(
    form: SplitForm,
    groups: Groups,
    *,
    iterations: int,
    start: tuple[Tensor, Slopes] | None = None,
    deadline: float = math.inf,
) -> Ascended | None:
    """Lower bounds of the rows of a ``form`` of one layer.

    ``start``: α and slopes of similar rows, to begin with in smaller steps; else those of the triangles.
    None where the groups are too large to go through their subsets.

    >>> a, one = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), torch.ones(2).double()
    >>> from gls_lirpa.solver.form import UnstableLayer
    >>> layer = UnstableLayer("z", torch.arange(2), a, 0 * one, -2 * one, 2 * one)
    >>> row = torch.tensor([[0.0, 0.0, -1.0, -1.0]]).double()  # −max(s + t, 0) − max(s − t, 0), at least −2
    >>> form = SplitForm(0 * one, one, torch.arange(2), (layer,), row, 0 * one[:1])
    >>> round(ascend_groups(form, Groups.of(layer), iterations=100).value.item(), 2)
    -2.0
    """
    (layer,) = form.layers
    rows, inputs = len(form.offset), form.inputs
    if rows * groups.weight.numel() > LARGEST:
        return None
    first = groups.triangle.expand(rows, -1, -1) if start is None else start[1].of_neurons(groups)
    omega = (-form.weight[:, inputs:]).clamp(min=0)
    numbers = torch.arange(rows, device=omega.device)
    buckets = groups.buckets(omega > 0, first, numbers)
    if sum(bucket.values for bucket in buckets) > MOST_WORK:
        return None
    weight, offset = _without_others(form, buckets)
    weights = [omega[bucket.rows.unsqueeze(1), bucket.members] for bucket in buckets]
    sums = [bucket.to(torch.float32).sums(own.float()) for bucket, own in zip(buckets, weights, strict=True)]
    places = [
        bucket.rows.unsqueeze(1) * inputs + groups.index[bucket.groups].gather(1, bucket.columns) for bucket in buckets
    ]
    fast, fast_offset = layer.weight.float(), layer.offset.float()
    head, lam = weight[:, :inputs].float(), weight[:, inputs:].clamp(min=0).float()
    highest: list[tuple[Tensor, Tensor]] = [(head, head)] * len(buckets)
    step = -1

    def evaluate(values: list[Tensor], last: bool) -> Evaluated:
        nonlocal step
        step += 1
        alpha, slopes = values[0], values[1:]
        whole = last or step % _EVERY == 0
        bounded = lam * alpha
        value = offset.float() + bounded @ fast_offset
        linear = torch.addmm(head, bounded, fast)
        faces = []
        for i, (bucket, place, slope) in enumerate(zip(buckets, places, slopes, strict=True)):
            linear.view(-1).index_add_(0, place.flatten(), -slope.flatten())
            if whole:
                highest[i] = sums[i].of(sums[i].highest(slope, _KEPT)[1])
            level, top = (torch.cdist(highest[i][0], slope.unsqueeze(1), p=1).squeeze(2) + highest[i][1]).max(1)
            value = value.index_add(0, bucket.rows, -level)
            faces.append((highest[i][0][torch.arange(len(top), device=top.device), top] - slope).sign())
        t = -linear.sign()
        moves = [face - t.view(-1)[place] for place, face in zip(places, faces, strict=True)]
        gradient = lam * torch.addmm(fast_offset, t, fast.t())
        return Evaluated(value - linear.abs().sum(1), [gradient, *moves], bound=whole)

    crown = (layer.upper > -layer.lower).float().expand(rows, -1).clone()
    variables = [Variable(crown if start is None else start[0].float(), ALPHA_RATE, 0.0, 1.0)]
    for bucket, own in zip(buckets, weights, strict=True):
        slope = (own.unsqueeze(2) * bucket.slopes).sum(1).float()
        size = slope.abs().mean(1, keepdim=True) * (bucket.weight != 0).any(1)
        rate = (SLOPE_RATE if start is None else RENEWAL_RATE) * size
        variables.append(Variable(slope, rate, rows=bucket.rows))
    best = ascend(
        evaluate,
        variables,
        iterations=iterations,
        rate=lambda step: 0.5 * (1 + math.cos(math.pi * step / iterations)),
        deadline=deadline,
    )
    slope, used = offset.new_zeros(rows, *groups.index.shape), torch.zeros_like(omega)
    for bucket, own, c in zip(buckets, weights, best.variables[1:], strict=True):
        slope[bucket.at], used[bucket.rows.unsqueeze(1), bucket.members] = c.double(), own
    alpha, made = best.variables[0].double(), Slopes(used, slope)
    exact = SplitBounds(form, dtype=torch.float64).with_relaxation(Envelopes(groups, made.of_neurons(groups)))
    domains = replace(Domains.roots(form, numbers, torch.float64), alpha=alpha)
    return Ascended(exact.evaluate(domains, primal=False).value, alpha, made)


def slopes_for(
    bounds: SplitBounds,
    batch: Domains,
    groups: Groups,
    start: Sequence[Slopes | None] = (),
    *,
    settings: SolverSettings,
    deadline: float = math.inf,
) -> tuple[Envelopes, list[Slopes], Domains] | None:
    """Slopes for every domain of a batch, numbered in its order, and the batch with these numbers and new α.

    They are made for the linear function of [t; v₁] that the domain's bound rests on, and hold for every other.
    ``start``: slopes of each domain's parent, to begin with; None: those of the triangles. None where groups are too
    large for so many domains.
    """
    rows = bounds.over_first_layer(batch)
    neurons = rows.neurons
    given = next((slopes for slopes in start if slopes is not None), None)
    begin, iterations = None, settings.group_iterations
    if given is not None:
        # Of weight 0 they are the triangles'.
        none = Slopes(torch.zeros_like(given.omega), torch.zeros_like(given.slope))
        own = [none if slopes is None else slopes for slopes in start]
        stacked = Slopes(torch.stack([s.omega for s in own]), torch.stack([s.slope for s in own]))
        begin, iterations = (batch.alpha[:, :neurons], stacked), settings.renewal_iterations
    found = ascend_groups(rows, groups, iterations=iterations, start=begin, deadline=deadline)
    if found is None:
        return None
    alpha = batch.alpha.clone()
    alpha[:, :neurons] = found.alpha.to(alpha)
    numbered = replace(batch, slopes=torch.arange(len(batch), device=batch.rows.device), alpha=alpha)
    # Copies: a view would keep the slopes of the whole batch in memory.
    pairs = zip(found.slopes.omega.float(), found.slopes.slope.float(), strict=True)
    kept = [Slopes(omega.clone(), slope.clone()) for omega, slope in pairs]
    return Envelopes(groups, found.slopes.of_neurons(groups)), kept, numbered


def _without_others(form: SplitForm, buckets: list[Bucket]) -> tuple[Tensor, Tensor]:
    """The rows with neurons of λ < 0 that are in no bucket replaced by their triangles, v ≤ u (z − l) / (u − l)."""
    layer, inputs = form.layers[0], form.inputs
    head, lam = form.weight[:, :inputs], form.weight[:, inputs:]
    other = lam < 0
    for bucket in buckets:
        other[bucket.rows.unsqueeze(1), bucket.members] = False
    through = lam * other * form.upper_slope
    offset = form.offset + through @ (layer.offset - layer.lower)
    return torch.cat([head + through @ layer.weight, lam * ~other], 1), offset

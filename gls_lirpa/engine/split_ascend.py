"""Slopes of groups of neurons (``split_groups``) that are good for given rows, by ascent of the rows' bounds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.engine.ascent import adam
from gls_lirpa.engine.split import Layer
from gls_lirpa.engine.split_envelopes import Envelopes, Slopes
from gls_lirpa.engine.split_groups import LARGEST, MOST_WORK, Groups
from gls_lirpa.engine.split_subsets import Bucket

SLOPE_RATE = 0.8
RENEWAL_RATE = 0.3
ALPHA_RATE = 0.05

_EVERY = 8
_KEPT = 64
"""Every so many steps all subsets are gone through; between them only so many, the highest at that time."""


@dataclass(frozen=True)
class Ascended:
    """Lower bounds of rows, and the lower slopes α (rows, neurons) and groups' slopes behind them."""

    value: Tensor
    alpha: Tensor
    slopes: Slopes


def ascend(
    layer: Layer,
    groups: Groups,
    weight: Tensor,
    offset: Tensor,
    *,
    iterations: int,
    start: tuple[Tensor, Slopes] | None = None,
    deadline: float = math.inf,
) -> Ascended | None:
    """Lower bounds of the rows ``weight`` · [t; v] + ``offset`` over one layer.

    ``start``: α and slopes of similar rows, to begin with in smaller steps; else those of the triangles.
    None where the groups are too large to go through their subsets.

    >>> a, one = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), torch.ones(2).double()
    >>> layer = Layer("z", torch.arange(2), a, 0 * one, -2 * one, 2 * one)
    >>> row = torch.tensor([[0.0, 0.0, -1.0, -1.0]]).double()  # −max(s + t, 0) − max(s − t, 0), at least −2
    >>> round(ascend(layer, Groups.of(layer), row, 0 * one[:1], iterations=100).value.item(), 2)
    -2.0
    """
    rows, inputs = weight.shape[0], layer.weight.shape[1]
    if rows * groups.weight.numel() > LARGEST:
        return None
    first = groups.triangle.expand(rows, -1, -1) if start is None else start[1].of_neurons(groups)
    omega = (-weight[:, inputs:]).clamp(min=0)
    buckets = groups.buckets(omega > 0, first, torch.arange(rows, device=weight.device))
    if sum(bucket.values for bucket in buckets) > MOST_WORK:
        return None
    weight, offset = _without_others(layer, buckets, weight, offset)
    weights = [omega[bucket.rows.unsqueeze(1), bucket.members] for bucket in buckets]
    sums = [bucket.to(torch.float32).sums(own.float()) for bucket, own in zip(buckets, weights, strict=True)]
    slopes = [(own.unsqueeze(2) * bucket.slopes).sum(1).float() for bucket, own in zip(buckets, weights, strict=True)]
    sizes = [
        slope.abs().mean(1, keepdim=True) * (bucket.weight != 0).any(1)
        for bucket, slope in zip(buckets, slopes, strict=True)
    ]
    places = [
        bucket.rows.unsqueeze(1) * inputs + groups.index[bucket.groups].gather(1, bucket.columns) for bucket in buckets
    ]
    fast, fast_offset = layer.weight.float(), layer.offset.float()
    head, lam = weight[:, :inputs].float(), weight[:, inputs:].clamp(min=0).float()
    alpha = (layer.upper > -layer.lower).float().expand(rows, -1).clone() if start is None else start[0].float()
    slope_rate = SLOPE_RATE if start is None else RENEWAL_RATE
    best = torch.full((rows,), -torch.inf, device=weight.device)
    best_alpha, best_slopes = alpha.clone(), [slope.clone() for slope in slopes]
    moments = [(torch.zeros_like(part), torch.zeros_like(part)) for part in (alpha, *slopes)]
    held: list[tuple[Tensor, Tensor]] = [(head, head)] * len(buckets)
    for step in range(iterations):
        last = step + 1 == iterations or time.monotonic() > deadline
        whole = last or step % _EVERY == 0
        bounded = lam * alpha
        value = offset.float() + bounded @ fast_offset
        linear = torch.addmm(head, bounded, fast)
        faces = []
        for i, (bucket, place, slope) in enumerate(zip(buckets, places, slopes, strict=True)):
            linear.view(-1).index_add_(0, place.flatten(), -slope.flatten())
            if whole:
                held[i] = sums[i].of(sums[i].highest(slope, _KEPT)[1])
            level, highest = (torch.cdist(held[i][0], slope.unsqueeze(1), p=1).squeeze(2) + held[i][1]).max(1)
            value = value.index_add(0, bucket.rows, -level)
            own = torch.arange(len(highest), device=highest.device)
            faces.append((held[i][0][own, highest] - slope).sign())
        value = value - linear.abs().sum(1)
        # Without all subsets the value is no bound.
        better = (value > best) & whole
        best = torch.where(better, value, best)
        best_alpha[better] = alpha[better]
        for bucket, slope, kept in zip(buckets, slopes, best_slopes, strict=True):
            chosen = better[bucket.rows]
            kept[chosen] = slope[chosen]
        if last:
            break
        rate = 0.5 * (1 + math.cos(math.pi * step / iterations))
        t = -linear.sign()
        gradient = lam * torch.addmm(fast_offset, t, fast.t())
        alpha = (alpha + ALPHA_RATE * rate * adam(gradient, *moments[0], step)).clamp_(0.0, 1.0)
        for i, (place, face) in enumerate(zip(places, faces, strict=True)):
            move = adam(face - t.view(-1)[place], *moments[i + 1], step)
            slopes[i] = slopes[i] + slope_rate * rate * sizes[i] * move
    slope, used = offset.new_zeros(rows, *groups.index.shape), torch.zeros_like(omega)
    for bucket, own, c in zip(buckets, weights, best_slopes, strict=True):
        slope[bucket.at], used[bucket.rows.unsqueeze(1), bucket.members] = c.double(), own
    return _exact(layer, groups, weight, offset, best_alpha.double(), Slopes(used, slope))


def _without_others(layer: Layer, buckets: list[Bucket], weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with neurons of λ < 0 that are in no bucket replaced by their triangles, v ≤ u (z − l) / (u − l)."""
    inputs = layer.weight.shape[1]
    other = weight[:, inputs:] < 0
    for bucket in buckets:
        other[bucket.rows.unsqueeze(1), bucket.members] = False
    through = weight[:, inputs:] * other * (layer.upper / (layer.upper - layer.lower))
    head = weight[:, :inputs] + through @ layer.weight
    return torch.cat([head, weight[:, inputs:] * ~other], 1), offset + through @ (layer.offset - layer.lower)


def _exact(layer: Layer, groups: Groups, weight: Tensor, offset: Tensor, alpha: Tensor, slopes: Slopes) -> Ascended:
    """The bounds of these α and g in float64."""
    inputs = layer.weight.shape[1]
    bounded = weight[:, inputs:].clamp(min=0) * alpha
    value = offset + bounded @ layer.offset
    linear = weight[:, :inputs] + bounded @ layer.weight
    omega = (-weight[:, inputs:]).clamp(min=0)
    envelopes = Envelopes(groups, slopes.of_neurons(groups))
    terms = envelopes.terms(omega, torch.arange(len(weight), device=weight.device))
    envelopes.subtract_slopes(linear, terms)
    value = value - terms.level.sum(1)
    return Ascended(value - linear.abs().sum(1), alpha, slopes)

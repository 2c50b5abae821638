"""Slopes of groups of neurons (``split_groups``) that are good for given rows, by ascent of the rows' bounds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gls_lirpa.engine.ascent import adam
from gls_lirpa.engine.split import Layer
from gls_lirpa.engine.split_envelopes import Envelopes
from gls_lirpa.engine.split_groups import LARGEST, Bucket, Groups, highest

SLOPE_RATE = 0.6
ALPHA_RATE = 0.05


@dataclass(frozen=True)
class Ascended:
    """Lower bounds of rows, and the lower slopes α (rows, neurons) and neurons' slopes g behind them."""

    value: Tensor
    alpha: Tensor
    slopes: Tensor


def ascend(
    layer: Layer,
    groups: Groups,
    weight: Tensor,
    offset: Tensor,
    *,
    iterations: int,
    deadline: float = math.inf,
) -> Ascended | None:
    """Lower bounds of the rows ``weight`` · [t; v] + ``offset`` over one layer, from the triangles' slopes.

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
    first = groups.triangle.expand(rows, -1, -1)
    omega = (-weight[:, inputs:]).clamp(min=0)
    buckets = groups.buckets(omega > 0, first, torch.arange(rows, device=weight.device))
    if sum(bucket.values for bucket in buckets) > LARGEST:
        return None
    weight, offset = _without_others(layer, buckets, weight, offset)
    weights = [omega[bucket.rows.unsqueeze(1), bucket.members] for bucket in buckets]
    sums = [bucket.to(torch.float32).sums(own.float()) for bucket, own in zip(buckets, weights, strict=True)]
    begun = [(own.unsqueeze(2) * bucket.slopes).sum(1) for bucket, own in zip(buckets, weights, strict=True)]
    slopes = [slope.float() for slope in begun]
    sizes = [
        slope.abs().mean(1, keepdim=True) * (bucket.weight != 0).any(1)
        for bucket, slope in zip(buckets, slopes, strict=True)
    ]
    places = [bucket.rows.unsqueeze(1) * inputs + groups.index[bucket.groups, : bucket.width] for bucket in buckets]
    fast, fast_offset = layer.weight.float(), layer.offset.float()
    head, lam = weight[:, :inputs].float(), weight[:, inputs:].clamp(min=0).float()
    alpha = (layer.upper > -layer.lower).float().expand(rows, -1).clone()
    best = torch.full((rows,), -torch.inf, device=weight.device)
    best_alpha, best_slopes = alpha.clone(), [slope.clone() for slope in slopes]
    moments = [(torch.zeros_like(part), torch.zeros_like(part)) for part in (alpha, *slopes)]
    for step in range(iterations):
        bounded = lam * alpha
        value = offset.float() + bounded @ fast_offset
        linear = torch.addmm(head, bounded, fast)
        faces = []
        for bucket, place, total, slope in zip(buckets, places, sums, slopes, strict=True):
            linear.view(-1).index_add_(0, place.flatten(), -slope.flatten())
            level, _, difference = highest(*total, slope)
            value = value.index_add(0, bucket.rows, -level)
            faces.append(difference.sign())
        value = value - linear.abs().sum(1)
        better = value > best
        best = torch.where(better, value, best)
        best_alpha[better] = alpha[better]
        for bucket, slope, kept in zip(buckets, slopes, best_slopes, strict=True):
            chosen = better[bucket.rows]
            kept[chosen] = slope[chosen]
        if step + 1 == iterations or time.monotonic() > deadline:
            break
        rate = 0.5 * (1 + math.cos(math.pi * step / iterations))
        t = -linear.sign()
        gradient = lam * torch.addmm(fast_offset, t, fast.t())
        alpha = (alpha + ALPHA_RATE * rate * adam(gradient, *moments[0], step)).clamp_(0.0, 1.0)
        for i, (place, face) in enumerate(zip(places, faces, strict=True)):
            move = adam(face - t.view(-1)[place], *moments[i + 1], step)
            slopes[i] = slopes[i] + SLOPE_RATE * rate * sizes[i] * move
    found = first.clone()
    for bucket, own, before, after in zip(buckets, weights, begun, best_slopes, strict=True):
        _share(found, bucket, own, after.double() - before)
    return _exact(layer, groups, weight, offset, best_alpha.double(), found)


def _without_others(layer: Layer, buckets: list[Bucket], weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with neurons of λ < 0 that are in no bucket replaced by their triangles, v ≤ u (z − l) / (u − l)."""
    inputs = layer.weight.shape[1]
    other = weight[:, inputs:] < 0
    for bucket in buckets:
        other[bucket.rows.unsqueeze(1), bucket.members] = False
    through = weight[:, inputs:] * other * (layer.upper / (layer.upper - layer.lower))
    head = weight[:, :inputs] + through @ layer.weight
    return torch.cat([head, weight[:, inputs:] * ~other], 1), offset + through @ (layer.offset - layer.lower)


def _share(slopes: Tensor, bucket: Bucket, omega: Tensor, change: Tensor) -> None:
    """Change the neurons' slopes as little as makes Σ ω g change by this much."""
    share = omega / (omega * omega).sum(1, keepdim=True)
    slopes[bucket.rows.unsqueeze(1), bucket.members, : bucket.width] += share.unsqueeze(2) * change.unsqueeze(1)


def _exact(layer: Layer, groups: Groups, weight: Tensor, offset: Tensor, alpha: Tensor, slopes: Tensor) -> Ascended:
    """The bounds of these α and g in float64."""
    inputs = layer.weight.shape[1]
    bounded = weight[:, inputs:].clamp(min=0) * alpha
    value = offset + bounded @ layer.offset
    linear = weight[:, :inputs] + bounded @ layer.weight
    omega = (-weight[:, inputs:]).clamp(min=0)
    envelopes = Envelopes(groups, slopes)
    terms = envelopes.terms(omega, torch.arange(len(weight), device=weight.device))
    envelopes.subtract_slopes(linear, terms)
    value = value - terms.level.sum(1)
    return Ascended(value - linear.abs().sum(1), alpha, slopes)

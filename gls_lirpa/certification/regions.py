"""The regions that samples are certified in: ℓ∞ balls of one radius or one per sample, cut at a domain."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gls_lirpa.base.balls import Ball, l2_ball
from gls_lirpa.base.boxes import Box, check_eps
from gls_lirpa.base.checks import require
from gls_lirpa.errors import ConfigError, DataError

Domain = Sequence[float | Tensor] | None
PIXELS = (0.0, 1.0)


def ball(x: Tensor, eps: float | Tensor, domain: Domain = PIXELS) -> Box:
    """ℓ∞ balls around ``x`` (n, …), cut at ``domain``.

    ``eps``: one radius, or a tensor (n,) with one per sample. ``domain``: (low, high), numbers or tensors that
    broadcast to a sample, or None for balls that are not cut. Raises ConfigError for a radius that is negative,
    not finite, or above 1 where inputs are pixels, and DataError for samples outside the domain.

    >>> box = ball(torch.tensor([[1.0, 5.0], [2.0, 4.0]]), torch.tensor([0.5, 2.0]), (0.0, 5.0))
    >>> box.lower.tolist(), box.upper.tolist()
    ([[0.5, 4.5], [0.0, 2.0]], [[1.5, 5.0], [4.0, 5.0]])
    """
    if not x.is_floating_point():
        raise DataError(f"expected floating-point inputs, got {x.dtype}")
    radius = _radius(x, eps, pixels=is_pixels(domain))
    # In float64, rounded once: to the nearest, so that every number of the dtype in the ball is in the box.
    lower, upper = ((x.double() + side).to(x.dtype) for side in (-radius, radius))
    if domain is None:
        return Box(lower, upper)
    low, high = limits(x, domain)
    inside = ((x >= low) & (x <= high)).flatten(1).all(1)  # false for a NaN
    if not bool(inside.all()):
        sample = int((~inside).nonzero()[0])
        expected = f"expected inputs in the domain {_shown(domain)}"
        raise DataError(f"{expected}, got a value outside or NaN in sample {sample}")
    return Box(torch.maximum(lower, low), torch.minimum(upper, high))


def l2_region(x: Tensor, eps: float | Tensor, domain: Domain) -> Ball:
    """ℓ2 balls of one radius around ``x``, which must lie in ``domain``; they are not cut at it."""
    if isinstance(eps, Tensor) and eps.dim():
        raise ConfigError("expected one eps for all samples with norm 'l2', got a tensor: certify them one by one")
    if domain is not None:
        ball(x, 0.0, domain)  # refuses samples outside
    return l2_ball(x, float(eps))


def is_pixels(domain: Domain) -> bool:
    """Whether a domain is [0, 1].

    >>> is_pixels((0, 1)), is_pixels((-1.0, 1.0)), is_pixels(None)
    (True, False, False)
    """
    return domain is not None and all(isinstance(end, (int, float)) for end in domain) and tuple(domain) == PIXELS


def limits(x: Tensor, domain: Sequence[float | Tensor]) -> tuple[Tensor, Tensor]:
    """Both ends of a domain in the dtype of ``x``, broadcast to it."""
    if len(domain) != 2:
        raise ConfigError(f"expected domain=(low, high) or None, got {len(domain)} values")
    try:
        low, high = (torch.as_tensor(end, dtype=x.dtype, device=x.device).expand_as(x) for end in domain)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(torch.as_tensor(end).shape)) for end in domain)
        expected = f"expected domain limits that fit inputs {tuple(x.shape[1:])}"
        raise ConfigError(f"{expected}, got shapes {shapes}") from error
    require(bool((low <= high).all()), "domain=(low, high) with low <= high", _shown(domain))
    return low, high


def _radius(x: Tensor, eps: float | Tensor, *, pixels: bool) -> Tensor:
    """Radii in float64, shaped to be subtracted from ``x``."""
    if not isinstance(eps, Tensor):
        if pixels:
            check_eps(eps)
        else:
            require(0 <= eps < math.inf, "a finite eps >= 0", eps)
        return torch.as_tensor(eps, dtype=torch.float64, device=x.device)
    if eps.dim() and eps.shape != x.shape[:1]:
        raise ConfigError(f"expected one eps per sample, ({len(x)},), got a tensor of shape {tuple(eps.shape)}")
    values = eps.detach().to(x.device, torch.float64)
    usable = torch.isfinite(values) & (values >= 0) & ((values <= 1) if pixels else True)
    if not bool(usable.all()):
        wrong = float(values[~usable].flatten()[0])
        raise ConfigError(f"expected every eps finite and >= 0{' and <= 1' if pixels else ''}, got {wrong:g}")
    return values.reshape(-1, *[1] * (x.dim() - 1)) if eps.dim() else values


def _shown(domain: Sequence[float | Tensor]) -> str:
    ends = ("a tensor" if isinstance(end, Tensor) and end.dim() else f"{float(end):g}" for end in domain)
    return f"[{', '.join(ends)}]"

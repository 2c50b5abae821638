"""ℓ2 balls as regions: boxes that know the ball they enclose.

Whoever knows nothing of balls bounds the network over the box around one, which is sound. Who looks for
counterexamples in boxes must refuse them, because a point of the box may lie outside the ball.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from gls_lirpa.base.boxes import Box, linf_box
from gls_lirpa.base.checks import require
from gls_lirpa.errors import ConfigError, DataError

NORMS = ("linf", "l2")

_ROUNDING = 1 + 2.0**-20
"""More than what rounding does to a radius in float32; that of bounds over the ball is no larger than over its box."""


@dataclass(frozen=True)
class Ball(Box):
    """All x with ‖x − middle‖₂ ≤ radius that lie in the box; one ball per sample, of one radius.

    >>> import torch
    >>> ball = l2_ball(torch.full((2, 3), 0.5), 0.1)
    >>> len(ball[:1]), ball.radius > 0.1, round(float(ball.upper[0, 0]), 6)
    (1, True, 0.6)
    """

    middle: Tensor
    radius: float

    def __getitem__(self, index: slice | Tensor) -> Ball:
        return Ball(self.lower[index], self.upper[index], self.middle[index], self.radius)

    @property
    def center(self) -> Tensor:
        return self.middle

    def map(self, function: Callable[[Tensor], Tensor]) -> Ball:
        ends = function(self.lower), function(self.upper)
        return Ball(*ends, function(self.middle), self.radius)

    def scaled(self, function: Callable[[Tensor], Tensor], factor: float) -> Ball:
        """The image under an affine map of each pixel that stretches by ``factor`` at the most."""
        return replace(self.map(function), radius=_ROUNDING * factor * self.radius)


def l2_ball(x: Tensor, eps: float, *, low: float = -math.inf, high: float = math.inf) -> Ball:
    """ℓ2 balls of radius ``eps`` around ``x`` (n, …). Bounds hold in the whole ball; the box around it, which
    other code may see, is cut at [``low``, ``high``].

    Raises ConfigError for a radius that is negative or not finite, DataError for inputs that are not floating-point.

    >>> import torch, gls_lirpa
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)), torch.rand(2, 4)
    >>> engine = gls_lirpa.BoundEngine(model, x)
    >>> engine.margins(l2_ball(x, 0.1), torch.tensor([0, 2]), gls_lirpa.get_relaxation("crown")).shape
    torch.Size([2, 2])
    """
    require(0 <= eps < math.inf, "a finite eps >= 0", eps)
    if not x.is_floating_point():
        raise DataError(f"expected floating-point inputs, got {x.dtype}")
    exact = x.double()
    lower, upper = ((exact + side).clamp(min=low, max=high).to(x.dtype) for side in (-eps, eps))
    return Ball(lower, upper, x, eps * _ROUNDING)


def region(x: Tensor, eps: float, norm: str) -> Box:
    """The ball of a norm around pixels.

    >>> import torch
    >>> type(region(torch.rand(1, 2), 0.1, "l2")).__name__
    'Ball'
    """
    return linf_box(x, eps) if norm == "linf" else l2_ball(x, eps, low=0.0, high=1.0)


def check_norm(norm: str | float) -> str:
    """A norm by its name, or by its number as auto_LiRPA has it.

    >>> check_norm(2), check_norm("linf"), check_norm(math.inf)
    ('l2', 'linf', 'linf')
    """
    name = {2.0: "l2", math.inf: "linf"}.get(norm, "") if isinstance(norm, (int, float)) else norm.lower()
    if name not in NORMS:
        raise ConfigError(f"unknown norm {norm!r}: expected one of {', '.join(NORMS)}")
    return name

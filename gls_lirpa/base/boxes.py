"""Input regions, specification matrices and what a bound call returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gls_lirpa.errors import ConfigError, DataError


@dataclass(frozen=True)
class Box:
    """All x with lower ≤ x ≤ upper, elementwise, in pixel space; one box per sample.

    >>> box = Box(torch.zeros(2, 3), torch.ones(2, 3))
    >>> len(box), box[:1].center.tolist()
    (2, [[0.5, 0.5, 0.5]])
    """

    lower: Tensor
    upper: Tensor

    def __len__(self) -> int:
        return len(self.lower)

    def __getitem__(self, index: slice | Tensor) -> Box:
        return Box(self.lower[index], self.upper[index])

    @property
    def center(self) -> Tensor:
        return (self.lower + self.upper) / 2

    def map(self, function: Callable[[Tensor], Tensor]) -> Box:
        """The box between what ``function`` makes of both ends, e.g. in another dtype."""
        return Box(function(self.lower), function(self.upper))


def check_eps(eps: float, norm: str = "linf") -> float:
    """``eps`` itself, if it is a usable radius in pixel space; an ℓ2 ball may be larger than a pixel's range."""
    if norm == "l2" and math.isfinite(eps) and eps >= 0:
        return float(eps)
    if not math.isfinite(eps) or eps < 0 or eps > 1:
        raise ConfigError(f"eps must be a number in [0, 1] (pixels are scaled to [0, 1]), got {eps}")
    return float(eps)


OUTSIDE = 1e-6
"""How far rounding may take a pixel out of its range."""


def linf_box(x: Tensor, eps: float, *, low: float = 0.0, high: float = 1.0) -> Box:
    """The ℓ∞ ball of radius ``eps`` around ``x``, intersected with the pixel range, which ``x`` must lie in:
    [``low``, ``high``].

    >>> box = linf_box(torch.tensor([[0.05, 0.5]]), 0.1)
    >>> box.lower.tolist()[0][0], round(box.upper.tolist()[0][1], 6)
    (0.0, 0.6)
    """
    eps = check_eps(eps)
    if not x.is_floating_point():
        raise DataError(f"expected floating-point pixels in [{low:g}, {high:g}], got {x.dtype}")
    if x.numel() and bool((x < low - OUTSIDE).any() | (x > high + OUTSIDE).any()):
        raise DataError(
            f"expected pixels in [{low:g}, {high:g}], got {float(x.min()):.4g}…{float(x.max()):.4g}: make Normalize "
            "the network's first layer, or pass linf_box(..., low=…, high=…) the range of other inputs"
        )
    # In float64: eps rounded to float32 may be smaller, and x − eps has digits enough to show it where they cancel.
    exact = x.double()
    return Box(*((exact + side).clamp(min=low, max=high).to(x.dtype) for side in (-eps, eps)))


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that are no class numbers of a network with so many outputs."""
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"expected one integer label per sample, got {labels.dtype} of shape {tuple(labels.shape)}")
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise DataError(
            f"labels must lie in 0…{classes - 1} for a network with {classes} outputs, "
            f"got {int(labels.min())}…{int(labels.max())}"
        )


def other_classes(labels: Tensor, classes: int) -> Tensor:
    """For every sample the classes other than its own, ascending: shape (batch, classes − 1).

    >>> other_classes(torch.tensor([0, 2]), 3).tolist()
    [[1, 2], [0, 1]]
    """
    check_labels(labels, classes)
    index = torch.arange(classes - 1, device=labels.device).expand(len(labels), classes - 1)
    return index + (index >= labels.unsqueeze(1)).long()


def margin_spec(labels: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows e_y − e_j for every j ≠ y, so that C·f(x) are the margins: (batch, classes − 1, classes).

    >>> margin_spec(torch.tensor([1]), 3).tolist()
    [[[-1.0, 1.0, 0.0], [0.0, 1.0, -1.0]]]
    """
    others = other_classes(labels, classes)
    eye = torch.eye(classes, device=labels.device, dtype=dtype)
    return eye[labels.long()].unsqueeze(1) - eye[others]


@dataclass(frozen=True)
class Bounds:
    """``lower`` bounds of the specification's rows, and of every pre-activation.

    ``intermediate`` maps the name of each ReLU's input node, in network order, to its bounds. They
    are filled by every relaxation except where a call asks for the rows alone.
    """

    lower: Tensor
    intermediate: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


CROSSED = 1e-4
"""A lower bound above its upper bound by more than this share of their size is not rounding."""


def crossed(bounds: Bounds) -> Tensor:
    """Samples with a pre-activation whose bounds are NaN or cross by more than rounding."""
    odd = torch.zeros(len(bounds.lower), dtype=torch.bool, device=bounds.lower.device)
    for lower, upper in bounds.intermediate.values():
        ordered = lower <= upper + CROSSED * (1 + upper.abs())  # false for a NaN
        odd |= ~ordered.flatten(1).all(1)
    return odd


def concatenated(parts: list[Bounds]) -> Bounds:
    """Bounds of consecutive parts of a batch as those of the batch."""
    if len(parts) == 1:
        return parts[0]
    names = parts[0].intermediate
    return Bounds(
        torch.cat([part.lower for part in parts]),
        {
            name: (
                torch.cat([part.intermediate[name][0] for part in parts]),
                torch.cat([part.intermediate[name][1] for part in parts]),
            )
            for name in names
        },
    )

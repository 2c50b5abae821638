"""How tight relaxations are on a given network: certified accuracy over the radius, and the area under it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gls_lirpa.analysis.landscape import Progress
from gls_lirpa.analysis.plain import to_plain
from gls_lirpa.attacks import worst_margin
from gls_lirpa.base.boxes import check_eps, check_labels, crossed, linf_box, margin_spec
from gls_lirpa.base.checks import require
from gls_lirpa.base.modes import evaluating
from gls_lirpa.certification.attack import pgd
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import DataError
from gls_lirpa.relaxations import Relaxation, drawn_relaxations, get_relaxation

BATCH = 256


@dataclass(frozen=True)
class Tightness:
    """Shares of all samples, in [0, 1], over ``radii``; ``samples``: how many there are.

    ``certified`` maps a relaxation to its curve and ``areas`` to the area under it. ``natural`` is the share of
    samples classified correctly. ``adversarial`` is what is left after an attack, an upper limit of every certified
    curve; it is empty where no attack was asked for.
    """

    radii: list[float]
    natural: float
    certified: dict[str, list[float]]
    areas: dict[str, float]
    adversarial: list[float]
    samples: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Tightness:
        """From the ``content`` that ``to_dict`` wrote."""
        return cls(**content)


def tightness_curves(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    radii: Sequence[float],
    relaxations: Sequence[str | Relaxation] | None = None,
    attack_steps: int = 0,
    progress: Progress | None = None,
) -> Tightness:
    """The share of samples that each relaxation certifies at each radius, in eval mode.

    ``model``: the network; ``x`` and ``y``: the samples and their classes; ``progress`` is called with the steps done
    and those in all.

    A sample counts where it is classified correctly, every margin's bound is above 0, and none of the bounds is NaN
    or crossed; at radius 0 the prediction itself decides. Each radius is bounded anew: relaxations such as CROWN are
    not monotone in the radius, so a sample lost at one may be certified at a larger one. ``attack_steps`` above 0
    adds the accuracy under PGD with so many steps. ``radii`` must increase.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x = torch.rand(5, 1, 2, 2)
    >>> found = tightness_curves(model, x, model(x).argmax(1), radii=[0.0, 0.01, 0.02], relaxations=["ibp", "crown"])
    >>> found.natural, len(found.certified["crown"])
    (1.0, 3)
    """
    radii = [check_eps(radius) for radius in radii]
    require(bool(radii) and all(a < b for a, b in itertools.pairwise(radii)), "increasing radii", radii)
    if not len(x):
        raise DataError("expected at least one sample, got none")
    named = drawn_relaxations(differentiable=True) if relaxations is None else relaxations
    chosen = [get_relaxation(relaxation) for relaxation in named]
    counts = {relaxation.name: [0] * len(radii) for relaxation in chosen}
    unbroken, natural, done = [0] * len(radii), 0, 0
    parts = list(zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True))
    total = len(parts) * len(radii) * (len(chosen) + (attack_steps > 0))
    with torch.no_grad(), evaluating(model):
        engine = BoundEngine(model, x)
        check_labels(y, engine.classes)
        for batch, labels in parts:
            right = worst_margin(model(batch), labels) > 0
            inputs, targets = batch[right], labels[right]
            natural += len(inputs)
            for i, radius in enumerate(radii):
                proven: dict[str, Tensor] = {}
                for relaxation in chosen:
                    known = proven.get(relaxation.refines or "")
                    proven[relaxation.name] = found = certified(
                        engine, inputs, targets, relaxation, eps=radius, known=known
                    )
                    counts[relaxation.name][i] += int(found.sum())
                if attack_steps > 0:
                    unbroken[i] += _unbroken(model, inputs, targets, radius, attack_steps)
                done += total // (len(parts) * len(radii))
                if progress is not None:
                    progress(done, total)
    shares = {name: [count / len(x) for count in row] for name, row in counts.items()}
    areas = {name: area_under(radii, row) for name, row in shares.items()} if len(radii) > 1 else {}
    adversarial = [count / len(x) for count in unbroken] if attack_steps > 0 else []
    return Tightness(radii, natural / len(x), shares, areas, adversarial, len(x))


def certified(
    engine: BoundEngine, x: Tensor, y: Tensor, relaxation: Relaxation, *, eps: float, known: Tensor | None = None
) -> Tensor:
    """Which of these correctly classified samples a relaxation certifies, ``known`` ones taken as they are.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> x = torch.rand(2, 1, 2, 2)
    >>> certified(BoundEngine(model, x), x, model(x).argmax(1), get_relaxation("ibp"), eps=0.0)
    tensor([True, True])
    """
    found = torch.full((len(x),), eps == 0.0, device=x.device) if known is None else known.clone()
    left = (~found).nonzero().flatten()
    if len(left):
        bounds = engine.bounds(linf_box(x[left], eps), margin_spec(y[left], engine.classes, x.dtype), relaxation)
        # A NaN fails the comparison.
        found[left] = (bounds.lower > 0).all(1) & ~crossed(bounds)
    return found


def _unbroken(model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int) -> int:
    if not len(x) or eps == 0.0:
        return len(x)
    generator = torch.Generator(x.device).manual_seed(0)
    found = pgd(model, x, y, linf_box(x, eps), steps=steps, restarts=1, generator=generator)
    return int((found.margins > 0).sum())


def area_under(radii: Sequence[float], values: Sequence[float]) -> float:
    """The area under ``values`` over ``radii`` by the trapezoid rule, divided by the range of radii: a mean value.

    >>> area_under([0.0, 0.1, 0.3], [1.0, 0.5, 0.0])
    0.4166666666666667
    """
    if len(radii) != len(values) or len(radii) < 2:
        raise DataError(f"expected as many values as radii, at least 2, got {len(values)} and {len(radii)}")
    widths = np.diff(np.asarray(radii, dtype=np.float64))
    require(bool((widths > 0).all()), "increasing radii", list(radii))
    heights = np.asarray(values, dtype=np.float64)
    return float((widths * (heights[1:] + heights[:-1]) / 2).sum() / widths.sum())

"""Projected gradient ascent inside boxes, for any forward function.

Only the gradient in the input is taken: weights, their ``.grad`` and their flags stay as they are.
Whether BatchNorm statistics move is up to the ``forward`` that is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box
from gls_lirpa.base.checks import require
from gls_lirpa.engine.convolutions import InputGradients

Forward = Callable[[Tensor], Tensor]
Objective = Callable[[Tensor, Tensor], Tensor]
Generators = torch.Generator | Sequence[torch.Generator] | None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample."""
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def worst_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """f_y − max over j ≠ y of f_j; a sample is misclassified, ties included, where this is ≤ 0.

    >>> worst_margin(torch.tensor([[3.0, 1.0, 2.5]]), torch.tensor([0])).tolist()
    [0.5]
    """
    true = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    return true - logits.scatter(1, labels.unsqueeze(1), -torch.inf).amax(1)


def violation(logits: Tensor, labels: Tensor) -> Tensor:
    """How far the strongest other class is above the true one: the objective of an attack."""
    return -worst_margin(logits, labels)


def random_points(box: Box, *, generator: Generators = None) -> Tensor:
    """A uniform point of every box.

    With one generator per sample a sample's point does not depend on the rest of the batch.

    >>> box = Box(torch.zeros(2, 3), torch.ones(2, 3))
    >>> random_points(box, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """
    lower = box.lower
    if isinstance(generator, Sequence):
        share = torch.stack([uniform(lower.shape[1:], lower, g) for g in generator])
    else:
        share = uniform(lower.shape, lower, generator)
    return project(lower + share * (box.upper - lower), box)


def uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Values in [0, 1), drawn where the generator lives, in the precision and on the device of ``like``."""
    device = like.device if generator is None else generator.device
    return torch.rand(tuple(shape), dtype=like.dtype, device=device, generator=generator).to(like.device)


def project(points: Tensor, box: Box) -> Tensor:
    """The nearest points of the boxes; lower ≤ result ≤ upper holds exactly."""
    return torch.minimum(torch.maximum(points, box.lower), box.upper)


def input_gradient(forward: Forward, points: Tensor, labels: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """(objective, its gradient in the input) of each sample; the samples must not interact."""
    with torch.enable_grad(), InputGradients():
        leaf = points.detach().requires_grad_()
        value = objective(forward(leaf), labels)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def ascend(
    forward: Forward,
    points: Tensor,
    labels: Tensor,
    box: Box,
    *,
    sizes: Sequence[float],
    objective: Objective,
    watch: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Projected gradient ascent: one signed step per size, in units of each pixel's box radius.

    ``labels`` is whatever the objective needs of each sample, one row each. ``watch(points, values)`` sees where the
    ascent is before every step and says which of these samples go on; the others leave the batch.

    >>> box = Box(torch.zeros(1, 2), torch.ones(1, 2))
    >>> ascend(lambda x: x, box.center, torch.zeros(1), box, sizes=[1.0], objective=lambda x, _: x.sum(1)).tolist()
    [[1.0, 1.0]]
    """
    for size in sizes:
        value, gradient = input_gradient(forward, points, labels, objective)
        if watch is not None:
            going = watch(points, value)
            points, gradient, labels, box = points[going], gradient[going], labels[going], box[going]
            if not len(points):
                break
        points = project(points + size * (box.upper - box.lower) / 2 * gradient.sign(), box)
    return points


def check_attack(*, steps: int, restarts: int, step: float) -> None:
    """Raise if an attack cannot be run with these settings."""
    both = f"steps={steps}, restarts={restarts}"
    require(steps >= 1 and restarts >= 1, "steps >= 1 and restarts >= 1", both)
    require(0 < step < math.inf, "a step > 0 in units of the box radius", step)


def pgd_points(
    forward: Forward,
    x: Tensor,
    labels: Tensor,
    box: Box,
    *,
    steps: int,
    restarts: int = 1,
    step: float | None = None,
    generator: Generators = None,
    random_start: bool = True,
    objective: Objective = cross_entropy,
) -> Tensor:
    """Points of the boxes at which ``objective(forward(x), labels)`` is large, for adversarial training.

    ``step`` is in units of each pixel's box radius, so it fits any box; the default 2.5 / steps lets
    an attack cross the box and still turn back.
    The first start is ``x`` unless ``random_start``, all others are uniform in the box. With several
    restarts the best final point of each sample is kept. The result carries no graph.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
    >>> box = Box((x - 0.1).clamp(min=0), (x + 0.1).clamp(max=1))
    >>> points = pgd_points(model, x, y, box, steps=3)
    >>> bool((points >= box.lower).all() and (points <= box.upper).all())
    True
    """
    step = 2.5 / max(steps, 1) if step is None else step
    check_attack(steps=steps, restarts=restarts, step=step)
    best, best_value = x, torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
    for restart in range(restarts):
        start = random_points(box, generator=generator) if random_start or restart else project(x.detach(), box)
        points = ascend(forward, start, labels, box, sizes=[step] * steps, objective=objective)
        if restarts == 1:
            return points
        with torch.no_grad():
            value = objective(forward(points), labels)
        better = value > best_value
        best = torch.where(better.reshape(-1, *[1] * (x.dim() - 1)), points, best)
        best_value = torch.where(better, value, best_value)
    return project(best.detach(), box)

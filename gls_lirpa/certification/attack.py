"""Projected gradient descent on a network's margin: the search for counterexamples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gls_lirpa.attacks import Generators, ascend, check_attack, project, random_points, violation
from gls_lirpa.base.boxes import Box, other_classes
from gls_lirpa.base.modes import evaluating
from gls_lirpa.base.seeds import sample_generators
from gls_lirpa.certification.stage import STAGES, Findings, OpenSamples, StageOptions, Subject

ATTACK_BATCH = 256
"""Samples attacked at once: enough for full use of a CPU, some 0.5 GiB of activations on a cnn7."""


FIRST_STEP = 2.0
"""The first step crosses the whole box. On a PGD-trained cnn3 (MNIST, eps 0.15, 500 images, 20 steps
from x) this broke 237 samples, a constant step of 2.5 / steps 120, and one of 0.5 189."""


@dataclass(frozen=True)
class Attacked:
    """The worst ``points`` found, one per box, with ``margins`` f_y − max over j ≠ y of f_j (≤ 0: broken)."""

    points: Tensor
    margins: Tensor


def pgd(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    box: Box,
    *,
    steps: int = 40,
    restarts: int = 5,
    step_size: float = FIRST_STEP,
    generator: Generators = None,
    targeted: bool = False,
) -> Attacked:
    """Attack every sample inside its ``box`` and stop working on it once it is broken.

    ``labels``: those of ``x``; ``steps``: of each of the ``restarts``; ``generator``: of the random starts, one for
    all samples or one for each. The first start is ``x``, the others are uniform in the box. Steps shrink linearly from
    ``step_size``, in units of each pixel's box radius, to zero. Untargeted restarts raise whichever other class is
    strongest; with ``targeted`` restart r raises the r-th strongest class at ``x``. The model is
    evaluated in eval mode, and its flags, gradients and BatchNorm statistics are left alone.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    >>> result = pgd(model, x, y, Box(x - 0.1, x + 0.1), generator=torch.Generator().manual_seed(0))
    >>> result.points.shape, result.margins.shape
    (torch.Size([2, 1, 2, 2]), torch.Size([2]))
    """
    check_attack(steps=steps, restarts=restarts, step=step_size)
    with evaluating(model):
        return _pgd(model, project(x.detach(), box), labels, box, steps, restarts, step_size, generator, targeted)


def _pgd(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    box: Box,
    steps: int,
    restarts: int,
    size: float,
    generator: Generators,
    targeted: bool,
) -> Attacked:
    with torch.no_grad():
        logits = model(x)
    best, worst = x.clone(), -violation(logits, labels)
    rivals = _rivals(logits, labels)
    for restart in range(restarts):
        # `not worst <= 0` keeps samples whose margin is NaN in the race; they can never be broken.
        active = (~(worst <= 0)).nonzero().squeeze(1)
        if len(active) == 0:
            break
        inside = box[active]
        chosen = [generator[i] for i in active.tolist()] if isinstance(generator, Sequence) else generator
        points = x[active] if restart == 0 else random_points(inside, generator=chosen)
        goal = rivals[active, restart % rivals.shape[1]] if targeted else None
        found, margins = _descend(model, points, labels[active], inside, goal, steps=steps, size=size)
        better = margins < worst[active]
        worst[active[better]] = margins[better]
        best[active[better]] = found[better]
    return Attacked(best, worst)


def _rivals(logits: Tensor, labels: Tensor) -> Tensor:
    """The other classes of each sample, the strongest first."""
    others = other_classes(labels, logits.shape[1])
    return others.gather(1, logits.gather(1, others).argsort(1, descending=True))


def _descend(
    model: nn.Module, points: Tensor, labels: Tensor, box: Box, goal: Tensor | None, *, steps: int, size: float
) -> tuple[Tensor, Tensor]:
    """The worst point on the way of each sample, and its margin. Broken samples leave the batch."""
    best, worst = points.clone(), torch.full_like(points.flatten(1)[:, 0], torch.inf)
    active = torch.arange(len(points), device=points.device)
    margins = torch.empty(0)

    def objective(logits: Tensor, wanted: Tensor) -> Tensor:
        """Towards the strongest other class, or towards the goal; the margin is noted in both cases."""
        nonlocal margins
        untargeted = violation(logits, wanted[:, 0])
        margins = -untargeted.detach()
        return untargeted if goal is None else logits.gather(1, wanted[:, 1:]).squeeze(1) - _true(logits, wanted)

    def watch(points: Tensor, _: Tensor) -> Tensor:
        nonlocal active
        better = margins < worst[active]
        worst[active[better]] = margins[better]
        best[active[better]] = points[better]
        going = ~(margins <= 0)
        active = active[going]
        return going

    wanted = torch.stack([labels] if goal is None else [labels, goal], 1)
    sizes = [size * (1 - step / steps) for step in range(steps)]
    last = ascend(model, points, wanted, box, sizes=sizes, objective=objective, watch=watch)
    if len(last):
        with torch.no_grad():
            objective(model(last), wanted[active])
        watch(last, margins)
    return best, worst


def _true(logits: Tensor, wanted: Tensor) -> Tensor:
    return logits.gather(1, wanted[:, :1]).squeeze(1)


class AttackStage:
    """PGD as a stage. A sample's random starts follow from the seed and its index alone."""

    attacks = True

    def __init__(self, options: StageOptions) -> None:
        self.name = "pgd"
        self.batch = ATTACK_BATCH
        check_attack(steps=options.attack_steps, restarts=options.attack_restarts, step=FIRST_STEP)
        self._options = options

    def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
        del timeout  # the work per sample is bounded by steps × restarts
        result = pgd(
            subject.model,
            samples.x,
            samples.labels,
            samples.box,
            steps=self._options.attack_steps,
            restarts=self._options.attack_restarts,
            generator=sample_generators(subject.seed, samples.indices),
        )
        broken = (result.margins <= 0).tolist()
        points = [point if hit else None for point, hit in zip(result.points, broken, strict=True)]
        return Findings(torch.full_like(samples.lower, -torch.inf), points, [False] * len(samples))


STAGES.register("pgd", AttackStage, aliases=("attack",))

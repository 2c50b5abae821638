"""TAPS and STAPS: bounds through the first block, attacks through the second (Mao et al. 2023).

The network is cut behind a ReLU, f = f₂ ∘ f₁. Bounds give a box [l, u] of f₁ over the input box (for
STAPS over SABR's small box). In it, PGD through f₂ looks for the smallest margin of each class,

    z_j ≈ argmin over z ∈ [l, u] of f₂(z)_y − f₂(z)_j,    m_j = f₂(z_j)_y − f₂(z_j)_j,

one attack per class (``multi``, in all published recipes, TinyImageNet's 200 classes included), or one
point of large cross-entropy for all (``multi=False``). m_j underestimates the worst case over [l, u], which
itself overestimates that over the input box. If f₂ is affine a converged attack is exact, and m_j are
IBP's margins.

z_j is connected to l and u as ``connector`` says. Per sample the loss is L_T · L_I, the cross-entropy over m_j times
that over the relaxation's own margins on the same input box. PGPE sees the product alone: the scale s and the threshold
c only shape backpropagated gradients. The authors' code takes the product of the two batch means, and weights s : 1.
Here it is taken per sample, so that splitting a batch changes nothing; 2a : 2(1 − a) is the same ratio, 2/(1 + s) times
their gradient. Like theirs, it is L_I alone while ε grows (``bounds_first``), which is also many times cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from gls_lirpa.attacks import Forward, pgd_points
from gls_lirpa.base.boxes import Bounds, Box
from gls_lirpa.base.options import Option, Options
from gls_lirpa.base.seeds import drawn_seeds
from gls_lirpa.engine.batchnorm import Statistics, applied_statistics
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.relaxation import SampleFunction
from gls_lirpa.errors import ConfigError
from gls_lirpa.losses.connector import connect, product
from gls_lirpa.losses.published import Training
from gls_lirpa.losses.refusal import with_gradient_or_refusal
from gls_lirpa.losses.sabr import LAM, SHRINKAGE, relu_box, shrinking, small_box
from gls_lirpa.losses.terms import LOSSES, STEPS, Loss, LossInput, margin_cross_entropy
from gls_lirpa.models.structure import split_blocks
from gls_lirpa.relaxations import Relaxation


def second_block(model: nn.Module, relus: int) -> nn.Sequential:
    """The layers behind the cut that leaves ``relus`` ReLUs to the second block.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> len(second_block(net, 1))
    2
    """
    own = getattr(model, "blocks", None)
    blocks = list(own()) if callable(own) and not isinstance(own, nn.Module) else split_blocks(model)
    behind = [i for i in range(1, len(blocks)) if _ends_in_relu(blocks[i - 1])]
    cuts = {sum(_count_relus(block) for block in blocks[i:]): i for i in behind}
    if relus not in cuts:
        allowed = " or ".join(str(count) for count in sorted(cuts)) or "none, it has no ReLU to cut behind"
        raise ConfigError(f"TAPS cannot cut this network with relus={relus} in the second block: possible is {allowed}")
    return nn.Sequential(*blocks[cuts[relus] :])


def _count_relus(module: nn.Module) -> int:
    return sum(isinstance(layer, nn.ReLU) for _, layer in module.named_modules(remove_duplicate=False))


def _ends_in_relu(block: nn.Module) -> bool:
    return isinstance(block, nn.Sequential) and len(block) > 0 and isinstance(block[-1], nn.ReLU)


@dataclass(frozen=True)
class LatentAttack:
    """Where the network is cut, and how its second block is attacked."""

    relus: int
    threshold: float
    steps: int
    restarts: int
    multi: bool
    shrinkage: float
    seed: int

    def margins(self, forward: Forward, latent: Box, spec: Tensor) -> Tensor:
        """The smallest margins found in the latent boxes, connected to their faces."""
        copies = spec.shape[1] if self.multi else 1
        # One row of the specification per attacked point, or all rows at one point.
        rows = spec.flatten(0, 1).unsqueeze(1) if self.multi else spec
        boxes = Box(latent.lower.repeat_interleave(copies, 0), latent.upper.repeat_interleave(copies, 0))
        fixed = Box(boxes.lower.detach(), boxes.upper.detach())

        def margins(z: Tensor) -> Tensor:
            return (rows @ forward(z).unsqueeze(-1)).squeeze(-1)

        def objective(values: Tensor, _: Tensor) -> Tensor:
            return -values.squeeze(1) if self.multi else margin_cross_entropy(values)

        points = pgd_points(
            margins,
            fixed.center,
            torch.empty(0),
            fixed,
            steps=self.steps,
            restarts=self.restarts,
            # Every chunk starts from the same seed: measuring the memory of one must change nothing.
            generator=torch.Generator().manual_seed(self.seed),
            objective=objective,
        )
        # The authors leave the single point unconnected, so that f₁ sees IBP's gradient alone; here both are connected.
        return margins(connect(points, boxes, threshold=self.threshold)).reshape(spec.shape[:2])

    def latent_box(self, bounds: Bounds, model: nn.Module) -> Box:
        """The box behind the cut, from the bounds of the ReLU in front of it."""
        layers, relus = _count_relus(model), list(bounds.intermediate.values())
        if layers != len(relus):
            raise ConfigError(
                f"TAPS cannot cut this network: its graph has {len(relus)} ReLUs, its layers show {layers}; "
                "use an nn.Sequential with one nn.ReLU layer per use"
            )
        return relu_box(*relus[len(relus) - self.relus - 1], self.shrinkage)


def attacked_margins(relaxation: Relaxation, attack: LatentAttack) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function of (engine, box, spec, statistics): the attack's margins and those of the relaxation."""
    inner = shrinking(relaxation, attack.shrinkage)

    def margins(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
        tail = second_block(engine.model, attack.relus)
        bounds = inner.bound(engine, box, spec, statistics)

        def forward(z: Tensor) -> Tensor:
            with applied_statistics(engine.core, statistics):
                logits: Tensor = tail(z)
            return logits

        return attack.margins(forward, attack.latent_box(bounds, engine.model), spec), bounds.lower

    return margins


def product_loss(relaxation: Relaxation, attack: LatentAttack, *, scale: float) -> SampleFunction:
    """TAPS's loss of each sample, for the engine's chunking by memory."""
    margins = attacked_margins(relaxation, attack)

    def compute(engine: BoundEngine, box: Box, spec: Tensor, statistics: Statistics) -> Tensor:
        estimate, bounded = margins(engine, box, spec, statistics)
        return product(margin_cross_entropy(estimate), margin_cross_entropy(bounded), scale=scale)

    kind = "multi" if attack.multi else "single"
    return SampleFunction(
        f"{relaxation.name}-attacked-{kind}", compute, differentiable=relaxation.differentiable, light=relaxation.light
    )


def staps(
    batch: LossInput,
    *,
    relus: int,
    scale: float,
    threshold: float,
    latent_steps: int,
    restarts: int,
    multi: bool,
    bounds_first: bool,
    lam: float,
    steps: int,
    shrinkage: float,
) -> Tensor:
    """TAPS over SABR's small box, with ReLU shrinkage in the bounded part."""
    box = small_box(batch, lam=lam, steps=steps)
    attack = LatentAttack(
        relus=relus,
        threshold=threshold,
        steps=latent_steps,
        restarts=restarts,
        multi=multi,
        shrinkage=shrinkage,
        seed=drawn_seeds(1, batch.generator)[0],
    )
    if bounds_first and batch.growing:
        second_block(batch.engine.model, relus)  # says at the first step what would fail once ε has grown
        loss = batch.engine.mean_loss(
            box, batch.y, shrinking(batch.relaxation, shrinkage), margin_cross_entropy, statistics=batch.statistics
        )
    else:
        function = product_loss(batch.relaxation, attack, scale=scale)
        loss = batch.engine.mean(box, batch.y, function, statistics=batch.statistics)
    return with_gradient_or_refusal(batch, loss)


# Steps and restarts are the authors', 20 in the latent box and 10 for STAPS's point, as is the threshold. Where TAPS
# cuts depends on the network: CTBench's numbers of ReLUs are for CNN7 alone.
_OPTIONS = (
    Option("relus", int, "ReLUs behind the cut", default=1),
    Option("scale", float, "weight of TAPS's gradient against that of the bounds", default=4.0),
    Option("threshold", float, "of the gradient connector", default=0.5, least=1e-6, most=1.0),
    Option("latent_steps", int, "steps of the attack behind the cut", default=20, least=1),
    Option("restarts", int, "of that attack", default=1, least=1),
    Option("multi", bool, "one attack per class, or one for all", default=True),
    Option("bounds_first", bool, "bounds alone while eps grows", default=True),
)
# Scales, λ and shrinkage are CTBench's (Mao et al. 2025); shrinkage at 2/255 alone.
# Over the whole box (λ = 1) there is no point to look for: TAPS.
LOSSES.register(
    "taps",
    Loss(
        "taps",
        partial(staps, lam=1.0, steps=1),
        bounds=True,
        options=Options(*_OPTIONS, SHRINKAGE),
        relaxation="ibp",
        help="bounds through the first layers, attacks through the rest",
        published={
            ("mnist", 0.1): {"scale": 4.0, "shrinkage": 1.0},
            ("mnist", 0.3): {"scale": 4.0, "shrinkage": 1.0},
            ("cifar10", 2 / 255): {"scale": 4.0, "shrinkage": 0.8},
            ("cifar10", 8 / 255): {"scale": 2.0, "shrinkage": 1.0},
            ("tinyimagenet", 1 / 255): {"scale": 8.0, "shrinkage": 1.0},
        },
        training={
            ("mnist", 0.1): Training(2e-6, 0.7, 2.0, of_cnn7={"relus": 3}),
            ("mnist", 0.3): Training(0.0, 1.0, 4 / 3, of_cnn7={"relus": 2}),
            ("cifar10", 2 / 255): Training(2e-6, of_cnn7={"relus": 5}),
            ("cifar10", 8 / 255): Training(of_cnn7={"relus": 1}),
            ("tinyimagenet", 1 / 255): Training(5e-5, 0.7, of_cnn7={"relus": 1}),
        },
    ),
)
LOSSES.register(
    "staps",
    Loss(
        "staps",
        staps,
        bounds=True,
        options=Options(*_OPTIONS, LAM, replace(STEPS, default=10), SHRINKAGE),
        relaxation="ibp",
        help="TAPS over SABR's small box",
        published={
            ("mnist", 0.1): {"scale": 4.0, "lam": 0.4, "shrinkage": 1.0},
            ("mnist", 0.3): {"scale": 4.0, "lam": 0.6, "shrinkage": 1.0},
            ("cifar10", 2 / 255): {"scale": 2.0, "lam": 0.1, "shrinkage": 0.8},
            ("cifar10", 8 / 255): {"scale": 2.0, "lam": 0.9, "shrinkage": 1.0},
            ("tinyimagenet", 1 / 255): {"scale": 4.0, "lam": 0.6, "shrinkage": 1.0},
        },
        training={
            ("mnist", 0.1): Training(5e-6, 0.7, 2.0),
            ("mnist", 0.3): Training(1e-5),
            ("cifar10", 2 / 255): Training(1e-6),
            ("cifar10", 8 / 255): Training(),
            ("tinyimagenet", 1 / 255): Training(5e-5),
        },
    ),
)

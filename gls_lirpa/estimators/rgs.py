"""RGS: randomized gradient smoothing, the mean gradient of a few perturbed networks."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.checks import number, whole
from gls_lirpa.base.options import Option, Options, Range
from gls_lirpa.errors import GLSError
from gls_lirpa.estimators.methods import ESTIMATORS, SIGMA_RANGE, EstimatorMethod
from gls_lirpa.estimators.pool import Factory, in_shards
from gls_lirpa.estimators.protocol import State
from gls_lirpa.estimators.weights import Params
from gls_lirpa.estimators.worker import Loss, Member, batch_size
from gls_lirpa.estimators.wrapped import Pooled


class RGS(Pooled):
    """(1/n) Σ ∇L(θ + ε_i), ε_i ~ N(0, σ²I).

    Its mean is the gradient of the smoothed loss wherever L is continuous; jumps contribute nothing
    (PGPE sees them). ``antithetic`` uses ±ε. ``split`` cuts the batch into ``samples`` parts and shows
    each to its own perturbation, weighted by its size: the same mean for losses that average over
    samples, at the price of plain backpropagation. ``relative`` gives every layer its own σ: ``sigma`` times the
    root mean square of its kernel as it is now, whose own gradient is not taken.

    ``loss``: any callable; ``model``: the module whose parameters, or those in ``params`` (names or tensors), move.
    ``seed``: of the noise. ``actors``: Ray processes that share the work, 0 for none; ``factory``: what they make their
    own (model, loss) with, where the loss has none; ``ray_address``: a cluster that runs already; ``gpus_per_actor``:
    GPUs each of them is given. A call's ``generator`` decides what is random in the loss, not the noise.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = net.weight.data.fill_(1.0)
    >>> criterion = RGS(lambda: net.weight.square().sum(), net, sigma=0.1, antithetic=True)
    >>> criterion().backward()
    >>> net.weight.grad
    tensor([[2.]])
    """

    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        *,
        sigma: float,
        samples: int = 2,
        split: bool = False,
        relative: bool = False,
        antithetic: bool = False,
        actors: int = 0,
        params: Params = None,
        seed: int = 0,
        factory: Factory | None = None,
        ray_address: str | None = None,
        gpus_per_actor: float = 0,
    ) -> None:
        self.samples = whole("samples", samples, least=2 if antithetic else 1, even=antithetic)
        self.split = bool(split)
        self.relative = bool(relative)
        self.antithetic = bool(antithetic)
        self.set_sigma(sigma)
        super().__init__(
            loss,
            model,
            params=params,
            seed=seed,
            actors=actors,
            factory=factory,
            ray_address=ray_address,
            gpus_per_actor=gpus_per_actor,
        )

    def set_sigma(self, value: float) -> None:
        """``value`` is the standard deviation of the next estimates; 0 is plain backpropagation."""
        self.sigma = number("sigma", value, inclusive=True)

    def state_dict(self) -> State:
        return {**super().state_dict(), "sigma": self.sigma}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.set_sigma(float(state["sigma"]))

    def __call__(self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
        members = self._members(args)
        sigma = self.sigma * self.weights.layer_scales() if self.relative else self.sigma
        task = self._task(args, kwargs, generator, sigma)
        if self._watch_batchnorm(task) and self.split:
            raise GLSError(
                "split=True would change BatchNorm's batch statistics: use split=False, or put BatchNorm in eval mode"
            )
        gradient = torch.zeros_like(task.theta)
        losses: list[float] = []
        for values, total in self._pool.map("gradient_sum", task, [(b,) for b in in_shards(members)]):
            losses.extend(values)
            gradient.add_(total)
        value = sum(m.weight * loss for m, loss in zip(members, losses, strict=True))
        self.stats = {
            "loss": value,
            "spread": statistics.stdev(losses) if len(losses) > 1 else 0.0,
            "sigma": float(torch.as_tensor(sigma).mean()),
            "evaluations": float(len(losses)),
        }
        return self._deliver(value, gradient) if task.gradients else self._scalar(value)

    def _members(self, args: tuple[Any, ...]) -> list[Member]:
        seeds = self._seeds(self.samples // 2 if self.antithetic else self.samples)
        signed = [(s, sign) for s in seeds for sign in ((1.0, -1.0) if self.antithetic else (1.0,))]
        if not self.split:
            return [Member(seed, sign, 1.0 / len(signed)) for seed, sign in signed]
        rows = batch_size(args)
        bounds = [rows * i // len(signed) for i in range(len(signed) + 1)]
        parts = zip(signed, bounds, bounds[1:], strict=False)
        # A batch smaller than the number of parts leaves some of them empty.
        return [Member(seed, sign, (b - a) / rows, (a, b)) for (seed, sign), a, b in parts if b > a]


ESTIMATORS.register(
    "rgs",
    EstimatorMethod(
        "rgs",
        RGS,
        help="mean gradient of a few perturbed networks",
        options=Options(
            Option(
                *("sigma", float, "standard deviation of the smoothing"),
                search=SIGMA_RANGE,
                search_if={"relative": Range(1e-3, 3e-1, log=True)},
            ),
            Option("samples", int, "perturbed networks per step", default=2, least=1),
            Option("split", bool, "each part of the batch sees its own perturbation", default=False),
            Option("relative", bool, "sigma in units of each layer's weights", default=False),
            Option("antithetic", bool, "perturbations come in pairs of opposite sign", default=False),
        ),
        recipe={"sigma": 1e-3, "samples": 2},
        uses_actors=True,
        decays="sigma",
    ),
)

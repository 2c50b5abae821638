"""SAM: the gradient at the worst nearby point, for comparison with smoothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.checks import number
from gls_lirpa.base.options import Option, Options, Range
from gls_lirpa.estimators.methods import ESTIMATORS, EstimatorMethod
from gls_lirpa.estimators.weights import Params
from gls_lirpa.estimators.worker import Loss
from gls_lirpa.estimators.wrapped import Wrapped


class SAM(Wrapped):
    """Sharpness-aware minimisation: ∇L(θ + ρ·g/‖g‖) with g = ∇L(θ), ‖·‖ over all chosen parameters.

    The returned value is L(θ). It takes a maximum nearby, not a mean, so it does not remove jumps. ``rho`` is ρ.

    ``loss``: any callable; ``model``: the module whose parameters, or those in ``params`` (names or tensors), move.
    ``seed``: of what is random in the loss, where a call is given no ``generator`` for it.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = net.weight.data.fill_(1.0)
    >>> SAM(lambda: net.weight.square().sum(), net, rho=0.5)().backward()
    >>> net.weight.grad
    tensor([[3.]])
    """

    def __init__(self, loss: Loss, model: nn.Module, *, rho: float, params: Params = None, seed: int = 0) -> None:
        super().__init__(loss, model, params=params, seed=seed)
        self.rho = number("rho", rho)

    def __call__(self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
        task = self._task(args, kwargs, generator)
        self._watch_batchnorm(task)
        first, second = torch.zeros_like(task.theta), torch.zeros_like(task.theta)
        worst = float("nan")
        with self._worker.borrowed(task) as scene:
            value = self._worker.gradient(task, scene, task.theta, first)
            if task.gradients:
                norm = float(first.norm())
                # At a stationary point there is no direction of ascent: stay there.
                point = task.theta if norm == 0.0 else torch.add(task.theta, first, alpha=self.rho / norm)
                worst = self._worker.gradient(task, scene, point, second)
        self.stats = {"loss": value, "spread": 0.0, "sigma": 0.0, "evaluations": 1.0 + task.gradients}
        if not task.gradients:
            return self._scalar(value)
        self.stats["sharpness"] = worst - value
        return self._deliver(value, second)


ESTIMATORS.register(
    "sam",
    EstimatorMethod(
        "sam",
        SAM,
        help="gradient at the worst nearby point",
        options=Options(
            Option("rho", float, "radius of the ascent step", strict=True, search=Range(1e-3, 1e-1, log=True))
        ),
        recipe={"rho": 0.01},
    ),
)

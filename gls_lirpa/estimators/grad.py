"""GRAD: the loss as it is, with an estimator's interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.estimators.methods import ESTIMATORS, EstimatorMethod
from gls_lirpa.estimators.protocol import Base
from gls_lirpa.estimators.worker import Loss, takes_generator


class GRAD(Base):
    """Plain backpropagation: the identity among estimators.

    ``loss``: any callable; ``model`` is taken, as by the other estimators, and not needed. A call's
    ``generator`` goes to the loss, if it takes one.

    >>> w = torch.ones(1, requires_grad=True)
    >>> GRAD(lambda x: (w * x).sum())(torch.tensor([3.0])).backward()
    >>> w.grad
    tensor([3.])
    """

    def __init__(self, loss: Loss, model: nn.Module | None = None) -> None:
        self.loss = loss
        self.model = model
        self.stats: dict[str, float] = {}
        self._takes_generator = takes_generator(loss)

    def __call__(self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
        if generator is not None and self._takes_generator:
            kwargs["generator"] = generator
        value: Tensor = self.loss(*args, **kwargs)
        self.stats = {"loss": float(value.detach()), "spread": 0.0, "sigma": 0.0, "evaluations": 1.0}
        return value


ESTIMATORS.register("grad", EstimatorMethod("grad", GRAD, help="plain backpropagation"))

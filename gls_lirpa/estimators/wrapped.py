"""What the estimators that move weights have in common: seeds, tasks, the BatchNorm warning, delivery."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.checks import whole
from gls_lirpa.base.seeds import drawn_seeds
from gls_lirpa.errors import GLSError
from gls_lirpa.estimators.batchnorm import uses_batch_statistics
from gls_lirpa.estimators.pool import Factory, Pool, make_pool
from gls_lirpa.estimators.protocol import Base, State, deliver, read
from gls_lirpa.estimators.weights import Params, Weights
from gls_lirpa.estimators.worker import Loss, Task, Worker


class Wrapped(Base):
    """A loss over a model's weights, and a private seeded generator."""

    def __init__(self, loss: Loss, model: nn.Module, *, params: Params, seed: int) -> None:
        if not callable(loss):
            raise GLSError(f"expected a callable loss, got {type(loss).__name__}")
        self.loss = loss
        self.model = model
        self.weights = Weights(model, params)
        self.stats: dict[str, float] = {}
        self._worker = Worker(model, loss, self.weights)
        self._generator = torch.Generator().manual_seed(whole("seed", seed, least=0))
        self._warned = False

    def state_dict(self) -> State:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        generator = read(state, self.state_dict())["generator"]
        self._generator.set_state(torch.as_tensor(generator).cpu())

    def _seeds(self, count: int) -> list[int]:
        return drawn_seeds(count, self._generator)

    def _task(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generator: torch.Generator | None,
        sigma: Tensor | float = 0.0,
    ) -> Task:
        """The estimate about to be made. A generator given by the caller decides what is random in the loss."""
        gradients = torch.is_grad_enabled()
        if gradients and not any(p.requires_grad for p in self.weights.tensors):
            # Bounds computed in eval mode switch every weight off; nobody means to train nothing.
            for p in self.weights.tensors:
                p.requires_grad_(True)
        source = self._generator if generator is None else generator
        (common,) = drawn_seeds(1, source)
        return Task(self.weights.flat(), args, kwargs, common, sigma, str(source.device), gradients)

    def _deliver(self, value: float, gradient: Tensor, *others: tuple[Tensor, Tensor]) -> Tensor:
        """The value, whose backward() adds the flat gradient to the weights and others to their leaves."""
        leaves = [*self.weights.tensors, *(leaf for leaf, _ in others)]
        gradients = [*self.weights.views(gradient), *(g for _, g in others)]
        return deliver(self._scalar(value), leaves, gradients)

    def _scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.weights.dtype, device=self.weights.device)

    def _watch_batchnorm(self, task: Task) -> bool:
        """Whether the loss depends on the composition of the batch; warns once about running statistics."""
        batchnorm = uses_batch_statistics(self._worker.roots(task))
        if batchnorm and not self._warned:
            self._warned = True
            warnings.warn(
                "BatchNorm in train mode: estimating does not move its running statistics; "
                "call reset_batchnorm(model, loader) before evaluating",
                stacklevel=3,
            )
        return batchnorm


class Pooled(Wrapped):
    """An estimator whose members can be evaluated on actors."""

    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        *,
        params: Params,
        seed: int,
        actors: int,
        factory: Factory | None,
        ray_address: str | None,
        gpus_per_actor: float,
    ) -> None:
        super().__init__(loss, model, params=params, seed=seed)
        self._pool: Pool = make_pool(
            self._worker,
            actors=whole("actors", actors, least=0),
            factory=factory,
            ray_address=ray_address,
            gpus_per_actor=gpus_per_actor,
        )

    def close(self) -> None:
        """Stop the actors, and Ray if it was started for them."""
        self._pool.close()

"""What every estimator offers, and how an estimate reaches the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from gls_lirpa.base.autograd import scalar_with_gradient
from gls_lirpa.errors import CheckpointError

Self = TypeVar("Self", bound="Base")
State = dict[str, Tensor | float | int]


@runtime_checkable
class Estimator(Protocol):
    """A loss around a loss: called like it, returning a scalar whose ``backward()`` adds the estimate.

    ``stats`` describes the latest call: ``loss`` (the returned value), ``spread`` (standard deviation over
    the perturbed networks), ``sigma`` (its mean) and ``evaluations`` (of the wrapped loss). A call's ``generator``
    decides what is random in the loss.

    ``set_sigma`` takes the ``value`` of a schedule. ``step`` is for what moves once per optimizer step (PGPE's σ);
    torch's optimizers trigger it by themselves. ``state_dict`` holds tensors and numbers only, and ``load_state_dict``
    continues from such a ``state``. ``close`` stops actors; the next call would start them again.
    """

    stats: dict[str, float]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def set_sigma(self, value: float) -> None: ...

    def step(self) -> None: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...

    def close(self) -> None: ...


class Base:
    """The parts of the protocol that do nothing in the simplest estimators."""

    stats: dict[str, float]

    def set_sigma(self, value: float) -> None:
        """Nothing: this estimator has no σ."""

    def step(self) -> None:
        """Nothing: this estimator has nothing that moves with the optimizer."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        read(state, self.state_dict())

    def close(self) -> None:
        """Nothing: this estimator holds nothing that must be released."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(state: State, expected: State) -> State:
    """The state, once its keys and shapes are what this estimator writes."""
    if set(state) != set(expected):
        raise CheckpointError(
            f"this estimator state holds {', '.join(sorted(state)) or 'nothing'}; "
            f"expected {', '.join(sorted(expected)) or 'nothing'}: it belongs to another estimator"
        )
    for key, own in expected.items():
        theirs = state[key]
        if isinstance(own, Tensor) and (not isinstance(theirs, Tensor) or theirs.shape != own.shape):
            found = tuple(theirs.shape) if isinstance(theirs, Tensor) else theirs
            raise CheckpointError(
                f"estimator state {key!r}: expected shape {tuple(own.shape)}, got {found}: "
                "it belongs to another network"
            )
    return state


def deliver(value: Tensor, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """``value`` as a scalar whose ``backward()`` adds ``gradients`` to the ``.grad`` of ``leaves``.

    Being an ordinary node of autograd's graph, it can be scaled, added to a regulariser and accumulated.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> (3 * deliver(torch.tensor(5.0), [w], [torch.tensor([1.0, 2.0])])).backward()
    >>> w.grad
    tensor([3., 6.])
    """
    matched = [g.to(leaf.device, leaf.dtype) for leaf, g in zip(leaves, gradients, strict=True)]
    return scalar_with_gradient(value, leaves, matched)

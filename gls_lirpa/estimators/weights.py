"""The chosen parameters of a module as one flat vector, and what must be put back after using them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gls_lirpa.base.registry import nearest
from gls_lirpa.errors import ConfigError

Params = Iterable[str | nn.Parameter] | None


class Weights:
    """Parameters of a model, read and written as one vector.

    Writing goes through ``.data``, which leaves autograd's version counters alone: a regulariser whose
    graph was built before the estimate stays valid, because the values come back bit for bit.

    >>> weights = Weights(nn.Linear(3, 2))
    >>> weights.size, weights.names
    (8, ('weight', 'bias'))
    """

    def __init__(self, model: nn.Module, params: Params = None) -> None:
        named = dict(model.named_parameters())
        self.names = _choose(named, params)
        self.tensors = [named[name] for name in self.names]
        # Mixed precisions meet in a type that holds each of them exactly, so that a round trip is exact.
        self.dtype = functools.reduce(torch.promote_types, (p.dtype for p in self.tensors), torch.float32)
        self._sizes = [p.numel() for p in self.tensors]
        self.size = sum(self._sizes)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(p.shape)) for name, p in zip(self.names, self.tensors, strict=True)]

    def flat(self) -> Tensor:
        """A copy of the current values."""
        return torch.cat([p.detach().reshape(-1).to(self.device, self.dtype) for p in self.tensors])

    def layer_scales(self) -> Tensor:
        """For every value, the root mean square of its layer's kernel (of all its values where it has none).

        A layer is a module with parameters of its own; biases share its kernel's scale, since they start at 0.
        """
        layers: dict[str, list[Tensor]] = {}
        for name, p in zip(self.names, self.tensors, strict=True):
            layers.setdefault(name.rpartition(".")[0], []).append(p.detach().to(self.device, self.dtype))
        scales = {}
        for layer, own in layers.items():
            kernels = [p for p in own if p.dim() > 1] or own
            scales[layer] = torch.cat([p.reshape(-1) for p in kernels]).square().mean().sqrt()
        return torch.cat([scales[n.rpartition(".")[0]].expand(s) for n, s in zip(self.names, self._sizes, strict=True)])

    def views(self, vector: Tensor) -> list[Tensor]:
        """The vector cut into the parameters' shapes, without copying."""
        parts = torch.split_with_sizes(vector, self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.tensors, strict=True)]

    def write(self, vector: Tensor) -> None:
        for p, part in zip(self.tensors, torch.split_with_sizes(vector, self._sizes), strict=True):
            p.data.copy_(part.view(p.shape))


def _choose(named: dict[str, nn.Parameter], params: Params) -> tuple[str, ...]:
    if params is None:
        chosen = tuple(name for name, p in named.items() if p.requires_grad)
        if not chosen:
            raise ConfigError("no parameter of the model requires a gradient; choose some with params=")
        return chosen
    by_id = {id(p): name for name, p in named.items()}
    wanted: set[str] = set()
    for entry in params:
        name = entry if isinstance(entry, str) else by_id.get(id(entry))
        if name is None:
            raise ConfigError("params holds a tensor that is not a parameter of the model")
        if name not in named:
            raise ConfigError(f"the model has no parameter {name!r}{nearest(name, list(named))}")
        wanted.add(name)
    if not wanted:
        raise ConfigError("expected at least one parameter in params, got none")
    return tuple(name for name in named if name in wanted)


class Surroundings:
    """Everything besides the weights that evaluating a loss may change: buffers, gradients, flags.

    auto_LiRPA sets ``requires_grad`` of shared weights to its own training flag, its slope optimisation
    calls plain ``backward()``, and every forward pass in train mode moves BatchNorm's statistics.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        every = {id(m): m for root in modules for m in root.modules()}.values()
        self._buffers = [
            (m._buffers, name, buffer, buffer.detach().clone())
            for m in every
            for name, buffer in m._buffers.items()
            if buffer is not None
        ]
        parameters = {id(p): p for m in every for p in m._parameters.values() if p is not None}
        self.parameters = list(parameters.values())
        self._flags = [p.requires_grad for p in self.parameters]
        self._gradients = [p.grad for p in self.parameters]

    def reset(self) -> None:
        """Before each evaluation: buffers and flags as they were, and no gradient to be added to."""
        for table, name, buffer, value in self._buffers:
            table[name] = buffer
            buffer.data.copy_(value)
        self.reset_flags()
        for p in self.parameters:
            p.grad = None

    def reset_flags(self) -> None:
        for p, flag in zip(self.parameters, self._flags, strict=True):
            p.requires_grad = flag

    def restore(self) -> None:
        self.reset()
        for p, gradient in zip(self.parameters, self._gradients, strict=True):
            p.grad = gradient

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No parameter requires a gradient, and nobody can switch that on again.

        A BoundedModule in train mode would otherwise build a graph over the weights that a zeroth-order
        estimate never uses; recording it costs about as much as half of the bounds.
        """
        flags, self._flags = self._flags, [False] * len(self._flags)
        try:
            for p in self.parameters:
                p.__dict__["requires_grad_"] = functools.partial(_unchanged, p)
            yield
        finally:
            self._flags = flags
            for p in self.parameters:
                p.__dict__.pop("requires_grad_", None)


def _unchanged(parameter: nn.Parameter, requires_grad: bool = True) -> nn.Parameter:
    del requires_grad
    return parameter

"""What travels between this process and the actors.

Per estimate, once, for all actors: θ and σ (2d numbers), the other parameters and the buffers, one flag
per module, the batch and the keywords. Per shard: 8 bytes per seed and loss. Back: at most SHARDS × 2d
numbers. In bytes, with b bytes per number and P members: ``2db + batch + 16P + 2·16·d·b`` for PGPE,
``db + batch + 16·d·b`` for RGS with 16 samples or more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.estimators.reach import modules_of
from gls_lirpa.estimators.weights import Weights
from gls_lirpa.estimators.worker import Task, Worker


@dataclass(frozen=True)
class Packed:
    """A tensor as the numpy array that Ray shares between processes without copying."""

    array: Any


def pack(item: Any) -> Any:
    """Tensors inside tuples, lists and dictionaries become arrays.

    >>> pack({"eps": 0.1, "x": torch.zeros(2)})["x"].array
    array([0., 0.], dtype=float32)
    """
    if isinstance(item, Tensor):
        plain = item.detach().cpu()
        return Packed(plain if plain.dtype == torch.bfloat16 else plain.numpy())
    if isinstance(item, (tuple, list)):
        return type(item)(pack(part) for part in item)
    if isinstance(item, dict):
        return {key: pack(part) for key, part in item.items()}
    return item


def unpack(item: Any, device: torch.device | None = None) -> Any:
    """The reverse of pack: copies on the device, because what Ray shares is read-only.

    >>> unpack(pack([torch.ones(1), "a"]))
    [tensor([1.]), 'a']
    """
    if isinstance(item, Packed):
        if isinstance(item.array, Tensor):
            return item.array.to(device or "cpu")
        return torch.tensor(item.array, device=device)
    if isinstance(item, (tuple, list)):
        return type(item)(unpack(part, device) for part in item)
    if isinstance(item, dict):
        return {key: unpack(part, device) for key, part in item.items()}
    return item


@dataclass(frozen=True)
class Shipment:
    """One estimate's task and the state of the model that is not in θ, packed."""

    task: Task
    state: list[Packed]
    training: list[bool]

    @classmethod
    def of(cls, task: Task, worker: Worker) -> Shipment:
        small = replace(
            task, theta=pack(task.theta), sigma=pack(task.sigma), args=pack(task.args), kwargs=pack(task.kwargs)
        )
        return cls(small, pack(rest_of(worker)), [m.training for m in worker.model.modules()])

    def install(self, worker: Worker) -> Task:
        """Bring an actor's model to the state of the sender's; the task on the actor's device."""
        device = worker.weights.device
        for target, value in zip(rest_of(worker), self.state, strict=True):
            target.data.copy_(unpack(value, target.device))
        own = list(worker.model.modules())
        for module, flag in zip(own, self.training, strict=True):
            module.training = flag
        # Whatever else the loss holds (a BoundedModule, say) follows the model.
        for root in modules_of(worker.loss):
            if all(root is not m for m in own):
                root.train(worker.model.training)
        task = self.task
        on = "cpu" if task.generator_device == "cpu" else str(device)
        return replace(
            task,
            theta=unpack(task.theta, device),
            sigma=unpack(task.sigma, device),
            args=unpack(task.args, device),
            kwargs=unpack(task.kwargs, device),
            generator_device=on,
        )


def rest_of(worker: Worker) -> list[Tensor]:
    """Parameters that are not being estimated, and buffers."""
    chosen = {id(p) for p in worker.weights.tensors}
    others = [p for p in worker.model.parameters() if id(p) not in chosen]
    return [*others, *worker.model.buffers()]


def describe(worker: Worker) -> list[Any]:
    """What sender and actor must agree on: the weights, the rest, the number of modules."""
    return [
        worker.weights.shapes,
        [tuple(t.shape) for t in rest_of(worker)],
        len(list(worker.model.modules())),
    ]


def build(model: nn.Module, loss: Any, names: tuple[str, ...], device: torch.device) -> Worker:
    """A worker around what a factory returned, on the actor's device."""
    model.to(device)
    if hasattr(loss, "to"):
        loss.to(device)
    return Worker(model, loss, Weights(model, names))

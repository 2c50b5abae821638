"""Evaluating shards of perturbed networks: the one code that runs in this process and in every actor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.errors import GLSError
from gls_lirpa.estimators.reach import modules_of
from gls_lirpa.estimators.weights import Surroundings, Weights

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """What every member of one estimate shares.

    ``common`` seeds whatever is random inside the loss (an attack's start, dropout), so that members
    differ by their weights alone: common random numbers, which cancel in differences of losses.
    """

    theta: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    common: int
    sigma: Tensor | float = 0.0
    generator_device: str = "cpu"
    gradients: bool = True


@dataclass(frozen=True)
class Member:
    """One perturbed network of RGS: θ + sign·σ·z(seed), its weight, and its part of the batch."""

    seed: int
    sign: float
    weight: float
    part: tuple[int, int] | None = None


@dataclass
class Worker:
    """A loss over a model whose weights it may move, one shard of members at a time.

    After each shard the weights, buffers, gradients and flags are what they were, whatever happened.
    """

    model: nn.Module
    loss: Loss
    weights: Weights
    takes_generator: bool = field(init=False)
    _roots: tuple[Task, list[nn.Module]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.takes_generator = takes_generator(self.loss)

    def roots(self, task: Task) -> list[nn.Module]:
        """The modules that evaluating the loss may touch, looked for once per estimate."""
        if self._roots is None or self._roots[0] is not task:
            self._roots = (task, [self.model, *modules_of(self.loss)])
        return self._roots[1]

    def pair_losses(self, task: Task, seeds: Sequence[int]) -> list[tuple[float, float]]:
        """The losses at θ + ε and θ − ε for each seed's ε."""
        with self.borrowed(task) as scene, scene.frozen():
            points = (
                task.theta.add(self.noise(seed).mul_(task.sigma), alpha=sign) for seed in seeds for sign in (1, -1)
            )
            losses = self._together(task, scene, points)
            if losses is None:
                losses = [self.value(task, scene, point) for point in points]
        return list(zip(losses[::2], losses[1::2], strict=True))

    def _together(self, task: Task, scene: Surroundings, points: Iterable[Tensor]) -> list[float] | None:
        """The losses at many points by the loss's own ``population``; None where it has none for this task."""
        population = getattr(self.loss, "population", None)
        if not callable(population):
            return None
        scene.reset()
        losses = population(self.weights.write, points, *task.args, **self._seeded(task))
        return None if losses is None else [float(loss) for loss in losses.tolist()]

    def noise_sums(
        self, task: Task, seeds: Sequence[int], linear: Sequence[float], square: Sequence[float] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Σ linear·z and Σ square·z², z being each seed's standard noise."""
        first = torch.zeros_like(task.theta)
        second = None if square is None else torch.zeros_like(task.theta)
        for index, seed in enumerate(seeds):
            z = self.noise(seed)
            first.add_(z, alpha=linear[index])
            if second is not None and square is not None:
                second.addcmul_(z, z, value=square[index])
        return first, second

    def gradient_sum(self, task: Task, members: Sequence[Member]) -> tuple[list[float], Tensor]:
        """The members' losses, and the weighted sum of their gradients."""
        losses = []
        total = torch.zeros_like(task.theta)
        with self.borrowed(task) as scene:
            for member in members:
                point = task.theta + self.noise(member.seed).mul_(member.sign * task.sigma)
                losses.append(self.gradient(task, scene, point, total, member.weight, member.part))
        return losses, total

    @contextmanager
    def borrowed(self, task: Task) -> Iterator[Surroundings]:
        """Weights and surroundings to be moved at will, put back at the end from saved copies."""
        scene = Surroundings(self.roots(task))
        device = self.weights.device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                yield scene
        finally:
            self.weights.write(task.theta)
            scene.restore()

    def noise(self, seed: int) -> Tensor:
        """Standard normal noise of all weights; made on the CPU, so that every device sees the same."""
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(self.weights.size, generator=generator, dtype=self.weights.dtype)
        return z.to(self.weights.device)

    def value(self, task: Task, scene: Surroundings, point: Tensor) -> float:
        return float(self._call(task, scene, point, None).item())

    def gradient(
        self,
        task: Task,
        scene: Surroundings,
        point: Tensor,
        total: Tensor,
        weight: float = 1.0,
        part: tuple[int, int] | None = None,
    ) -> float:
        """The loss at a point; its gradient times weight is added to total."""
        if not task.gradients:
            return float(self._call(task, scene, point, part).item())
        with torch.enable_grad():
            loss = self._call(task, scene, point, part)
        scene.reset_flags()  # autograd refuses a weight that was switched off after its graph was built
        pairs = zip(self.weights.tensors, self.weights.views(total), strict=True)
        wanted = [(p, view) for p, view in pairs if p.requires_grad]
        gradients: Sequence[Tensor | None] = []
        if loss.requires_grad and wanted:
            gradients = torch.autograd.grad(loss, [p for p, _ in wanted], allow_unused=True)
        if all(g is None for g in gradients):
            raise GLSError(
                "this estimator needs the loss's gradient with respect to the parameters, and this loss has none; "
                "PGPE needs values only"
            )
        for (_, view), g in zip(wanted, gradients, strict=True):
            if g is not None:
                view.add_(g, alpha=weight)
        return float(loss.item())

    def _call(self, task: Task, scene: Surroundings, point: Tensor, part: tuple[int, int] | None) -> Tensor:
        scene.reset()
        self.weights.write(point)
        args, kwargs = task.args, self._seeded(task)
        if part is not None:
            args, kwargs = cut(args, kwargs, part)
        result = torch.as_tensor(self.loss(*args, **kwargs))
        if result.numel() != 1:
            raise GLSError(f"expected the loss to return a scalar, got a tensor of shape {tuple(result.shape)}")
        return result

    def _seeded(self, task: Task) -> dict[str, Any]:
        """The keywords of a call, whatever is random in it seeded."""
        torch.default_generator.manual_seed(task.common)
        if self.weights.device.type == "cuda":
            torch.cuda.manual_seed(task.common)
        if not self.takes_generator:
            return task.kwargs
        return {**task.kwargs, "generator": torch.Generator(task.generator_device).manual_seed(task.common)}


def takes_generator(loss: Loss) -> bool:
    """Whether the loss names a ``generator`` argument; ``**kwargs`` alone does not count.

    >>> takes_generator(lambda x, y, *, generator=None: x)
    True
    """
    try:
        return "generator" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return False


def batch_size(args: tuple[Any, ...]) -> int:
    """The first dimension of the first tensor among the arguments."""
    for item in args:
        if isinstance(item, Tensor) and item.dim():
            return int(item.shape[0])
    raise GLSError("split=True needs a batch: a tensor among the positional arguments")


def cut(args: tuple[Any, ...], kwargs: dict[str, Any], part: tuple[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The rows ``part`` of every tensor that has one row per sample.

    >>> cut((torch.arange(4), "name"), {}, (1, 3))[0]
    (tensor([1, 2]), 'name')
    """
    rows = batch_size(args)

    def of(item: Any, ranks: Sequence[int] | None = None) -> Any:
        fits = isinstance(item, Tensor) and item.dim() and item.shape[0] == rows
        return item[part[0] : part[1]] if fits and (ranks is None or item.dim() in ranks) else item

    # A keyword such as eps of shape (channels, 1, 1) must not be taken for a batch of that size.
    ranks = [1, *(item.dim() for item in args if isinstance(item, Tensor))]
    return tuple(of(item) for item in args), {key: of(item, ranks) for key, item in kwargs.items()}

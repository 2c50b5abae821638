"""What a stage of the certification cascade is asked and what it answers.

A stage sees a batch of samples that earlier stages left open, with the best margins proven so far,
and returns what it found. The cascade, never a stage, turns findings into verdicts: it checks bounds
against the numerical margin and counterexamples against the plain network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from gls_lirpa.base.boxes import Box
from gls_lirpa.base.registry import Registry
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.solver.settings import SolverSettings


@dataclass(frozen=True)
class Subject:
    """The network under certification, ``model``: BatchNorm folded, eval mode, no gradients wanted.

    ``engine``: its bounds; ``seed``: of everything random in a stage.
    Bounds too close to zero are computed a second time on a float64 subject, by the same stage: a
    stage works in the dtype of the box it is given, or raises EngineError where it cannot.
    """

    model: nn.Module
    engine: BoundEngine
    seed: int = 0


@dataclass(frozen=True)
class OpenSamples:
    """Samples ``x`` left undecided. ``indices``: their numbers in the records; ``labels``: their classes; ``box``: what
    is to be certified around each; ``lower``: best proven margin per other class, ascending (b, K−1);
    ``proven``: where that margin already suffices, so that no stage need bound it again;
    ``needed``: what a bound must exceed to be a proof, None where any positive one is."""

    indices: Tensor
    x: Tensor
    labels: Tensor
    box: Box
    lower: Tensor
    proven: Tensor
    needed: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Findings:
    """Bounds and counterexample candidates. ``lower``: of the margins, per other class, −inf where none was computed.

    ``counterexamples[i]`` is None or an input in the box of sample i; ``exhausted[i]`` tells that a
    limit of time or nodes stopped the stage before it was done with sample i.
    """

    lower: Tensor
    counterexamples: list[Tensor | None]
    exhausted: list[bool]


class Stage(Protocol):
    """One way to decide samples. ``batch``: how many it likes to see at once.

    Attributes that a stage may leave out: ``max_inputs`` (see :func:`admits`), and flags. ``exact``: it proves in
    float64 whatever dtype it is given; ``by_parts``: its boxes may be proven in parts, where rounding over the whole
    is too much; ``attacks``: it looks for counterexamples alone; ``complete``: given time it finds a proof or a
    counterexample, one sample after the other.
    """

    name: str
    batch: int

    def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
        """Work on ``samples`` of the network ``subject``; ``timeout`` is the limit in seconds per sample."""
        ...


def admits(stage: Stage, box: Box) -> bool:
    """Whether a stage is meant for some boxes: a ``max_inputs`` of it limits the inputs that vary in each.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> box = Box(torch.zeros(1, 3), torch.tensor([[0.0, 1.0, 1.0]]))
    >>> [admits(SimpleNamespace(max_inputs=number), box) for number in (1, 2)]
    [False, True]
    """
    limit: int | None = getattr(stage, "max_inputs", None)
    return limit is None or bool(((box.upper > box.lower).flatten(1).sum(1) <= limit).all())


@dataclass(frozen=True)
class StageOptions:
    """What stages can be asked for; each takes what concerns it.

    ``attack_steps`` and ``attack_restarts``: of the stage ``pgd``; ``iterations``: of relaxations that have such an
    option. ``bab``: of branch and bound and the other complete searches; ``max_nodes``, if given, goes before its own.
    """

    attack_steps: int = 40
    attack_restarts: int = 5
    iterations: int = 20
    max_nodes: int | None = None
    bab: SolverSettings = field(default_factory=SolverSettings)


STAGES: Registry[Callable[[StageOptions], Stage]] = Registry("stage")
"""How a stage is made, by name. Registering one is all it takes to use it in a cascade."""


def has_flag(stage: Stage | str, flag: str) -> bool:
    """Whether a stage, or the one of a name, has a flag; one that nobody registered has none.

    >>> import gls_lirpa.certification
    >>> [name for name in STAGES if has_flag(name, "complete")]
    ['bab', 'input-split', 'milp']
    """
    if isinstance(stage, str):
        return stage in STAGES and has_flag(STAGES.get(stage)(StageOptions()), flag)
    return bool(getattr(stage, flag, False))

"""What the engine asks of a relaxation, and of any other function of one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from gls_lirpa.base.boxes import Bounds
from gls_lirpa.base.options import Options, Value

BoundFunction = Callable[..., Bounds]
"""``bound(engine, box, spec, statistics, **options)``."""


@dataclass(frozen=True)
class ByRows:
    """A bound function, and the one it is where networks have a row form: ``rows(network, tensors, box, spec)`` with
    the same options, for several networks of the same layers at once, all samples of the first one first."""

    bound: BoundFunction
    rows: BoundFunction

    def __call__(self, *args: Any, **options: Any) -> Bounds:
        return self.bound(*args, **options)


@dataclass(frozen=True)
class Relaxation:
    """How bounds are computed, under a ``name``: ``bound(engine, box, spec, statistics)``, ``options`` as keywords.

    ``differentiable``: whether gradients reach the weights; ``light``: memory per sample is that of a forward pass;
    ``balls``: whether it bounds ℓ2 balls too. It begins with the bound of the relaxation named ``refines`` and keeps
    the better one. As a stage of certification it sees ``batch`` samples at once, and where it fails in float64 the
    relaxation named ``fallback`` takes its place. ``curved``: whether it bounds Sigmoid and Tanh as well as layers that
    are affine or have kinks; ``drawn``: whether pictures of relaxations show it where nobody names any. ``help``: what
    the command line says of it.
    """

    name: str
    bound: BoundFunction
    differentiable: bool = True
    light: bool = False
    help: str = ""
    options: Options = field(default_factory=Options)
    batch: int = 32
    fallback: str | None = None
    refines: str | None = None
    balls: bool = False
    curved: bool = False
    drawn: bool = True

    def configured(self, options: dict[str, Value]) -> Relaxation:
        """The same with some options set."""
        if not options:
            return self
        chosen = self.options.checked(f"relaxation {self.name!r}", options)
        return replace(self, bound=partial(self.bound, **chosen))


@dataclass(frozen=True)
class SampleFunction:
    """One number per sample, ``compute(engine, box, spec, statistics, *beside)``, of which the engine may do parts
    in turn; tensors ``beside`` have one row per sample.

    ``name`` and the rows of ``spec`` tell functions apart whose graphs differ in size.
    """

    name: str
    compute: Callable[..., Tensor]
    differentiable: bool = True
    light: bool = False

"""How the complete search works: every setting with the reason for its default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from gls_lirpa.base.checks import require
from gls_lirpa.base.registry import nearest
from gls_lirpa.errors import ConfigError

FROM_ZERO = (
    "tightening_iterations",
    "facet_iterations",
    "group_iterations",
    "attack_starts",
    "attack_steps",
)
"""Settings that may be 0: then that part is left out. All others are at least 1."""


@dataclass(frozen=True)
class SolverSettings:
    """Settings of the stages ``bab``, ``input-split`` and ``milp``; the figures are of cnn3 networks, one core.

    >>> SolverSettings.of({"batch_size": "64"}).batch_size
    64
    """

    max_nodes: int | None = None
    """Domains (or sub-boxes) bounded per sample; the root of every open row counts and is always bounded. None: no
    limit but time."""

    form_mib: int = 2048
    """Memory of the split form. Beyond it domains are bounded by the network's own layers (``operators``), without
    tightening and groups."""

    queue_mib: int = 1024
    """Memory of open domains; beyond it the search goes depth first."""

    batch_size: int = 256
    """Domains bounded at once: 64 give 556 domains per second, 256 give 680, and more little."""

    tightening_iterations: int = 20
    """Evaluations for the bounds of pre-activations from the third layer on, once per sample."""

    first_nodes: int = 300
    """Size of the first tree, over quick bounds: it decides most samples before dearer steps begin. With 32 a
    PGD-trained cnn3 took 68 s instead of 74, and on a CIFAR-10 network one sample fewer was decided."""

    facet_iterations: int = 40
    """Steps for the facets of a tree's rows, once per tree. Without facets 3 of 7 samples of a
    cnn5 were decided in 10 s instead of 6, and a CROWN-trained cnn3 took six times as long."""

    root_iterations: int = 50
    """Evaluations for the root, from which everything below it begins."""

    iterations: int = 20
    """Evaluations for a domain, beginning with its parent's α and β; the step is down to a third after 20."""

    attack_starts: int = 4
    attack_steps: int = 5
    """Descent from the minimising inputs of the lowest domains of a batch: about the cost of one evaluation."""

    group_iterations: int = 100
    """Evaluations for multi-neuron slopes from the triangles'; 0: no second tree over such bounds. Without groups 3
    of 5 and 3 of 6 samples of PGD-trained networks were decided in 20 s instead of 5 and 4."""

    renewal_iterations: int = 32
    """The same, beginning with the slopes of the parent."""

    slopes_at_once: int = 64
    """Open domains that are given slopes of their own at a time."""

    second_iterations: int = 4
    """Evaluations for a domain of the second tree, where slopes do most of the work."""

    input_batch: int = 512
    """Sub-boxes bounded at once where inputs are split."""

    max_inputs: int = 32
    """Inputs that vary, beyond which splitting them one by one is hopeless."""

    max_relus: int = 5000
    """ReLUs beyond which the MILP is refused: HiGHS hardly ends within minutes there."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in FROM_ZERO else 1
            if field.name == "max_nodes" and value is None:
                continue
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            require(is_whole, f"{field.name} to be an integer", repr(value))
            require(value >= least, f"{field.name} >= {least}", value)
        require(self.input_batch >= 2, "input_batch >= 2", self.input_batch)

    @classmethod
    def of(cls, given: Mapping[str, float | str]) -> SolverSettings:
        """From names and values, as a command line gives them; what is not given has its default."""
        names = [field.name for field in fields(cls)]
        values: dict[str, int] = {}
        for name, value in given.items():
            if name not in names:
                known = nearest(name, names) or f": expected one of {', '.join(names)}"
                raise ConfigError(f"unknown setting {name!r} of branch and bound{known}")
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            require(number.is_integer(), f"an integer for {name}", repr(value))
            values[name] = int(number)
        return cls(**values)

    @property
    def first(self) -> SolverSettings:
        """The settings of the first tree."""
        if not self.group_iterations:
            return self
        limit = self.first_nodes if self.max_nodes is None else min(self.first_nodes, self.max_nodes)
        return replace(self, max_nodes=limit, group_iterations=0)

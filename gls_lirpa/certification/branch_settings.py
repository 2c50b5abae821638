"""How branch and bound searches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gls_lirpa.certification.branch_rules import RULES
from gls_lirpa.errors import ConfigError

_SECOND_EFFORT = 5
"""Factor of the iterations for hidden neurons and hulls in the second tree: 100 and 200 lower a PGD-trained
network's gap by 0.1, as much as some thousand subproblems; more gained a tenth of that again."""


@dataclass(frozen=True)
class Settings:
    """How to search. ``max_nodes``: subproblems bounded per sample, the root of every open class included
    and always bounded; ``candidates`` > 1: that many neurons are compared by bounding their children;
    ``attack_starts`` 0: subproblems are not searched for counterexamples, only leaves give them;
    ``first_nodes``: size of a first tree over quick bounds, in which easy samples are decided."""

    max_nodes: int | None = None
    first_nodes: int = 300
    batch_size: int = 256
    iterations: int = 20
    root_iterations: int = 50
    tightening_iterations: int = 20
    hull_iterations: int = 40
    rule: str = "mixed"
    candidates: int = 16
    max_levels: int = 3
    queue_mib: int = 1024
    attack_starts: int = 4
    attack_steps: int = 5

    def __post_init__(self) -> None:
        for name in ("batch_size", "iterations", "root_iterations", "candidates", "max_levels", "queue_mib"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.max_nodes is not None and self.max_nodes < 1:
            raise ConfigError(f"expected max_nodes >= 1 or None, got {self.max_nodes}")
        for name in ("first_nodes", "tightening_iterations", "hull_iterations", "attack_starts", "attack_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"expected {name} >= 0, got {getattr(self, name)}")
        RULES.get(self.rule)

    def in_turn(self) -> tuple[Settings, Settings]:
        """Settings of the first tree and, for what it leaves open, of the second."""
        limit = self.first_nodes if self.max_nodes is None else min(self.first_nodes, self.max_nodes)
        return replace(self, max_nodes=max(1, limit)), replace(
            self,
            tightening_iterations=_SECOND_EFFORT * self.tightening_iterations,
            hull_iterations=_SECOND_EFFORT * self.hull_iterations,
        )

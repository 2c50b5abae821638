"""How branch and bound searches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gls_lirpa.certification.branch_rules import RULES
from gls_lirpa.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """How to search. ``max_nodes``: subproblems bounded per sample, the root of every open class included
    and always bounded; ``candidates`` > 1: that many neurons are compared by bounding their children;
    ``attack_starts`` 0: subproblems are not searched for counterexamples, only leaves give them;
    ``population`` and ``rounds`` of the attack between the trees (``recombination``), 0 rounds: none;
    ``first_nodes``: size of a first tree over quick bounds, in which easy samples are decided;
    ``group_iterations``: for bounds of groups of neurons, in the second tree alone (0: no second tree);
    ``renewal_iterations``: for those of a subproblem, beginning with its parent's;
    ``families``: open subproblems that are given slopes of their own for them at a time;
    ``second_iterations``: of the second tree, where those slopes do most of the work;
    ``block_splits``: leaves that are split at a time in the trees of all blocks (``branch_blocks``; 0: no blocks),
    with ``block_iterations`` between them and ``block_warmup`` before."""

    max_nodes: int | None = None
    first_nodes: int = 300
    batch_size: int = 256
    iterations: int = 20
    root_iterations: int = 50
    tightening_iterations: int = 20
    hull_iterations: int = 40
    group_iterations: int = 100
    renewal_iterations: int = 32
    families: int = 64
    second_iterations: int = 4
    block_splits: int = 400
    block_iterations: int = 10
    block_warmup: int = 100
    rule: str = "mixed"
    candidates: int = 16
    max_levels: int = 3
    queue_mib: int = 1024
    attack_starts: int = 4
    attack_steps: int = 5
    population: int = 64
    rounds: int = 400

    def __post_init__(self) -> None:
        least_one = ("batch_size", "iterations", "root_iterations", "candidates", "max_levels", "queue_mib")
        blocks = ("block_iterations", "block_warmup")
        for name in (*least_one, "families", "second_iterations", "renewal_iterations", "population", *blocks):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.max_nodes is not None and self.max_nodes < 1:
            raise ConfigError(f"expected max_nodes >= 1 or None, got {self.max_nodes}")
        counts = ("tightening_iterations", "hull_iterations", "group_iterations", "attack_starts", "attack_steps")
        for name in ("first_nodes", "rounds", "block_splits", *counts):
            if getattr(self, name) < 0:
                raise ConfigError(f"expected {name} >= 0, got {getattr(self, name)}")
        RULES.get(self.rule)

    @property
    def first(self) -> Settings:
        """The settings of the first tree; the only one without iterations for groups."""
        if not self.group_iterations:
            return self
        limit = self.first_nodes if self.max_nodes is None else min(self.first_nodes, self.max_nodes)
        return replace(self, max_nodes=max(1, limit), group_iterations=0)

"""Sampled soundness: random networks of every operation, every relaxation, at least a million points.

    python benchmarks/soundness.py [--points 1000000] [--seed 0]

Every point is a point of a box (random, corner, or descended to the lowest margin that was found) whose
margins are compared with the bounds of that box. Prints points and violations by relaxation; exit code 1
if there is a violation or a bound could not be computed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from random import Random

import torch
from torch import nn

from gls_lirpa.doctor.operator_cases import ALL, CASES, Layer, Shape
from gls_lirpa.doctor.selftest import Comparison, check_network
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.errors import EngineError
from gls_lirpa.relaxations import RELAXATIONS

DEEP = [name for name, case in CASES.items() if case.bounded == ALL and case.image]
"""Operations that may be put behind one another on images."""


def random_chain(random: Random, shape: Shape) -> nn.Module:
    """Up to three layers of the table in turn, as long as they give images like those they take."""
    layers: list[nn.Module] = []
    for _ in range(random.choice([1, 2, 3])):
        layers.append(CASES[random.choice(DEEP)].layer(random, shape))
        if random.random() < 0.5:
            layers.append(nn.ReLU())
        out = nn.Sequential(*layers).eval()(torch.zeros(2, *shape)).shape[1:]
        if len(out) != 3 or out[0] != shape[0] or min(out[1:]) < 4:
            break
    return nn.Sequential(*layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    kinds: dict[str, tuple[Layer, bool]] = {name: (case.layer, case.image) for name, case in CASES.items()}
    for number in range(len(CASES)):
        kinds[f"chain {number}"] = (random_chain, True)
    points: Counter[str] = Counter()
    networks, refused, violations, failures = 0, 0, Counter[str](), 0
    seed, started = options.seed * 100_000, time.perf_counter()
    while points.total() < options.points:
        for name, (layer, image) in kinds.items():
            seed, networks = seed + 1, networks + 1
            for relaxation in RELAXATIONS:
                try:
                    found = check_network(layer, image, relaxation, seed, samples=512)
                except EngineError as error:
                    failures += 1
                    print(f"FAILED {name}, {relaxation}, seed {seed}: {error}")
                    found = Comparison()
                refused += bool(found.refusal)
                points[relaxation] += found.points
                violations[relaxation] += found.violations
                if found.violations:
                    print(f"VIOLATED {name}, {relaxation}, seed {seed}: {found.violations} points")
    print(f"auto_LiRPA {load_lirpa().version}, torch {torch.__version__}: {networks} networks, "
          f"{refused} refusals, {failures} failures, {time.perf_counter() - started:.0f} s")  # fmt: skip
    for relaxation in RELAXATIONS:
        print(f"{relaxation:18} {points[relaxation]:9} points {violations[relaxation]:4} violations")
    print(f"{'all':18} {points.total():9} points {violations.total():4} violations")
    return 1 if violations.total() or failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""Sampled soundness: random networks of every operation, every relaxation, at least a million points.

    python benchmarks/soundness.py [--points 1000000] [--seed 0]

Every point is a point of a box (random, corner, or descended to the lowest margin that was found) whose
margins are compared with the bounds of that box, one comparison for each relaxation. Prints points and
violations by relaxation; exit code 1 if there is a violation or a bound could not be computed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from random import Random

import torch
from torch import nn

from gls_lirpa.doctor.operator_cases import CASES, Layer, Shape, every
from gls_lirpa.doctor.selftest import Comparison, check_network, one_thread
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.errors import EngineError
from gls_lirpa.relaxations import RELAXATIONS

DEEP = [name for name, case in CASES.items() if case.accepted is every and case.image]
"""Operations that may be put behind one another on images."""

SAMPLES = 64
"""Random points of a box, besides corners and descended ones: few, so that the million is spread over many networks."""


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


def networks(seed: int) -> Iterator[tuple[str, Layer, bool, int]]:
    """Every operation of the table by itself and as many chains, again and again: name, layer, image or row, seed."""
    kinds = {name: (case.layer, case.image) for name, case in CASES.items()}
    kinds.update({f"chain {number}": (random_chain, True) for number in range(len(CASES))})
    while True:
        for name, (layer, image) in kinds.items():
            seed += 1
            yield name, layer, image, seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    relaxations = RELAXATIONS.names()
    points, violations = Counter[str](), Counter[str]()
    made, refused, failures, started = 0, 0, 0, time.perf_counter()
    for name, layer, image, seed in networks(options.seed * 100_000):
        try:
            outcomes = check_network(layer, image, relaxations, seed, samples=SAMPLES)
        except EngineError as error:
            outcomes = dict.fromkeys(relaxations, Comparison(failure=str(error)))
        made += 1
        for relaxation, found in outcomes.items():
            refused += bool(found.refusal)
            failures += bool(found.failure)
            points[relaxation] += found.points
            violations[relaxation] += found.violations
            if found.failure:
                print(f"FAILED {name}, {relaxation}, seed {seed}: {found.failure}", flush=True)
            if found.violations:
                print(f"VIOLATED {name}, {relaxation}, seed {seed}: {found.violations} points", flush=True)
        if made % 20 == 0:
            print(f"{made} networks, {points.total()} points, {violations.total()} violations", flush=True)
        if points.total() >= options.points:
            break
    seconds = f"{time.perf_counter() - started:.0f} s, {time.process_time():.0f} s of one core"
    print(f"auto_LiRPA {load_lirpa().version}, torch {torch.__version__}: {made} networks, {refused} refusals, "
          f"{failures} failures, {seconds}")  # fmt: skip
    for relaxation in relaxations:
        print(f"{relaxation:18} {points[relaxation]:9} points {violations[relaxation]:4} violations")
    print(f"{'all':18} {points.total():9} points {violations.total():4} violations")
    return 1 if violations.total() or failures else 0


if __name__ == "__main__":
    with one_thread():
        sys.exit(main())

"""Speed of the estimators on cnn3 and cnn3-tiny with MNIST-sized input, as ratios measured in one run.

``python benchmarks/speed_estimators.py`` prints one line per ratio with its target and exits with 1 if a
target is missed; ``--json`` prints the numbers alone. Every ratio is the median over interleaved repetitions
of processor time (wall clock for actors), so that a machine that is busy for a while slows both sides alike.
One torch thread, as in an actor.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.bench.speed import stepped
from gls_lirpa.engine.plain import METHODS, plain_loss, torch_convolutions
from gls_lirpa.estimators import GRAD, PGPE, RGS
from gls_lirpa.losses import CertifiedLoss
from gls_lirpa.models import build_model

EPS = 0.1
CLASSES = 10


def cnn3() -> nn.Module:
    torch.manual_seed(0)
    return build_model("cnn3", in_shape=(1, 28, 28), classes=CLASSES)


def ours(relaxation: str = "crown") -> tuple[nn.Module, CertifiedLoss]:
    model = cnn3()
    return model, CertifiedLoss(model, relaxation, eps=EPS)


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(size, 1, 28, 28, generator=generator), torch.arange(size) % CLASSES


@dataclass
class Ratio:
    """One measured ratio; ``target`` is an upper limit, or a lower one if ``at_least``."""

    name: str
    value: float
    target: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{'ok  ' if self.met else 'MISS'}  {self.name:<58} {self.value:6.3f}  (target {sign} {self.target})"


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    start = clock()
    work()
    return clock() - start


def ratio(work: Callable[[], Any], reference: Callable[[], Any], repeats: int) -> float:
    """The median of work's time over that of a reference measured right before and after it."""
    reference()
    work()
    found = []
    before = seconds(reference)
    for _ in range(repeats):
        own = seconds(work)
        after = seconds(reference)
        found.append(2 * own / (before + after))
        before = after
    return statistics.median(found)


def rgs_ratios(repeats: int, size: int) -> list[Ratio]:
    model, loss = ours()
    x, y = batch(size)
    grad = stepped(GRAD(loss, model), model, x, y)
    plain = stepped(RGS(loss, model, sigma=1e-3, samples=2), model, x, y)
    split = stepped(RGS(loss, model, sigma=1e-3, samples=2, split=True), model, x, y)
    return [
        Ratio("RGS(2) step / GRAD step", ratio(plain, grad, repeats), 2.1),
        Ratio("split RGS(2) step / GRAD step", ratio(split, grad, repeats), 1.1),
    ]


def plain_loop(model: nn.Module, relaxation: str, population: int, x: Tensor, y: Tensor) -> list[float]:
    """A perturbed copy and a call of auto_LiRPA for every member."""
    losses = []
    for seed in range(population):
        member = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in member.parameters():
                p.add_(1e-3 * torch.randn(p.shape, generator=generator))
        with torch_convolutions():
            losses.append(float(plain_loss(member, relaxation, x, y, eps=EPS, classes=CLASSES).detach()))
    return losses


def overhead(repeats: int, size: int, population: int) -> Ratio:
    model, loss = ours()
    spent = [0.0]

    def timed(x: Tensor, y: Tensor) -> Tensor:
        start = time.process_time()
        value = loss(x, y)
        spent[0] += time.process_time() - start
        return value

    run = stepped(PGPE(timed, model, sigma=1e-3, population=population), model, *batch(size))
    run()
    found = []
    for _ in range(repeats):
        spent[0] = 0.0
        whole = seconds(run)
        found.append((whole - spent[0]) / spent[0])
    return Ratio("PGPE's overhead beyond the bound computations", statistics.median(found), 0.05)


def against_plain_loop(repeats: int, size: int, population: int) -> list[Ratio]:
    found = []
    for relaxation in METHODS:
        model, loss = ours(relaxation)
        x, y = batch(size)
        run = stepped(PGPE(loss, model, sigma=1e-3, population=population), model, x, y)
        loop = functools.partial(plain_loop, model, relaxation, population, x, y)
        speed = 1 / ratio(run, loop, repeats)
        found.append(Ratio(f"PGPE evaluations/s, ours / plain loop, {relaxation}", speed, 1.5, at_least=True))
    return found


def certifiable(size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A cnn3-tiny that few steps of IBP made certifiable on noisy pictures of ten kinds, and some of those."""
    torch.manual_seed(0)
    model = build_model("cnn3-tiny", in_shape=(1, 28, 28), classes=CLASSES)
    kinds = nn.functional.interpolate((torch.rand(CLASSES, 1, 7, 7) > 0.5).float(), scale_factor=4)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (count,))
        return (kinds[labels] + 0.1 * torch.randn(count, 1, 28, 28)).clamp(0, 1), labels

    loss = CertifiedLoss(model, "ibp", eps=EPS)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(300):
        optimizer.zero_grad()
        loss(*draw(128), eps=EPS * min(1.0, step / 150)).backward()
        optimizer.step()
    return model.eval(), *draw(size)


def together(repeats: int, size: int, population: int) -> Ratio:
    """A population in one pass against the same loss called for one member after the other."""
    model, x, y = certifiable(size)
    loss = CertifiedLoss(model, "crown", eps=EPS)
    # A bound method has no population of its own.
    alone, run = (
        stepped(PGPE(function, model, sigma=1e-3, population=population), model, x, y)
        for function in (loss.__call__, loss)
    )
    speed = 1 / ratio(run, alone, repeats)
    return Ratio(f"PGPE evaluations/s, together / alone, batch {size}", speed, 2.0, at_least=True)


def actor_ratio(repeats: int, size: int, population: int) -> Ratio:
    x, y = batch(size)
    times = {}
    for actors in (1, 2):
        model, loss = ours()
        with PGPE(loss, model, sigma=1e-3, population=population, actors=actors) as pgpe:
            run = stepped(pgpe, model, x, y)
            run()
            times[actors] = statistics.median(seconds(run, time.perf_counter) for _ in range(repeats))
    return Ratio("PGPE speed, two one-thread actors / one", times[1] / times[2], 1.7, at_least=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--population", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-actors", action="store_true", help="leave out the ratio that needs Ray and two cores")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = rgs_ratios(options.repeats, options.batch)
    few = max(options.repeats // 2, 1)
    found.append(overhead(few, options.batch, options.population))
    found += against_plain_loop(few, options.batch, options.population)
    found += [together(few, size, 64) for size in (options.batch, 4 * options.batch)]
    if not options.no_actors:
        found.append(actor_ratio(few, options.batch, 2 * options.population))
    lines = [json.dumps([{**asdict(r), "met": r.met} for r in found])] if options.json else [str(r) for r in found]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if all(r.met for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())

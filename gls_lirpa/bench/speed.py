"""Step times of every relaxation × estimator against plain auto_LiRPA in the same run; memory; actors."""

from __future__ import annotations

import functools
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.base.files import replace_file
from gls_lirpa.bench.context import Context
from gls_lirpa.bench.costs import cost_rows, cost_table, measured_costs
from gls_lirpa.bench.sections import Entry, Section, Table
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.plain import METHODS, plain_loss, torch_convolutions
from gls_lirpa.estimators import ESTIMATORS, PGPE
from gls_lirpa.losses import CertifiedLoss
from gls_lirpa.models import build_model
from gls_lirpa.relaxations import RELAXATIONS

EPS = 0.1
CLASSES = 10
PLAIN_SIZES = (2, 16, 64)
"""Batch sizes that plain auto_LiRPA may choose from besides the whole batch."""


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median time of a call after one to warm up."""
    work()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def stepped(criterion: Callable[..., Tensor], model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One training step on a batch, to be timed."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def run() -> None:
        optimizer.zero_grad()
        criterion(x, y).backward()
        optimizer.step()

    return run


def plain_seconds(model: nn.Module, relaxation: str, x: Tensor, y: Tensor, repeats: int) -> float:
    """A step of plain auto_LiRPA on the batch, cut into parts of whatever size suits it best."""
    bare = functools.partial(plain_loss, model, relaxation, eps=EPS, classes=CLASSES)
    found = []
    with torch_convolutions():
        for size in {*(n for n in PLAIN_SIZES if n < len(x)), len(x)}:
            found.append(seconds(stepped(bare, model, x[:size], y[:size]), repeats) * len(x) / size)
    return min(found)


@torch.no_grad()
def unstable_share(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Of the ReLUs, those that interval arithmetic leaves unstable: what crown computes rows for."""
    engine = BoundEngine(model, x)
    bounds = engine.bounds(linf_box(x, EPS), margin_spec(y, CLASSES), RELAXATIONS.get("ibp")).intermediate.values()
    return sum(int(((a < 0) & (b > 0)).sum()) for a, b in bounds) / sum(a.numel() for a, _ in bounds)


def measured(
    *, net: str, shape: tuple[int, ...], batch: int, population: int, repeats: int, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Seconds per step by relaxation and estimator, seconds of the plain loss, two actors over one, peak memory."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(batch, *shape, generator=generator), torch.arange(batch) % CLASSES
    steps: dict[str, dict[str, float]] = {}
    plain: dict[str, float] = {}
    evaluations: dict[str, float] = {}
    relaxations = [name for name in RELAXATIONS if RELAXATIONS.get(name).differentiable]
    total = len(relaxations) * (len(ESTIMATORS.names()) + 1) + 2
    done = 0
    for relaxation in relaxations:
        model = build_model(net, in_shape=shape, classes=CLASSES, seed=0)
        if relaxation in METHODS:
            plain[relaxation] = plain_seconds(model, relaxation, x, y, repeats)
        done += 1
        progress(done, total)
        steps[relaxation] = {}
        for estimator in ESTIMATORS:
            method = ESTIMATORS.get(estimator)
            given = {**method.recipe, **({} if method.members is None else {method.members: population})}
            criterion = method.build(CertifiedLoss(model, relaxation, eps=EPS), model, **given)
            steps[relaxation][estimator] = seconds(stepped(criterion, model, x, y), repeats)
            evaluations[estimator] = criterion.stats["evaluations"]
            done += 1
            progress(done, total)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    actors = {}
    for number in (1, 2):
        model = build_model(net, in_shape=shape, classes=CLASSES, seed=0)
        loss_ = CertifiedLoss(model, "crown", eps=EPS)
        with PGPE(loss_, model, sigma=1e-3, population=4 * population, actors=number) as pgpe:
            actors[str(number)] = seconds(stepped(pgpe, model, x, y), repeats)
        done += 1
        progress(done, total)
    return {
        "net": net,
        "batch": batch,
        "population": population,
        "steps": steps,
        "evaluations": evaluations,
        "plain": plain,
        "actors": actors,
        "memory_gib": memory,
        "unstable": unstable_share(build_model(net, in_shape=shape, classes=CLASSES, seed=0), x, y),
    }


def speed_sections(context: Context) -> list[Section]:
    """Measure (always anew) and tabulate."""
    settings = dict(context.suite.settings)
    rows = cost_rows()[: settings.pop("cost_rows", None)]
    sizes = settings.pop("cost_sizes", (2, 16))
    result = context.watched("speed", lambda progress: measured(**settings, progress=progress))
    result["costs"] = context.watched("costs", lambda progress: measured_costs(rows, sizes=sizes, progress=progress))
    replace_file(context.out / "speed.json", (json.dumps(result, indent=2) + "\n").encode())
    return sections_of(result)


def sections_of(result: dict[str, Any]) -> list[Section]:
    """The tables of one measurement."""
    population = result["population"]
    evaluations = result["evaluations"]
    names = ESTIMATORS.names()
    step_rows, rate_rows = [], []
    for relaxation, times in result["steps"].items():
        plain = result["plain"].get(relaxation)
        shown = "–" if plain is None else f"{1e3 * plain:.0f}"
        ratio = "–" if plain is None else f"{plain / times['grad']:.2f}"
        cells = [relaxation, shown, *(f"{1e3 * times[name]:.0f}" for name in names), ratio]
        step_rows.append(tuple(Entry(text) for text in cells))
        rates = [f"{evaluations[name] / times[name]:.1f}" for name in names]
        rate_rows.append(tuple(Entry(text) for text in (relaxation, *rates)))
    actors = result["actors"]
    text = (
        f"{result['net']}, batch {result['batch']}, population {population}, one thread; median wall clock after a "
        f"warm-up, all in one run. Untrained weights: {100 * result['unstable']:.0f} % of the ReLUs "
        f"are unstable. Peak memory of the process: {result['memory_gib']:.2f} GiB. "
        f"PGPE with crown and population {4 * population}: one actor {actors['1']:.2f} s, two actors "
        f"{actors['2']:.2f} s a step, {actors['1'] / actors['2']:.2f} times as fast."
    )
    header = ("relaxation", "plain auto_LiRPA", *names, "plain / grad")
    note = (
        "Milliseconds per step (loss, gradient, update). Plain: a BoundedModule made for the batch, as in auto_LiRPA's "
        "examples, with its defaults, in parts of the size that suits it best."
    )
    return [
        Section(
            "Speed",
            (text,),
            (
                Table("steps", header, tuple(step_rows), note=note),
                Table("evaluations", ("relaxation", *names), tuple(rate_rows), note="Loss evaluations per second."),
            ),
        ),
        Section("Training costs", tables=(cost_table(result["costs"]),)),
    ]

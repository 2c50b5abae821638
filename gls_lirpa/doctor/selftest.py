"""Do bounds hold? Random networks, random boxes, and the lowest values that can be found in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gls_lirpa.attacks import ascend, project
from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.doctor.operator_cases import CASES, CLASSES, Layer, random_network
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import EngineError, UnsupportedLayerError
from gls_lirpa.relaxations import RELAXATIONS, get_relaxation

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""How far a value may lie below its bound, relative to 1 + |value|: rounding, no more."""


@dataclass(frozen=True)
class Comparison:
    """``points`` that were compared with a bound, ``violations`` among them, or the reason of a refusal or failure."""

    points: int = 0
    violations: int = 0
    refusal: str = ""
    failure: str = ""

    @property
    def stopped(self) -> bool:
        return bool(self.refusal or self.failure)

    def and_(self, other: Comparison) -> Comparison:
        """Both together; a refusal or failure takes the place of what came before."""
        if other.stopped:
            return replace(other, violations=self.violations)
        return Comparison(self.points + other.points, self.violations + other.violations)


def lowest_points(model: nn.Module, box: Box, spec: Tensor, *, samples: int, steps: int, seed: int) -> Tensor:
    """Points (n, batch, …): random, corner, and descended to low values of the rows of ``spec``.

    >>> box = linf_box(torch.rand(2, 4), 0.1)
    >>> found = lowest_points(nn.Linear(4, 3), box, margin_spec(torch.tensor([0, 1]), 3), samples=8, steps=3, seed=0)
    >>> bool(((found >= box.lower) & (found <= box.upper)).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    width = box.upper - box.lower
    share = torch.rand(samples, *width.shape, generator=generator, dtype=width.dtype)
    share[: samples // 2] = share[: samples // 2].round()
    found = [box.lower + width * share, box.center.unsqueeze(0), box.lower.unsqueeze(0), box.upper.unsqueeze(0)]
    sizes = [1.0 if step < steps // 2 else 0.2 for step in range(steps)]
    for row in range(spec.shape[1]):
        start = box.lower + width * share[-1 - row % samples]
        point = ascend(model, start, spec[:, row], box, sizes=sizes, objective=lambda out, rows: -(rows * out).sum(1))
        found.append(point.unsqueeze(0))
    return project(torch.cat(found), box)


def violations(values: Tensor, lower: Tensor) -> int:
    """How many points have a value (points, batch, rows) below its bound (batch, rows).

    >>> violations(torch.tensor([[[1.0]], [[-1.0]]]), torch.tensor([[0.0]]))
    1
    """
    # Written so that a bound that is not a number counts as violated.
    held = values - lower >= -TOLERANCE[values.dtype] * (1 + values.abs())
    return int((~held).any(-1).sum())


def check_network(
    layer: Layer,
    image: bool,
    relaxations: Sequence[str],
    seed: int,
    *,
    samples: int = 64,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Comparison]:
    """One random network around ``layer``, bounded over boxes of three radii by several relaxations: they share the
    engine, as they do in a certification, and the points.

    >>> case = CASES["AvgPool2d"]
    >>> check_network(case.layer, case.image, ["crown"], 1)["crown"].violations
    0
    """
    model, shape = random_network(layer, seed, image=image)
    model = model.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, *shape, generator=generator, dtype=dtype)
    labels = torch.randint(CLASSES, (3,), generator=generator)
    spec = margin_spec(labels, CLASSES, dtype)
    try:
        engine = BoundEngine(model, x)
    except UnsupportedLayerError as error:
        return dict.fromkeys(relaxations, Comparison(refusal=str(error)))
    found = dict.fromkeys(relaxations, Comparison())
    for eps in (0.02, 0.15, 0.5):
        box = linf_box(x, eps)
        with torch.no_grad():
            points = lowest_points(model, box, spec, samples=samples, steps=8, seed=seed)
            logits = model(points.flatten(0, 1)).unflatten(0, points.shape[:2])
            values = (spec @ logits.unsqueeze(-1)).squeeze(-1)
        for name, before in found.items():
            if not before.stopped:
                found[name] = before.and_(_compared(engine, box, spec, name, values))
    return found


@torch.no_grad()
def _compared(engine: BoundEngine, box: Box, spec: Tensor, relaxation: str, values: Tensor) -> Comparison:
    method = get_relaxation(relaxation, iterations=3 if "iterations" in RELAXATIONS.get(relaxation).options else None)
    try:
        lower = engine.bounds(box, spec, method).lower
    except UnsupportedLayerError as error:
        return Comparison(refusal=str(error))
    except EngineError as error:
        return Comparison(failure=str(error))
    return Comparison(values.shape[0] * values.shape[1], violations(values, lower))


def operator_table(*, seeds: Sequence[int] = (1,)) -> Iterator[tuple[str, dict[str, str]]]:
    """For every operation what each relaxation does: ok, refused, partly (some attributes refused) or VIOLATED.

    A relaxation that fails in another way than by a refusal, or refuses what it should bound, has FAILED.
    """
    names = RELAXATIONS.names()
    for name, case in CASES.items():
        try:
            outcomes = [check_network(case.layer, case.image, names, seed, samples=32) for seed in seeds]
        except EngineError as error:
            outcomes = [dict.fromkeys(names, Comparison(failure=str(error)))]
        yield name, {m: _verdict([found[m] for found in outcomes], bounded=m in case.bounded) for m in names}


def _verdict(outcomes: Sequence[Comparison], *, bounded: bool) -> str:
    if any(outcome.violations for outcome in outcomes):
        return "VIOLATED"
    refused = sum(bool(outcome.refusal) for outcome in outcomes)
    if any(outcome.failure for outcome in outcomes) or (refused and bounded):
        return "FAILED"
    return "ok" if not refused else "refused" if refused == len(outcomes) else "partly"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Networks as small as these only lose by more, and lose hundredfold where other programs use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

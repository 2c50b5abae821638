"""Do bounds hold? Random networks, random boxes, and the lowest values that can be found in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gls_lirpa.attacks import ascend, project
from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.doctor.operator_cases import CASES, CLASSES, Layer, random_network
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import EngineError, UnsupportedLayerError
from gls_lirpa.relaxations import RELAXATIONS, Relaxation, get_relaxation

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""How far a value may lie below its bound, relative to 1 + |value|: rounding, no more."""


@dataclass(frozen=True)
class Comparison:
    """``points`` that were compared with a bound, ``violations`` among them, or the reason of a refusal."""

    points: int = 0
    violations: int = 0
    refusal: str = ""


def lowest_points(model: nn.Module, box: Box, spec: Tensor, *, samples: int, steps: int, seed: int) -> Tensor:
    """Points (n, batch, …): random, corner, and descended to low values of the rows of ``spec``.

    >>> box = linf_box(torch.rand(2, 4), 0.1)
    >>> found = lowest_points(nn.Linear(4, 3), box, margin_spec(torch.tensor([0, 1]), 3), samples=8, steps=3, seed=0)
    >>> bool(((found >= box.lower) & (found <= box.upper)).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    width = box.upper - box.lower
    place = torch.rand(samples, *width.shape, generator=generator, dtype=width.dtype)
    place[: samples // 2] = place[: samples // 2].round()
    found = [box.lower + width * place, box.center.unsqueeze(0), box.lower.unsqueeze(0), box.upper.unsqueeze(0)]
    sizes = [1.0 if step < steps // 2 else 0.2 for step in range(steps)]
    for row in range(spec.shape[1]):
        start = box.lower + width * place[-1 - row % samples]
        point = ascend(model, start, spec[:, row], box, sizes=sizes, objective=lambda out, rows: -(rows * out).sum(1))
        found.append(point.unsqueeze(0))
    return project(torch.cat(found), box)


def compared(
    model: nn.Module, engine: BoundEngine, box: Box, labels: Tensor, relaxation: Relaxation, *, samples: int, seed: int
) -> Comparison:
    """How many of the lowest points found lie below the relaxation's bounds of the margins."""
    spec = margin_spec(labels, engine.classes, box.lower.dtype)
    with torch.no_grad():
        try:
            lower = engine.bounds(box, spec, relaxation).lower
        except UnsupportedLayerError as error:
            return Comparison(refusal=str(error))
        points = lowest_points(model, box, spec, samples=samples, steps=8, seed=seed)
        logits = model(points.flatten(0, 1)).unflatten(0, points.shape[:2])
        values = (spec @ logits.unsqueeze(-1)).squeeze(-1)
    # Written so that a bound that is not a number counts as violated.
    held = values - lower >= -TOLERANCE[values.dtype] * (1 + values.abs())
    return Comparison(points.shape[0] * points.shape[1], int((~held).any(-1).sum()))


def run_case(
    name: str, relaxation: str, seed: int, *, samples: int = 64, dtype: torch.dtype = torch.float32
) -> Comparison:
    """One random network of a case, bounded over boxes of three radii.

    >>> run_case("AvgPool2d", "crown", 1).violations
    0
    """
    return check_network(CASES[name].layer, CASES[name].image, relaxation, seed, samples=samples, dtype=dtype)


def check_network(
    layer: Layer, image: bool, relaxation: str, seed: int, *, samples: int = 64, dtype: torch.dtype = torch.float32
) -> Comparison:
    """One random network around ``layer``, likewise."""
    model, shape = random_network(layer, seed, image=image)
    model = model.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, *shape, generator=generator, dtype=dtype)
    labels = torch.randint(CLASSES, (3,), generator=generator)
    try:
        engine = BoundEngine(model, x)
    except UnsupportedLayerError as error:
        return Comparison(refusal=str(error))
    method = get_relaxation(relaxation, iterations=3 if relaxation == "alpha-crown" else None)
    total = Comparison()
    for eps in (0.02, 0.15, 0.5):
        found = compared(model, engine, linf_box(x, eps), labels, method, samples=samples, seed=seed)
        if found.refusal:
            return found
        total = Comparison(total.points + found.points, total.violations + found.violations)
    return total


def operator_table(*, seeds: Sequence[int] = (1,)) -> Iterator[tuple[str, dict[str, str]]]:
    """For every operation what each relaxation does: ok, refused, partly (some attributes refused) or VIOLATED.

    A relaxation that fails in another way than by a refusal, or refuses what it should bound, has FAILED.
    """
    for name, case in CASES.items():
        row: dict[str, str] = {}
        for relaxation in RELAXATIONS:
            try:
                outcomes = [run_case(name, relaxation, seed, samples=32) for seed in seeds]
            except EngineError:
                row[relaxation] = "FAILED"
                continue
            refused = sum(bool(outcome.refusal) for outcome in outcomes)
            verdict = "ok" if not refused else "refused" if refused == len(outcomes) else "partly"
            if refused and relaxation in case.bounded:
                verdict = "FAILED"
            row[relaxation] = "VIOLATED" if any(outcome.violations for outcome in outcomes) else verdict
        yield name, row

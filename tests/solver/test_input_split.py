"""Splitting inputs: exact on tiny networks, sound at any limit, and the sub-boxes are all of the box."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box
from gls_lirpa.certification.api import certify
from gls_lirpa.certification.cascade import Cascade
from gls_lirpa.certification.complete import CompleteStage
from gls_lirpa.certification.settings import Settings
from gls_lirpa.certification.stage import OpenSamples, StageOptions, Subject
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.exchange.cases import Conjunction
from gls_lirpa.exchange.property import property_network
from gls_lirpa.solver import SolverSettings, input_split
from gls_lirpa.solver.sub_boxes import SubBoxes, clipped, halves
from tests.helpers.branch_problems import oracle

INPUTS, CLASSES = 3, 3


def _problem(seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Subject, OpenSamples]:
    torch.manual_seed(seed)
    layers = [nn.Linear(INPUTS, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, CLASSES)]
    model = nn.Sequential(*layers).to(dtype).eval().requires_grad_(False)
    for layer in model[::2]:
        layer.weight *= 2.5
    x = torch.rand(1, INPUTS, dtype=dtype)
    box = Box(x - 0.3, x + 0.3)
    open_rows = torch.full((1, CLASSES - 1), -torch.inf, dtype=dtype)
    label = model(x).argmax(1)
    samples = OpenSamples(torch.arange(1), x, label, box, open_rows, torch.zeros(1, CLASSES - 1).bool())
    return model, Subject(model, BoundEngine(model, x)), samples


def _margins(model: nn.Module, samples: OpenSamples, points: Tensor) -> Tensor:
    logits, label = model(points), int(samples.labels[0])
    return torch.stack([logits[:, label] - logits[:, j] for j in range(CLASSES) if j != label], 1)


def test_verdicts_of_the_exact_oracle() -> None:
    verdicts = []
    for seed in range(12):
        model, subject, samples = _problem(seed)
        exact = oracle(decide=False)(subject, samples, timeout=30.0)
        worst = float(exact.lower.min())
        cascade = Cascade(model, samples.x, Settings(0.0, ("input-split",), 30.0, cross_check=True))
        record = next(cascade.run(samples.x, samples.labels, box=samples.box))
        if abs(worst) > 1e-4:
            assert record.verdict == ("verified" if worst > 0 and exact.counterexamples == [None] else "falsified")
            verdicts.append(record.verdict)
        if record.verdict == "verified":
            assert record.bound is not None and record.bound <= worst + 1e-5
    assert set(verdicts) == {"verified", "falsified"} and len(verdicts) >= 10


@pytest.mark.parametrize("nodes", [1, 2, 3, 15, 101])
def test_bounds_hold_at_any_limit(nodes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    exhausted = 0
    for seed in range(6):
        model, subject, samples = _problem(seed)
        stage = CompleteStage("input-split", SolverSettings(max_nodes=nodes, input_batch=16, attack_starts=0))
        found = stage(subject, samples, timeout=30.0)
        box = samples.box
        corners = torch.cartesian_prod(*([torch.tensor([0.0, 1.0])] * INPUTS))
        shares = torch.cat([torch.rand(20_000, INPUTS, generator=generator), corners])
        points = box.lower + shares * (box.upper - box.lower)
        lowest = _margins(model, samples, points).amin(0)
        assert bool((found.lower[0] <= lowest + 1e-5).all())
        exhausted += found.exhausted[0]
        if found.counterexamples[0] is not None:
            point = found.counterexamples[0]
            assert bool(((point >= box.lower[0]) & (point <= box.upper[0])).all())
            assert float(_margins(model, samples, point[None]).min()) <= 0
    assert exhausted or nodes > 3


def test_more_nodes_give_better_bounds() -> None:
    _, subject, samples = _problem(1)
    settings = [SolverSettings(max_nodes=nodes, attack_starts=0) for nodes in (1, 51, 401)]
    bounds = [CompleteStage("input-split", s)(subject, samples, timeout=30.0).lower.min().item() for s in settings]
    assert bounds[0] < bounds[1] <= bounds[2]


def _sub_boxes(count: int, inputs: int, rows: int, seed: int) -> tuple[SubBoxes, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(count, inputs, generator=generator)
    high = low + torch.rand(count, inputs, generator=generator)
    bound = torch.randn(count, rows, generator=generator) - 0.5
    smear = torch.rand(count, inputs, generator=generator)
    return SubBoxes(low, high, bound, smear, torch.arange(count)), generator


def test_halves_are_the_whole() -> None:
    boxes, generator = _sub_boxes(1, 3, 1, 0)
    root, width = boxes, boxes.upper[0] - boxes.lower[0]
    for _ in range(8):
        children, possible = halves(boxes, width)
        count = len(boxes)
        assert bool(possible.all()) and len(children) == 2 * count
        first, second = children[torch.arange(count)], children[torch.arange(count, 2 * count)]
        assert torch.equal(first.lower, boxes.lower) and torch.equal(second.upper, boxes.upper)
        differs = first.upper != boxes.upper
        assert bool((differs.sum(1) == 1).all()) and torch.equal(first.upper[differs], second.lower[differs])
        assert torch.equal(second.lower[~differs], boxes.lower[~differs])
        boxes = children
    points = root.lower + torch.rand(500, 3, generator=generator) * (root.upper - root.lower)
    inside = (points[:, None] >= boxes.lower) & (points[:, None] <= boxes.upper)
    assert bool(inside.all(2).any(1).all())


def test_neighbouring_numbers_cannot_be_split() -> None:
    low = torch.ones(1, 2)
    high = torch.nextafter(low, torch.full_like(low, 2.0))
    box = SubBoxes(low, high, torch.zeros(1, 1), torch.ones(1, 2), torch.zeros(1).long())
    children, possible = halves(box, high[0] - low[0])
    assert len(children) == 0 and possible.tolist() == [False]


def test_a_sub_box_that_cannot_be_split_counts() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    model[2].bias[0] = 1e-6  # below what is aimed for, wherever x is
    x = torch.ones(1, 1)
    box = Box(x, torch.nextafter(x, 2 * x))
    samples = OpenSamples(torch.arange(1), x, torch.zeros(1).long(), box, -x, torch.zeros(1, 1).bool())
    found = CompleteStage("input-split")(Subject(model, BoundEngine(model, x)), samples, timeout=30.0)
    assert -1.0 <= found.lower.item() <= 1.001e-6 and found.exhausted == [False]


def test_what_is_clipped_was_proven() -> None:
    target, lost = 0.1, 0
    for seed in range(40):
        boxes, generator = _sub_boxes(5, 3, 2, seed)
        matrix = torch.randn(5, 2, 3, generator=generator)
        least = torch.minimum(matrix * boxes.lower[:, None], matrix * boxes.upper[:, None]).sum(2)
        offset = boxes.bound - least  # so that the functions' minima are the bounds
        smaller, changed = clipped(boxes, matrix, offset, target)
        assert bool((smaller.lower >= boxes.lower).all()) and bool((smaller.upper <= boxes.upper).all())
        lost += int(changed.sum())
        shares = torch.rand(2000, 5, 3, generator=generator)
        points = boxes.lower + shares * (boxes.upper - boxes.lower)
        outside = ((points < smaller.lower) | (points > smaller.upper)).any(2)
        values = torch.einsum("bri,nbi->nbr", matrix.double(), points.double()) + offset.double()
        safe = (values > target) | (boxes.bound > target)
        assert bool(safe.all(2)[outside].all())
        assert not bool(outside[:, ~changed].any())
    assert lost > 30


def test_fixed_inputs_and_points() -> None:
    model, _, samples = _problem(0)
    x, label = samples.x, samples.labels
    cascade = Cascade(model, x, Settings(0.0, ("input-split",), 5.0))
    assert next(cascade.run(x, label, box=Box(x, x))).verdict == "verified"
    lower, upper = x.clone(), x.clone()
    lower[0, 1] -= 1e-3
    assert next(cascade.run(x, label, box=Box(lower, upper))).verdict == "verified"


def test_a_network_that_overflows_is_unknown() -> None:
    model, _, samples = _problem(0)
    model[0].weight *= 1e30
    model[2].weight *= 1e30
    records = list(Cascade(model, samples.x, Settings(0.0, ("input-split",), 2.0)).run(samples.x, samples.labels))
    assert records[0].verdict != "verified"


def test_boxes_closed_too_early_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(input_split.AIM, torch.float32, -1e9)
    wrong = 0
    for seed in range(12):
        model, _, samples = _problem(seed)
        cascade = Cascade(model, samples.x, Settings(0.0, ("input-split",), 5.0))
        wrong += next(cascade.run(samples.x, samples.labels, box=samples.box)).verdict == "verified"
    assert wrong == 0  # their bounds are what the cascade judges, whatever the stage aims for


def test_left_out_where_many_inputs_vary() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    x = torch.rand(1, 1, 8, 8)
    records = certify(model, x, model(x).argmax(1), eps=0.3, stages=("input-split",))
    assert records[0].verdict == "unknown" and "input-split" not in records[0].spent
    few = x.clone()
    few[0, 0, 0, :4] += 0.01
    cascade = Cascade(model, x, Settings(0.0, ("input-split",)))
    assert next(cascade.run(x, model(x).argmax(1), box=Box(x, few))).verdict in ("verified", "falsified")


def test_disjunctions_of_conjunctions_against_a_grid() -> None:
    answers = []
    axis = torch.linspace(0, 1, 201)
    grid = torch.cartesian_prod(axis, axis)
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 3)).eval().requires_grad_(False)
        generator = np.random.default_rng(seed)
        unsafe = [Conjunction(generator.normal(size=(2, 3)), generator.normal(size=2) - 0.3) for _ in range(3)]
        network = property_network(model, unsafe)
        worst = float(-network(grid)[:, 1:].max())  # min over x and disjuncts of the largest row
        x = torch.full((1, 2), 0.5)
        box = Box(torch.zeros(1, 2), torch.ones(1, 2))
        options = StageOptions(max_nodes=20_000)
        cascade = Cascade(network, x, Settings(0.0, ("input-split",), 30.0, options=options))
        record = next(cascade.run(x, torch.zeros(1, dtype=torch.int64), box=box))
        if worst <= 0:
            assert record.verdict in ("falsified", "misclassified")
        elif worst > 0.05:  # more than the grid can miss
            assert record.verdict == "verified"
        answers.append(record.verdict)
    assert "verified" in answers and len(set(answers)) > 1


def test_float64_networks() -> None:
    model, _, samples = _problem(3, torch.float64)
    small = Box(samples.x - 1e-3, samples.x + 1e-3)
    cascade = Cascade(model, samples.x, Settings(0.0, ("input-split",), 30.0, options=StageOptions(max_nodes=999)))
    assert next(cascade.run(samples.x, samples.labels, box=small)).verdict == "verified"

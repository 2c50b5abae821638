from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.certification import certify
from gls_lirpa.certification.complete import CompleteStage
from gls_lirpa.certification.stage import OpenSamples
from gls_lirpa.errors import ConfigError, EngineError
from gls_lirpa.solver import SolverSettings
from gls_lirpa.solver.builder import FormBuilder
from gls_lirpa.solver.exact import minimise
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.tighten import tightened
from tests.helpers.branch_problems import oracle
from tests.helpers.exact_nets import KINDS, margins, problem, random_input, random_net
from tests.helpers.oracle import exact_margins


def _form(kind: str, seed: int, *, width: int = 6, eps: float = 0.3) -> tuple[nn.Module, torch.Tensor, SplitForm]:
    model, x = random_net(kind, seed, width=width), random_input(seed)
    spec = margin_spec(model(x).argmax(1), 3)[0]
    return model, x, FormBuilder(model, x).form(linf_box(x, eps), spec)


@pytest.mark.parametrize("kind", KINDS)
def test_the_split_form_is_the_network(kind: str) -> None:
    for seed in range(4):
        model, x, form = _form(kind, seed, width=12)
        t = torch.rand(200, form.inputs, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        inputs = form.point(t)
        expected = margins(model.double(), inputs, model(x.double()).argmax(1))
        tight = tightened(form, iterations=20)
        assert tight.neurons <= form.neurons
        for candidate in (form, tight):
            assert torch.allclose(candidate.evaluate(t), expected, atol=1e-9)


def test_pixels_that_cannot_move_are_no_variables() -> None:
    model, x = random_net("dense", 0, width=6), torch.zeros(1, 1, 2, 2)
    box = linf_box(x, 0.2)
    box.upper[0, 0, 0, 0] = 0.0
    form = FormBuilder(model, x).form(box, torch.eye(3))
    assert form.inputs == 3
    assert torch.allclose(form.evaluate(torch.ones(1, 3)).float(), model(box.upper), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_milp_is_the_minimum_over_all_patterns(kind: str) -> None:
    for seed in range(6):
        model, x, form = _form(kind, seed)
        box, label = linf_box(x, 0.3), model(x).argmax(1)
        exact = exact_margins(model, box, label)
        for row in range(2):
            for candidate in (form, tightened(form, iterations=10)):
                answer = minimise(candidate, row)
                assert answer.status == "optimal" and answer.t is not None
                assert abs(answer.bound - exact[row]) < 1e-5 and abs(answer.value - exact[row]) < 1e-5
                point = candidate.point(answer.t.unsqueeze(0)).float()
                assert (point >= box.lower - 1e-6).all() and (point <= box.upper + 1e-6).all()
                assert abs(float(margins(model, point, label)[0, row]) - exact[row]) < 1e-4


def test_bounds_that_are_too_narrow_would_be_noticed() -> None:
    """What the comparison with all patterns is worth: big-M constants 30 % too small change optima."""
    changed = 0
    for seed in range(6):
        _, _, form = _form("dense", seed)
        layers = tuple(replace(layer, lower=0.7 * layer.lower, upper=0.7 * layer.upper) for layer in form.layers)
        changed += minimise(replace(form, layers=layers), 0).bound > minimise(form, 0).bound + 1e-5
    assert changed >= 2


def test_early_stops_know_the_sign_only() -> None:
    _, _, form = _form("dense", 3)
    minimum = minimise(form, 0).bound
    above = minimise(form, 0, cutoff=minimum - 0.01)
    assert above.status == "above" and above.bound == minimum - 0.01 and above.t is None
    below = minimise(form, 0, target=minimum + 10.0)
    assert below.status in ("below", "optimal") and below.bound <= minimum + 1e-6 <= below.value + 2e-6
    assert minimise(form, 0, cutoff=minimum + 0.01).status == "optimal"


def test_splits_partition_the_minimum() -> None:
    for seed in range(8):
        _, _, form = _form("residual", seed)
        if form.neurons == 0:
            continue
        signs = torch.zeros(form.neurons, dtype=torch.int8)
        halves = []
        for sign in (-1, 1):
            signs[0] = sign
            halves.append(minimise(form, 1, signs=signs).bound)
        assert abs(min(halves) - minimise(form, 1).bound) < 1e-6
        leaves = [
            minimise(form, 1, signs=torch.tensor([1 if code >> bit & 1 else -1 for bit in range(form.neurons)]))
            for code in range(2**form.neurons)
        ]
        assert {leaf.status for leaf in leaves} <= {"optimal", "empty"}
        assert abs(min(leaf.bound for leaf in leaves) - minimise(form, 1).bound) < 1e-6


def test_stage_reports_bounds_and_replaying_counterexamples() -> None:
    for seed in range(6):
        model, x = random_net("normalized", seed, width=6), random_input(seed)
        subject, samples = problem(model, x, 0.4)
        minima = exact_margins(model, samples.box, samples.labels)
        found = oracle(decide=False)(subject, samples, timeout=20.0)
        decided = oracle()(subject, samples, timeout=20.0)
        assert found.exhausted == decided.exhausted == [False]
        for answer in (found, decided):
            assert (answer.lower.double() <= torch.from_numpy(minima) + 1e-5).all()
            counterexample = answer.counterexamples[0]
            assert (counterexample is not None) == (minima.min() < 0)
            if counterexample is None:
                assert (answer.lower > 0).all()
            else:
                assert float(margins(model, counterexample.unsqueeze(0), samples.labels).min()) < 0


def test_only_open_classes_are_touched() -> None:
    model, x = random_net("dense", 1, width=6), random_input(1)
    subject, samples = problem(model, x, 0.1)
    proven = torch.tensor([[True, False]])
    samples = OpenSamples(samples.indices, x, samples.labels, samples.box, samples.lower, proven)
    found = oracle()(subject, samples, timeout=10.0)
    assert found.lower[0, 0] == -torch.inf and math.isfinite(found.lower[0, 1])


def test_no_time_is_an_answer() -> None:
    model, x = random_net("dense", 1, width=20), random_input(1)
    subject, samples = problem(model, x, 0.5)
    started = time.monotonic()
    found = oracle()(subject, samples, timeout=0.0)
    assert time.monotonic() - started < 5.0
    assert found.exhausted == [True] and (found.lower == -torch.inf).all() and found.counterexamples == [None]


def test_refusals() -> None:
    model, x = random_net("dense", 0, width=6), random_input(0)
    subject, samples = problem(model, x, 0.1)
    with pytest.raises(ConfigError, match="up to 5 ReLUs, this one has 6"):
        CompleteStage("milp", SolverSettings(max_relus=5))(subject, samples, timeout=1.0)
    with pytest.raises(ConfigError, match="max_relus >= 1"):
        SolverSettings(max_relus=0)
    with pytest.raises(ConfigError, match="one sample"):
        FormBuilder(model, x).form(linf_box(x.repeat(2, 1, 1, 1), 0.1), torch.eye(3))
    with pytest.raises(ConfigError, match="max_mib"):
        FormBuilder(model, x, max_mib=0)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 2))
    image = torch.rand(1, 1, 8, 8)
    with pytest.raises(EngineError, match="unstable neurons over 64 inputs"):
        FormBuilder(wide, image, max_mib=1).form(linf_box(image, 1.0), torch.eye(2))


def test_a_missing_solver_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, form = _form("dense", 0)
    monkeypatch.setitem(__import__("sys").modules, "highspy", None)
    with pytest.raises(EngineError, match=r"need HiGHS: pip install .*highspy"):
        minimise(form, 0)


@pytest.mark.parametrize("size", [1e-6, 1e-9, 1e-10, 1e-12])
def test_small_weights_are_not_left_out(size: float) -> None:
    """f_0 − f_1 = 0.3 − relu(size · (x − 0.5)) / size, with coefficients and values below the solver's tolerances."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2))
    with torch.no_grad():
        for parameter, values in zip(
            model.parameters(), ([[size]], [-0.5 * size], [[-1 / size], [0.0]], [0.3, 0.0]), strict=True
        ):
            parameter.copy_(torch.tensor(values))
    x = torch.full((1, 1, 1, 1), 0.5)
    for eps, verdict in ((0.5, "falsified"), (0.25, "verified")):
        (record,) = certify(model, x, torch.tensor([0]), eps=eps, stages=["milp"], timeout=300)
        assert record.verdict == verdict and record.bound is not None and record.bound <= 0.3 - eps + 1e-4

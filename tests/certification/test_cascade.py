"""The cascade: no verdict may ever be wrong, and what is odd is unknown.

The reference is the exact minimum of each margin over the box: one LP for every pattern of ReLUs, read off
the weights. Mutations that made a test of this file fail: the sign of the numerical margin, no check of
finite bounds or against the value at the sample, no float64 recheck, its threshold 0, no observed rounding
error, boxes without clamping, slack in the box check, ties taken as robust, either half of the cross-check, no
comparison of a counterexample with bounds, open and proven classes or their columns mixed up, BatchNorm in
train mode, the network not copied, limits ignored or forgotten.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gls_lirpa.base.boxes import Bounds, crossed, linf_box
from gls_lirpa.certification import STAGES, Record, Summary, certify
from gls_lirpa.certification.incomplete import BoundStage
from gls_lirpa.certification.report import result_table
from gls_lirpa.certification.stage import OpenSamples, Subject
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.relaxations import Relaxation
from tests.helpers.cascade import (
    BOUNDING,
    CHEAP,
    FAST,
    INPUTS,
    Answer,
    claims,
    constant,
    exact_minimum,
    images,
    mlp,
)


@pytest.mark.parametrize("stages", [*((name,) for name in BOUNDING), ("pgd",), CHEAP], ids="+".join)
def test_no_verdict_is_wrong(exact_cases: list, stages: tuple[str, ...]) -> None:
    seen = set()
    for model, x, labels, eps, minima in exact_cases:
        for record, minimum in zip(
            certify(model, x, labels, eps=eps, stages=stages, options=FAST), minima, strict=True
        ):
            seen.add(record.verdict)
            if record.verdict == "verified":
                assert minimum > 0
            if record.verdict == "falsified":
                assert minimum <= 1e-6
            if record.bound is not None:
                assert record.bound <= minimum + 1e-5
    assert seen >= ({"falsified", "unknown"} if stages == ("pgd",) else {"verified"})


def test_all_that_is_decidable_is_decided_together(exact_cases: list) -> None:
    """Attack and bounds leave little open on networks this small, and both kinds occur."""
    records = [r for m, x, y, eps, _ in exact_cases for r in certify(m, x, y, eps=eps, stages=CHEAP, options=FAST)]
    verdicts = [record.verdict for record in records]
    assert verdicts.count("verified") >= 10 and verdicts.count("falsified") >= 5 and verdicts.count("unknown") <= 6


@pytest.mark.parametrize("stage", BOUNDING)
def test_verdicts_near_the_boundary(stage: str) -> None:
    """Shifting the label's bias puts the bound itself at given distances from zero."""
    model, x = mlp(7), images(1, seed=3)
    label = model(x).argmax(1)
    minimum = exact_minimum(model, x, int(label), 0.05)
    for distance in (-1e-3, -1e-6, -1e-8, 0.0, 1e-8, 1e-7, 1e-3):
        shifted = copy.deepcopy(model).double()
        with torch.no_grad():
            shifted[3].bias[label] += distance - minimum
        shifted = shifted.float()
        if int(shifted(x).argmax(1)) != int(label):
            continue
        (record,) = certify(shifted, x, label, eps=0.05, stages=[stage], options=FAST)
        assert record.verdict != "verified" or distance == 1e-3
        if stage in ("crown", "alpha-crown") and distance == 1e-3:
            assert record.verdict == "verified"


@pytest.mark.parametrize(
    ("margin", "verdict", "reason"),
    [(1e-4, "verified", ""), (2e-6, "verified", ""), (1.2e-7, "unknown", "numerical"), (-1.2e-7, "misclassified", "")],
)
@pytest.mark.parametrize("stage", BOUNDING)
def test_numerical_margin(stage: str, margin: float, verdict: str, reason: str) -> None:
    """A constant margin beside a bias of 0.5: proven in float32, in float64, and less than float32 can round."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.copy_(torch.tensor([0.5 + margin, 0.5]))
    (record,) = certify(model, images(1), torch.tensor([0]), eps=0.1, stages=[stage], options=FAST)
    assert (record.verdict, record.reason) == (verdict, reason)
    assert record.covers == ("float32, any summation order" if verdict == "verified" else "")


def test_hidden_cancellation_raises_the_numerical_margin() -> None:
    """Hidden values of 1e5 that cancel: in float32 the margin is 1e-4 everywhere, in truth −2e-4."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1e-4] * INPUTS, [0.0] * INPUTS]))
        model[1].bias.fill_(1e5)
        model[3].weight.copy_(torch.tensor([[-1.0, 1.0], [0.0, 0.0]]))
        model[3].bias.copy_(torch.tensor([1e-4, 0.0]))
    x, label = torch.ones(1, 1, 1, INPUTS), torch.tensor([0])
    assert model(x)[0, 0].item() > 0 > copy.deepcopy(model).double()(x.double())[0, 0].item()
    for stage in BOUNDING:
        (record,) = certify(model, x, label, eps=0.01, stages=[stage], options=FAST)
        assert record.verdict == "unknown"


def test_bounds_that_are_not_numbers_prove_nothing(register: Callable[[str, Answer], None]) -> None:
    x = images(4)
    for name, value in (("nan", torch.nan), ("inf", torch.inf)):
        register(f"test-{name}", claims(value))
        records = certify(constant(1.0, 0.0), x, torch.zeros(4).long(), eps=0.1, stages=[f"test-{name}"])
        assert [(r.verdict, r.bound) for r in records] == [("unknown", None)] * 4
        records = certify(constant(1.0, 0.0), x, torch.zeros(4).long(), eps=0.1, stages=[f"test-{name}", "ibp"])
        assert [(r.verdict, r.stage) for r in records] == [("verified", "ibp")] * 4


def test_a_bound_above_the_networks_own_value_proves_nothing(register: Callable[[str, Answer], None]) -> None:
    register("test-above", claims(1.01))
    x, y = images(4), torch.zeros(4).long()
    assert {r.verdict for r in certify(constant(1.0, 0.0), x, y, eps=0.1, stages=["test-above"])} == {"unknown"}
    assert {r.verdict for r in certify(constant(1.02, 0.0), x, y, eps=0.1, stages=["test-above"])} == {"verified"}


def test_crossed_intermediate_bounds_are_noticed() -> None:
    lower, upper = torch.zeros(4, 3), torch.ones(4, 3)
    lower[1, 2], lower[2, 0] = 1.01, torch.nan
    lower[3, 1] = 1 + 1e-6  # rounding
    bounds = Bounds(torch.ones(4, 1), {"a": (lower, upper)})
    assert crossed(bounds).tolist() == [False, True, True, False]
    stage = BoundStage(Relaxation("prepared", lambda engine, box, spec, statistics: bounds, light=True), batch=4)
    model, x = constant(1.0, 0.0), images(4)
    samples = OpenSamples(
        torch.arange(4), x, torch.zeros(4).long(), linf_box(x, 0.1), torch.zeros(4, 1), torch.zeros(4, 1).bool()
    )
    found = stage(Subject(model, BoundEngine(model, x)), samples, timeout=1.0)
    assert found.lower.flatten().tolist() == [1.0, -torch.inf, -torch.inf, 1.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_numbers(value: float) -> None:
    model = mlp(0)
    with torch.no_grad():
        model[1].weight[0, 0] = value
    records = certify(model, images(3), torch.zeros(3).long(), eps=0.1)
    assert [r.verdict for r in records if r.prediction == -1] == ["unknown"] * sum(r.prediction == -1 for r in records)
    assert "verified" not in {r.verdict for r in records} and "falsified" not in {r.verdict for r in records}
    assert value is not torch.nan or Summary.of(records).natural == 0.0


def test_infinite_weights_behind_finite_logits() -> None:
    """A bias of −inf only switches a neuron off, but bounds of such a network are not to be trusted."""
    model, x = mlp(0), images(3)
    with torch.no_grad():
        model[1].bias[0] = -torch.inf
    labels = model(x).argmax(1)
    assert bool(torch.isfinite(model(x)).all())
    records = certify(model, x, labels, eps=0.0, stages=CHEAP, options=FAST)
    assert {(r.verdict, r.stage) for r in records} == {("unknown", "natural")}


def test_overflow_is_unknown() -> None:
    """Finite weights, infinite logits."""
    model = mlp(0)
    with torch.no_grad():
        model[1].weight.fill_(3e38)
        model[3].weight.fill_(3e38)
    records = certify(model, images(3) * 0 + 1, torch.zeros(3).long(), eps=0.1, stages=CHEAP, options=FAST)
    assert {(r.verdict, r.prediction) for r in records} == {("unknown", -1)}


def test_an_attack_of_ones_own_counts_as_one(register: Callable[[str, Answer], None]) -> None:
    register("test-attacks", claims(-1.0))
    register("test-bounds", claims(-1.0))
    STAGES.get("test-attacks").attacks = True  # type: ignore[attr-defined]
    for stage, shown in (("test-attacks", "100.00 %"), ("test-bounds", "no attack"), ("test-missing", "no attack")):
        summary = Summary.of([Record(0, 1, 1, "unknown", stage, -0.5, {stage: 0.1})])
        names, values, *_ = (list(column.cells) for column in result_table(summary, title="").columns)
        assert values[names.index("adversarial accuracy")] == shown

"""The cascade on samples: the ball, counterexamples, limits, batches, bad input."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.certification import Cascade, Settings, StageOptions, Summary, certify
from gls_lirpa.certification.incomplete import open_classes
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from gls_lirpa.errors import ConfigError, ContradictionError, DataError, GLSError
from tests.helpers.cascade import (
    BOUNDING,
    CHEAP,
    CLASSES,
    FAST,
    INPUTS,
    Answer,
    claims,
    constant,
    images,
    mlp,
    verdicts,
)


def offers(point: Callable[[OpenSamples, int], Tensor]) -> Answer:
    """A stage that returns a point as counterexample of every sample."""

    def answer(subject: Subject, samples: OpenSamples) -> Findings:
        points: list[Tensor | None] = [point(samples, i) for i in range(len(samples))]
        return Findings(torch.full_like(samples.lower, -torch.inf), points, [False] * len(samples))

    return answer


def one_pixel(offset: float) -> nn.Sequential:
    """Margin of class 0: first pixel + offset."""
    model = constant(offset, 0.0)
    with torch.no_grad():
        model[1].weight[0, 0] = 1.0
    return model


@pytest.mark.parametrize("stages", [CHEAP, ("crown",)], ids="+".join)
def test_the_ball_ends_at_the_pixel_range(stages: tuple[str, ...]) -> None:
    """At pixel 0 the margin stays ≥ 0.05 only because pixels cannot be negative."""
    x = torch.zeros(1, 1, 1, INPUTS)
    (inside,) = certify(one_pixel(0.05), x, torch.tensor([0]), eps=0.1, stages=stages, options=FAST)
    assert inside.verdict == "verified" and inside.bound == pytest.approx(0.05, abs=1e-6)
    (open_end,) = certify(one_pixel(-0.05), x + 0.1, torch.tensor([0]), eps=0.1, stages=CHEAP, options=FAST)
    assert open_end.verdict == "falsified"
    assert open_end.adversarial is not None and float(open_end.adversarial.min()) >= 0.0


def test_radius_zero_is_the_prediction() -> None:
    model, x = mlp(1), images(20)
    labels = torch.arange(20) % CLASSES
    predictions = model(x).argmax(1)
    for stage in (*BOUNDING, "pgd"):
        records = certify(model, x, labels, eps=0.0, stages=[stage], options=FAST)
        right = "unknown" if stage == "pgd" else "verified"
        expected = [right if p == y else "misclassified" for p, y in zip(predictions, labels, strict=True)]
        assert [r.verdict for r in records] == expected
        assert [r.prediction for r in records] == predictions.tolist()


def test_a_tie_is_not_robust() -> None:
    x = images(1)
    (first,) = certify(constant(0.5, 0.5), x, torch.tensor([0]), eps=0.1, stages=["ibp"])
    assert (first.verdict, first.prediction) == ("falsified", 0)
    assert first.adversarial is not None and torch.equal(first.adversarial, x[0])
    (second,) = certify(constant(0.5, 0.5), x, torch.tensor([1]), eps=0.1, stages=["ibp"])
    assert second.verdict == "misclassified"


def test_counterexamples_replay_on_the_plain_network() -> None:
    model, x = mlp(4), images(20)
    labels = model(x).argmax(1)
    box = linf_box(x, 0.4)
    records = certify(model, x, labels, eps=0.4, stages=["pgd"])
    falsified = [r for r in records if r.verdict == "falsified"]
    assert len(falsified) >= 5
    for record in falsified:
        point = record.adversarial
        assert point is not None
        assert bool((point >= box.lower[record.index]).all() and (point <= box.upper[record.index]).all())
        logits = model(point[None])[0]
        assert bool((logits >= logits[record.label]).sum() >= 2)


def test_false_counterexamples_are_refused(register: Callable[[str, Answer], None]) -> None:
    """Outside the box by one unit in the last place, not misclassified, of another shape or dtype, or NaN."""
    x, y = torch.full((3, 1, 1, INPUTS), 0.5), torch.zeros(3).long()
    model = one_pixel(-0.4)  # broken exactly where the first pixel is ≤ 0.4, the lower end at eps 0.1
    lowest = linf_box(x, 0.1).lower[0]
    assert bool((model(lowest[None])[0, 0] <= 0).all())
    points = {
        "true": lowest,
        "outside": torch.nextafter(lowest, torch.tensor(-1.0)),
        "robust": x[0],
        "shape": lowest.flatten(),
        "dtype": lowest.double(),
        "nan": lowest * torch.nan,
    }
    for name, point in points.items():
        register(f"test-{name}", offers(lambda samples, i, point=point: point))
        verdicts = {r.verdict for r in certify(model, x, y, eps=0.1, stages=[f"test-{name}"])}
        assert verdicts == ({"falsified"} if name == "true" else {"unknown"})


def test_a_wrong_bound_is_caught_by_the_cross_check(
    register: Callable[[str, Answer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = one_pixel(-0.3), torch.full((2, 1, 1, INPUTS), 0.5)
    register("test-wrong", claims(0.1))  # at most −0.1 holds
    y = torch.zeros(2).long()
    assert {r.verdict for r in certify(model, x, y, eps=0.3, stages=["test-wrong"])} == {"verified"}
    for stages in (["test-wrong"], ["pgd", "test-wrong"]):  # attack the verified, bound the attacked
        with pytest.raises(ContradictionError, match="sample 0") as raised:
            certify(model, x, y, eps=0.3, stages=stages, cross_check=True)
        file = tmp_path / "contradiction-0.npz"
        assert file.name in str(raised.value)
        with np.load(file) as saved:
            assert int(saved["label"]) == 0 and float(saved["bounds"].max()) == pytest.approx(0.1)
            point = torch.from_numpy(saved["counterexample"])
            assert np.array_equal(saved["x"], x[0].numpy()) and float((point - x[0]).abs().max()) <= 0.3 + 1e-6
            assert worst(model, point) < 0.1
        file.unlink()


def worst(model: nn.Module, point: Tensor) -> float:
    logits = model(point[None])[0]
    return float((logits[0] - logits[1]).detach())


def test_an_impossible_bound_is_caught_by_the_cross_check(
    register: Callable[[str, Answer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    register("test-impossible", claims(5.0))
    with pytest.raises(ContradictionError, match="sample 0"):
        certify(constant(1.0, 0.0), images(1), torch.tensor([0]), eps=0.1, stages=["test-impossible"], cross_check=True)


def test_verified_and_attacked_is_a_failure_without_cross_check(
    register: Callable[[str, Answer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = one_pixel(-0.3), torch.full((2, 1, 1, INPUTS), 0.5)

    def both(subject: Subject, samples: OpenSamples) -> Findings:
        return Findings(torch.full_like(samples.lower, 0.1), list(samples.box.lower), [False] * len(samples))

    register("test-both", both)
    with pytest.raises(ContradictionError, match="sample 0"):
        certify(model, x, torch.zeros(2).long(), eps=0.3, stages=["test-both"])


def test_the_cross_check_agrees_with_sound_stages(exact_cases: list) -> None:
    for model, x, labels, eps, _ in exact_cases[2:5]:
        plain = certify(model, x, labels, eps=eps, stages=CHEAP, options=FAST)
        checked = certify(model, x, labels, eps=eps, stages=CHEAP, options=FAST, cross_check=True)
        assert [(r.verdict, r.stage) for r in plain] == [(r.verdict, r.stage) for r in checked]


def test_samples_do_not_depend_on_their_batch() -> None:
    model, x = mlp(4), images(30)
    labels = model(x).argmax(1)
    labels[::7] = (labels[::7] + 1) % CLASSES
    together = certify(model, x, labels, eps=0.15, stages=CHEAP, options=FAST)
    assert len({record.stage for record in together}) >= 4
    assert verdicts(certify(model, x, labels, eps=0.15, stages=CHEAP, options=FAST, batch_size=7)) == verdicts(together)


def test_only_open_classes_are_asked_for_again(register: Callable[[str, Answer], None]) -> None:
    """Two halves of a proof make one."""
    asked: list[list[list[bool]]] = []

    def second(subject: Subject, samples: OpenSamples) -> Findings:
        asked.append(samples.proven.tolist())
        return claims(torch.tensor([-5.0, 0.5]))(subject, samples)

    register("test-first", claims(torch.tensor([0.5, -5.0])))
    register("test-second", second)
    records = certify(
        constant(1.0, 0.0, 0.0), images(2), torch.zeros(2).long(), eps=0.1, stages=["test-first", "test-second"]
    )
    assert [(r.verdict, r.stage, r.bound) for r in records] == [("verified", "test-second", 0.5)] * 2
    assert asked == [[[True, False]] * 2]
    assert open_classes(torch.tensor([[True, False, True], [False, True, False]])).tolist() == [[1, 0], [0, 2]]


def test_stages_see_at_most_their_batch_and_open_samples_only(register: Callable[[str, Answer], None]) -> None:
    sizes: list[int] = []

    def first_half(subject: Subject, samples: OpenSamples) -> Findings:
        sizes.append(len(samples))
        lower = torch.where(samples.indices < 5, 0.5, -torch.inf).unsqueeze(1).expand_as(samples.lower)
        return Findings(lower.to(samples.lower), [None] * len(samples), [False] * len(samples))

    register("test-half", first_half)
    register("test-rest", first_half)
    certify(constant(1.0, 0.0), images(10), torch.zeros(10).long(), eps=0.1, stages=["test-half", "test-rest"])
    assert sizes == [4, 4, 2, 4, 1]


def test_limits_are_recorded(register: Callable[[str, Answer], None]) -> None:
    def stopped(subject: Subject, samples: OpenSamples) -> Findings:
        return Findings(torch.full_like(samples.lower, -0.25), [None] * len(samples), [True] * len(samples))

    register("test-stopped", stopped)
    x, y = images(1), torch.tensor([0])
    (record,) = certify(constant(1.0, 0.0), x, y, eps=0.1, stages=["test-stopped"])
    assert (record.verdict, record.exhausted, record.bound) == ("unknown", True, -0.25)
    (record,) = certify(constant(1.0, 0.0), x, y, eps=0.1, stages=["test-stopped", "ibp"])
    assert (record.verdict, record.exhausted) == ("verified", False)
    (late,) = certify(constant(1.0, 0.0), x, y, eps=0.1, stages=["ibp"], timeout=1e-12)
    assert (late.verdict, late.stage, late.exhausted) == ("unknown", "natural", True)


def test_a_stage_without_time_left_is_not_repeated_in_float64(register: Callable[[str, Answer], None]) -> None:
    kinds: list[torch.dtype] = []

    def slow(subject: Subject, samples: OpenSamples) -> Findings:
        kinds.append(samples.x.dtype)
        time.sleep(0.2)
        return Findings(torch.zeros_like(samples.lower), [None] * len(samples), [True] * len(samples))

    register("test-slow", slow)
    x, y = images(1), torch.tensor([0])
    for timeout, expected in ((60.0, [torch.float32, torch.float64]), (0.1, [torch.float32])):
        kinds.clear()
        (record,) = certify(constant(1.0, 0.0), x, y, eps=0.1, stages=["test-slow"], timeout=timeout)
        assert (record.verdict, kinds) == ("unknown", expected)


def test_the_network_is_never_modified() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, (1, 2)), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(4, CLASSES)
    ).train()
    model[1].running_mean.fill_(0.2)
    model[1].running_var.fill_(0.5)
    x = images(6)
    labels = copy.deepcopy(model).eval()(x).argmax(1)
    model[4].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trained = certify(model, x, labels, eps=0.02, stages=CHEAP, options=FAST)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, True, False, True]
    assert all(p.grad is None for p in model.parameters())
    assert verdicts(trained) == verdicts(certify(model.eval(), x, labels, eps=0.02, stages=CHEAP, options=FAST))
    assert {record.prediction == record.label for record in trained} == {True}


def test_float64_networks() -> None:
    model, x = mlp(2).double(), images(5).double()
    records = certify(model, x, model(x).argmax(1), eps=0.02, stages=("pgd", "ibp", "crown"), options=FAST)
    assert [record.verdict for record in records].count("verified") == 2
    single = certify(model.float(), x.float(), model(x.float()).argmax(1), eps=0.02, stages=("pgd", "ibp", "crown"))
    assert [record.verdict for record in records] == [record.verdict for record in single]


def test_no_samples() -> None:
    assert certify(mlp(0), images(0), torch.zeros(0).long(), eps=0.1) == []


def test_accuracies_are_ordered() -> None:
    model, x = mlp(4), images(40)
    summary = Summary.of(certify(model, x, torch.arange(40) % CLASSES, eps=0.1, stages=("pgd", "ibp"), options=FAST))
    assert 1 > summary.natural > summary.adversarial > summary.certified > 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"eps": -0.1}, ConfigError, r"eps must be .* got -0.1"),
        ({"eps": float("nan")}, ConfigError, "eps must be"),
        ({"eps": 1.5}, ConfigError, "eps must be"),
        ({"stages": ["crwn"]}, ConfigError, "did you mean 'crown'"),
        ({"stages": []}, ConfigError, "one or more different stages, got none"),
        ({"stages": ["crown", "deeppoly"]}, ConfigError, "different stages"),
        ({"timeout": 0.0}, ConfigError, "timeout > 0"),
        ({"timeout": float("nan")}, ConfigError, "timeout > 0"),
        ({"batch_size": 0}, ConfigError, "batch_size >= 1"),
        ({"y": torch.tensor([0, CLASSES])}, DataError, "labels must lie in 0…2"),
        ({"y": torch.tensor([0, -1])}, DataError, "labels must lie in"),
        ({"y": torch.tensor([0])}, DataError, "one label per image"),
        ({"x": images(2) * torch.nan}, DataError, "pixels in"),
        ({"x": images(2) + 0.6}, DataError, r"pixels in \[0, 1\]"),
        ({"x": images(2).double()}, DataError, "torch.float32"),
        ({"model": mlp(0).half()}, ConfigError, "float32 or float64 throughout"),
        ({"model": constant(1.0)}, ConfigError, "one logit per class"),
        ({"options": StageOptions(attack_steps=0)}, ConfigError, "steps >= 1"),
        ({"options": StageOptions(iterations=0)}, ConfigError, "iterations must be >= 1"),
    ],
)
def test_bad_input_is_one_clear_error(change: dict, error: type[GLSError], message: str) -> None:
    arguments = {"model": mlp(0), "x": images(2), "y": torch.tensor([0, 1]), "eps": 0.1, **change}
    with pytest.raises(error, match=message) as raised:
        certify(arguments.pop("model"), arguments.pop("x"), arguments.pop("y"), **arguments)
    assert "\n" not in str(raised.value)


def test_unsupported_layers_are_named() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 4), nn.GELU(), nn.Linear(4, 2))
    x = images(1)
    label = copy.deepcopy(model).eval()(x).argmax(1)
    with pytest.raises(GLSError, match="GELU"):
        certify(model, x, label, eps=0.1)


def test_dropout_is_nothing_to_a_network_under_certification() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    x = images(1)
    label = copy.deepcopy(model).eval()(x).argmax(1)
    (record,) = certify(model, x, label, eps=0.0)
    assert record.verdict == "verified" and model.training


def test_cascade_streams_as_samples_are_decided() -> None:
    """Cheap decisions are out before dear ones begin."""
    model, x = mlp(4), images(12)
    labels = model(x).argmax(1)
    labels[0] = (labels[0] + 1) % CLASSES
    cascade = Cascade(model, x, Settings(eps=0.1, stages=CHEAP, options=FAST))
    stream = [record.stage for record in cascade.run(x, labels)]
    order = {name: number for number, name in enumerate(("natural", *CHEAP))}
    assert stream[0] == "natural" and [order[s] for s in stream] == sorted(order[s] for s in stream)

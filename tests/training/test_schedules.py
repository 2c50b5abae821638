from __future__ import annotations

import math

import pytest

from gls_lirpa.errors import ConfigError
from gls_lirpa.training.schedules import EpsSchedule, StepDecay


@pytest.mark.parametrize("shape", ["smooth", "linear"])
def test_eps_is_monotone_and_ends_exactly_at_the_target(shape: str) -> None:
    eps = EpsSchedule(8 / 255, warmup_epochs=1, anneal_epochs=79, shape=shape)
    values = [eps.at(80 * k / 4000) for k in range(4001)]
    assert values == sorted(values)
    assert all(v == 0 for v in values[:51]) and values[51] > 0
    assert values[-1] == eps.at(80) == eps.at(1000) == 8 / 255
    assert values[-2] < 8 / 255
    assert eps.end == 80


def test_smooth_eps_has_power_four_then_a_line_and_no_kink() -> None:
    eps = EpsSchedule(1.0, anneal_epochs=4, shape="smooth")
    assert eps.at(0.5) / eps.at(0.25) == pytest.approx(16)
    assert eps.at(3) - eps.at(2) == pytest.approx(eps.at(2) - eps.at(1))
    h = 1e-6
    left = (eps.at(1.0) - eps.at(1.0 - h)) / h
    right = (eps.at(1.0 + h) - eps.at(1.0)) / h
    assert left == pytest.approx(right, rel=1e-4)
    # From a·(¼⁴ + 4·¼³·¾) = 1 follows ε(¼) = ¼⁴·a = 1/13.
    assert eps.at(1.0) == pytest.approx(1 / 13)


def test_eps_without_annealing_jumps_after_the_warmup() -> None:
    none = EpsSchedule(0.1, warmup_epochs=2, anneal_epochs=30, shape="none")
    assert (none.at(0), none.at(1.99), none.at(2), none.end) == (0.0, 0.0, 0.1, 2)
    assert EpsSchedule(0.1, anneal_epochs=0).at(0) == 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": -0.1}, "expected 0 <= eps <= 1, got -0.1"),
        ({"target": math.nan}, "expected 0 <= eps <= 1, got nan"),
        ({"target": 8.0}, "expected 0 <= eps <= 1, got 8.0"),
        ({"target": 0.1, "anneal_epochs": -1}, "expected anneal_epochs >= 0, got -1"),
        ({"target": 0.1, "warmup_epochs": math.inf}, "expected warmup_epochs >= 0, got inf"),
        ({"target": 0.1, "shape": "smoth"}, "did you mean 'smooth'"),
    ],
)
def test_bad_eps_schedule(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EpsSchedule(**arguments)  # type: ignore[arg-type]


def test_step_decay_of_the_paper() -> None:
    lr = StepDecay(5e-5, factor=0.2, milestones=[50, 60])
    assert [lr.at(e) for e in (0, 49.999)] == [5e-5, 5e-5]
    assert lr.at(50) == lr.at(59.999) == pytest.approx(1e-5)
    assert lr.at(60) == lr.at(70) == pytest.approx(2e-6)
    assert StepDecay(0.3).at(1e9) == 0.3
    assert hash(lr) == hash(StepDecay(5e-5, factor=0.2, milestones=(50, 60)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": -1.0}, "expected base >= 0, got -1.0"),
        ({"base": math.nan}, "expected base >= 0, got nan"),
        ({"base": 1.0, "factor": 0.0}, "expected 0 < factor <= 1, got 0.0"),
        ({"base": 1.0, "factor": 5}, "expected 0 < factor <= 1, got 5"),
        ({"base": 1.0, "milestones": (60, 50)}, "expected increasing milestones"),
        ({"base": 1.0, "milestones": (50, 50)}, "expected increasing milestones"),
        ({"base": 1.0, "milestones": (-1,)}, "expected milestones >= 0, got -1"),
    ],
)
def test_bad_step_decay(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepDecay(**arguments)  # type: ignore[arg-type]

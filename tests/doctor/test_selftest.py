"""The deep check of an installation: what it says of sound bounds, of wrong ones, and of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gls_lirpa.doctor import deep_report, operator_cases, selftest
from gls_lirpa.doctor.operator_cases import CASES
from gls_lirpa.doctor.selftest import check_network, one_thread, operator_table
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import EngineError
from gls_lirpa.relaxations import RELAXATIONS


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of the table: one that everything bounds, one that nothing does."""
    some = {name: CASES[name] for name in ("Linear", "GELU, SiLU, ELU")}
    monkeypatch.setattr(selftest, "CASES", some)
    monkeypatch.setattr(operator_cases, "CASES", some)


@pytest.mark.usefixtures("few")
def test_the_table_of_a_sound_installation(capsys: pytest.CaptureFixture[str]) -> None:
    rows = dict(operator_table())
    assert set(rows["Linear"].values()) == {"ok"} and set(rows["GELU, SiLU, ELU"].values()) == {"refused"}
    assert list(rows["Linear"]) == RELAXATIONS.names()
    assert deep_report()
    assert "Do not use" not in capsys.readouterr().out


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("wrong", ["too high", "not a number", "an error"])
def test_a_bound_that_is_wrong_in_one_relaxation_is_seen(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = BoundEngine.bounds

    def bounds(self: BoundEngine, box: Any, spec: Any, relaxation: Any, **options: Any) -> Any:
        found = right(self, box, spec, relaxation, **options)
        if relaxation.name == "crown":
            if wrong == "an error":
                raise EngineError("broken")
            found.lower.add_(10.0) if wrong == "too high" else found.lower.fill_(torch.nan)
        return found

    monkeypatch.setattr(BoundEngine, "bounds", bounds)
    row = dict(operator_table())["Linear"]
    assert row.pop("crown") == ("FAILED" if wrong == "an error" else "VIOLATED")
    assert set(row.values()) == {"ok"}
    assert not deep_report()
    assert "Do not use this installation" in capsys.readouterr().out


def test_a_refusal_of_what_should_be_bounded_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    gelu = CASES["GELU, SiLU, ELU"]
    claimed = operator_cases.OperatorCase(gelu.layer, accepted=lambda r: r.name == "crown")
    monkeypatch.setattr(selftest, "CASES", {"GELU": claimed})
    row = dict(operator_table())["GELU"]
    assert row["crown"] == "FAILED" and row["ibp"] == "refused"


def test_every_relaxation_sees_every_point() -> None:
    found = check_network(CASES["Linear"].layer, False, ["ibp", "crown"], 1, samples=16)
    # Three radii, three samples, and per sample 16 random points, centre, both ends and one descent per margin.
    assert {name: outcome.points for name, outcome in found.items()} == dict.fromkeys(("ibp", "crown"), 3 * 3 * 21)


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before

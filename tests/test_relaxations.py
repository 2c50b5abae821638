"""The table of relaxations."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from gls_lirpa.base.boxes import Bounds, linf_box
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import ConfigError
from gls_lirpa.relaxations import RELAXATIONS, Relaxation, get_relaxation
from tests.helpers import networks
from tests.helpers.bounding import relaxation


def test_names_and_aliases() -> None:
    names = ["ibp", "hbox", "crown-ibp", "crown", "crown-plain", "alpha-crown", "alpha-crown-step"]
    assert RELAXATIONS.names() == names
    for alias, name in {"DeepPoly": "crown", "box": "ibp", "α-crown": "alpha-crown", "CROWN_IBP": "crown-ibp"}.items():
        assert get_relaxation(alias).name == name
    with pytest.raises(ConfigError, match=r"unknown relaxation 'crwn'.*did you mean 'crown'"):
        get_relaxation("crwn")


def test_only_slope_optimisation_has_no_gradient() -> None:
    found = {name: RELAXATIONS.get(name).differentiable for name in RELAXATIONS}
    assert found == {name: not name.startswith("alpha") for name in RELAXATIONS}


def test_iterations_belong_to_alpha_crown() -> None:
    model = networks.build("conv")
    x, y = networks.batch("conv", 2)
    engine, box = BoundEngine(model, x), linf_box(x, 0.1)
    few = engine.margins(box, y, get_relaxation("alpha-crown", iterations=1))
    many = engine.margins(box, y, get_relaxation("alpha-crown", iterations=6))
    assert (many - few).max() > 1e-4
    for name, iterations in (("crown", 3), ("alpha-crown", 0), ("alpha-crown-step", 2)):
        with pytest.raises(ConfigError, match="iterations must be >= 1"):
            get_relaxation(name, iterations=iterations)


def test_records_survive_pickling() -> None:
    model = networks.build("mlp")
    x, y = networks.batch("mlp", 2)
    engine = BoundEngine(model, x)
    for name in RELAXATIONS:
        copied = pickle.loads(pickle.dumps(relaxation(name)))
        expected = engine.margins(linf_box(x, 0.1), y, relaxation(name))
        assert torch.equal(engine.margins(linf_box(x, 0.1), y, copied), expected)


def test_a_relaxation_of_ones_own_is_one_small_object() -> None:
    def better(engine: BoundEngine, box: object, spec: torch.Tensor, statistics: dict) -> Bounds:
        first = RELAXATIONS.get("ibp").bound(engine, box, spec, statistics)
        second = RELAXATIONS.get("crown").bound(engine, box, spec, statistics)
        return replace(second, lower=torch.maximum(first.lower, second.lower))

    own = Relaxation("better", better)
    model = networks.build("conv")
    x, y = networks.batch("conv", 3)
    engine, box = BoundEngine(model, x, chunk_mib=0), linf_box(x, 0.1)
    found = engine.margins(box, y, own)
    expected = torch.maximum(engine.margins(box, y, relaxation("ibp")), engine.margins(box, y, relaxation("crown")))
    assert torch.allclose(found, expected, atol=1e-6)
    found.sum().backward()
    assert model[0].weight.grad is not None
    with torch.no_grad():
        assert torch.allclose(engine.margins(box, y, own), expected, atol=1e-5)


def test_slope_optimisation_neither_prints_nor_stops_early_with_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """auto_LiRPA's own early stop looks at all samples together, and says so on the screen."""
    model = networks.build("mlp")
    x, y = networks.batch("mlp", 3)
    engine, box = BoundEngine(model, x), linf_box(x, 0.2)
    long = get_relaxation("alpha-crown", iterations=30)
    together = engine.margins(box, y, long)
    for i in range(3):
        assert torch.allclose(engine.margins(box[i : i + 1], y[i : i + 1], long)[0], together[i], atol=1e-5)
    assert capsys.readouterr().out == ""

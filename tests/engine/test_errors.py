"""Bad input and networks that cannot be bounded: one clear error each, never a wrong number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, check_eps, check_labels, linf_box, margin_spec, other_classes
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import ConfigError, DataError, EngineError, UnsupportedLayerError
from gls_lirpa.relaxations import RELAXATIONS
from tests.helpers import networks
from tests.helpers.bounding import margins_at, relaxation

METHODS = RELAXATIONS.names()


def around(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3))


@pytest.mark.parametrize("layer", [nn.Softsign(), nn.ELU(), nn.Softmax(1), nn.LayerNorm(5), nn.SiLU(), nn.Softplus()])
def test_unsupported_layers_are_named(layer: nn.Module) -> None:
    with pytest.raises(UnsupportedLayerError) as caught:
        BoundEngine(around(layer), torch.rand(2, 4))
    assert f"'1' ({type(layer).__name__})" in str(caught.value)
    assert "supported are Linear, Conv2d" in str(caught.value)


def test_a_product_of_two_perturbed_values_is_refused() -> None:
    class Squared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    with pytest.raises(UnsupportedLayerError, match=r"(Mul|Sqr) in layer '1' \(Squared\)"):
        BoundEngine(around(Squared()), torch.rand(2, 4))


def test_dropout_is_refused_in_train_mode_alone() -> None:
    model, x, y = around(nn.Dropout(0.5)), torch.rand(2, 4), torch.tensor([0, 2])
    with pytest.raises(UnsupportedLayerError, match=r"layer '1' \(Dropout\).*train mode.*nn.Identity"):
        BoundEngine(model, x)
    engine = BoundEngine(model.eval(), x)
    for method in METHODS:
        found = engine.margins(linf_box(x, 0.0), y, relaxation(method))
        assert torch.allclose(found, margins_at(model, x, y), atol=1e-5), method
    model.train()
    with pytest.raises(UnsupportedLayerError, match=r"layer '1' \(Dropout\).*train mode"):
        engine.margins(linf_box(x, 0.0), y, relaxation("ibp"))


def test_batchnorm_without_running_statistics_is_refused() -> None:
    with pytest.raises(UnsupportedLayerError, match="track_running_stats=True"):
        BoundEngine(around(nn.BatchNorm1d(5, track_running_stats=False)), torch.rand(2, 4))


def test_batchnorm_used_twice_is_refused_in_train_mode() -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.ReLU(), nn.Linear(4, 4), shared, nn.ReLU(), nn.Linear(4, 3))
    x, y = torch.rand(3, 4), torch.tensor([0, 1, 2])
    engine = BoundEngine(model, x)
    with pytest.raises(UnsupportedLayerError, match="runs twice"):
        engine.margins(linf_box(x, 0.1), y, relaxation("crown"))
    model.eval()
    lower = engine.margins(linf_box(x, 0.0), y, relaxation("crown"))
    assert torch.allclose(lower, (margin_spec(y, 3) @ model(x).unsqueeze(-1)).squeeze(-1), atol=1e-5)


@pytest.mark.parametrize("layer", [nn.MaxPool2d(2), nn.Tanh(), nn.Sigmoid()])
def test_hbox_names_what_only_the_others_know(layer: nn.Module) -> None:
    size = 36 if isinstance(layer, nn.MaxPool2d) else 144
    model = nn.Sequential(networks.conv(), layer, nn.Flatten(), nn.Linear(size, 3))
    x, y = networks.batch("conv", 2)
    engine = BoundEngine(model, x)
    with pytest.raises(UnsupportedLayerError, match=rf"hbox cannot bound.*'1' \({type(layer).__name__}\)"):
        engine.margins(linf_box(x, 0.1), y, relaxation("hbox"))
    assert engine.margins(linf_box(x, 0.1), y, relaxation("ibp")).isfinite().all()


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan"), float("inf"), -float("inf")])
def test_eps_must_be_a_radius_in_pixel_space(bad: float) -> None:
    with pytest.raises(ConfigError, match=r"eps must be a number in \[0, 1\]"):
        check_eps(bad)
    with pytest.raises(ConfigError, match=r"eps must be a number in \[0, 1\]"):
        linf_box(torch.rand(1, 4), bad)


def test_specifications_of_margins() -> None:
    labels = torch.tensor([0, 2, 1])
    assert other_classes(labels, 3).tolist() == [[1, 2], [0, 1], [0, 2]]
    logits = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    margins = (margin_spec(labels, 3) @ logits.unsqueeze(-1)).squeeze(-1)
    assert margins.tolist() == [[-1.0, -3.0], [3.0, 2.0], [1.0, -2.0]]
    assert margin_spec(labels.int(), 3, torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0]), torch.tensor([[0], [1]])]
)
def test_bad_labels(labels: Tensor) -> None:
    engine = BoundEngine(networks.build("mlp"), torch.rand(1, 4))
    for call in (
        lambda: check_labels(labels, 3),
        lambda: other_classes(labels, 3),
        lambda: margin_spec(labels, 3),
        lambda: engine.margins(linf_box(torch.rand(2, 4), 0.1), labels, relaxation("ibp")),
    ):
        with pytest.raises(DataError, match="label"):
            call()


def test_shapes_that_do_not_fit() -> None:
    model = networks.build("mlp")
    x, y = networks.batch("mlp", 3)
    engine = BoundEngine(model, x)
    box = linf_box(x, 0.1)
    ibp = relaxation("ibp")
    with pytest.raises(DataError, match="expected 3 labels"):
        engine.margins(box, y[:2], ibp)
    with pytest.raises(DataError, match=r"specification of shape \(3, rows, 3\)"):
        engine.bounds(box, torch.ones(3, 2, 4), ibp)
    with pytest.raises(DataError, match="empty batch"):
        engine.margins(box[:0], y[:0], ibp)
    with pytest.raises(EngineError, match="make a new BoundEngine"):
        engine.margins(linf_box(torch.rand(3, 5), 0.1), y, ibp)
    with pytest.raises(EngineError, match="make a new BoundEngine"):
        engine.margins(linf_box(x.double(), 0.1), y, ibp)
    with pytest.raises(DataError, match="floating-point"):
        linf_box(torch.ones(1, 4, dtype=torch.uint8), 0.1)
    with pytest.raises(DataError, match="floating-point"):
        BoundEngine(model, torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(EngineError, match=r"cannot take inputs of shape \(5,\)"):
        BoundEngine(model, torch.rand(1, 5))
    with pytest.raises(EngineError, match="one row of logits"):
        BoundEngine(nn.Sequential(nn.Conv2d(2, 3, 3)), torch.rand(1, *networks.IMAGE))
    with pytest.raises(ConfigError, match="chunk_mib"):
        BoundEngine(model, x, chunk_mib=-1)


def test_replaced_layers_need_a_new_engine() -> None:
    model = networks.build("mlp")
    x, y = networks.batch("mlp", 3)
    engine = BoundEngine(model, x)
    model[0] = nn.Linear(4, 6)
    assert not engine.fits(x)
    with pytest.raises(EngineError, match="make a new BoundEngine"):
        engine.margins(linf_box(x, 0.1), y, relaxation("ibp"))


@pytest.mark.parametrize("method", METHODS)
def test_not_a_number_stays_so_and_does_not_spread(method: str) -> None:
    model = networks.build("conv")
    x, y = networks.batch("conv", 3)
    engine, box = BoundEngine(model, x), linf_box(x, 0.1)
    expected = engine.margins(box, y, relaxation(method)).detach()
    broken = Box(box.lower.clone(), box.upper.clone())
    broken.lower[1, 0, 2, 2] = broken.upper[1, 0, 2, 2] = torch.nan
    found = engine.margins(broken, y, relaxation(method)).detach()
    assert found[1].isnan().all()
    assert torch.allclose(found[[0, 2]], expected[[0, 2]], atol=1e-5)
    with torch.no_grad():
        model[2].bias[0] = torch.nan
    assert not engine.margins(box, y, relaxation(method)).isfinite().any()


class Remembering(nn.Module):
    """What it does with the number of its calls is said by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.calls = nn.Linear(4, 3), how, 0
        self.register_buffer("count", torch.zeros(()))
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "buffer":
            self.count.add_(1)
        elif self.how == "replaced":
            self.count = self.count + 1
        elif self.how == "number":
            self.calls += 1
        elif self.how == "random":
            return self.layer(x) + torch.rand(3)
        elif self.how == "kept":
            self.kept = x * 2.0
        return self.layer(x)


@pytest.mark.parametrize(
    ("how", "message"),
    [("buffer", "'count'"), ("replaced", "'count'"), ("number", "'calls'"), ("random", "another output")],
)
def test_networks_that_change_by_being_called_are_refused(how: str, message: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=message) as caught:
        BoundEngine(Remembering(how).eval(), torch.rand(2, 4))
    assert "\n" not in str(caught.value)


def test_a_network_may_keep_what_it_computed() -> None:
    BoundEngine(Remembering("kept").eval(), torch.rand(2, 4))


def test_a_specification_that_is_none() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.rand(1, 4)
    with pytest.raises(DataError, match="expected a specification, a tensor"):
        BoundEngine(model, x).bounds(linf_box(x, 0.1), None, RELAXATIONS.get("ibp"))

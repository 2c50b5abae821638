"""HBox against IBP, an independent dense reference, and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.boxes import Box, linf_box, margin_spec
from tests import networks
from tests.bounding import engine, relaxation


@pytest.mark.parametrize("eps", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("name", [name for name in networks.NETWORKS if name != "sum-out"])
def test_hbox_lies_within_ibp(name: str, eps: float) -> None:
    """Both merge the specification into a final linear layer, which "sum-out" does not have."""
    x, y = networks.batch(name, 4)
    box, spec = linf_box(x, eps), margin_spec(y, 3)
    with torch.no_grad():
        ours = engine(name).bounds(box, spec, relaxation("hbox"))
        ibp = engine(name).bounds(box, spec, relaxation("ibp"))
    tolerance = 1e-5 * (1 + ibp.lower.abs())
    assert (ours.lower >= ibp.lower - tolerance).all()
    for node, (low, high) in ours.intermediate.items():
        ibp_low, ibp_high = ibp.intermediate[node]
        assert (low >= ibp_low - 1e-5 * (1 + ibp_low.abs())).all()
        assert (high <= ibp_high + 1e-5 * (1 + ibp_high.abs())).all()


def dense_reference(model: nn.Sequential, box: Box, row: Tensor) -> Tensor:
    """The definition for Linear–ReLU chains, one sample, row and neuron at a time."""
    c, a = box.center[0], torch.diag((box.upper - box.lower)[0] / 2)  # a: (features, error terms of the input)
    free = torch.zeros_like(c)  # the radius that belongs to no error term
    layers = list(model)
    for layer in layers[:-1]:
        if isinstance(layer, nn.Linear):
            c, a, free = layer.weight @ c + layer.bias, layer.weight @ a, layer.weight.abs() @ free
            continue
        total = a.abs().sum(1) + free
        for j in range(len(c)):
            low, high = c[j] - total[j], c[j] + total[j]
            if high <= 0:
                c[j], a[j], free[j] = 0.0, 0.0, 0.0
            elif low < 0:
                c[j], a[j], free[j] = high / 2, 0.0, high / 2
    matrix = row @ layers[-1].weight
    return matrix @ c + row @ layers[-1].bias - (matrix @ a).abs().sum() - matrix.abs() @ free


@pytest.mark.parametrize("eps", [0.05, 0.3])
def test_hbox_against_a_dense_reference(eps: float) -> None:
    torch.manual_seed(1)
    model = networks.mlp((4, 7, 6, 5, 3))
    x, y = networks.batch("mlp", 4)
    box, spec = linf_box(x, eps), margin_spec(y, 3)
    with torch.no_grad():
        bounds = BoundEngine(model, x).bounds(box, spec, relaxation("hbox"))
        unstable = [((low < 0) & (high > 0)).any() for low, high in bounds.intermediate.values()]
        assert any(unstable) or eps < 0.1
        for i in range(4):
            for row in range(2):
                expected = dense_reference(model, box[i : i + 1], spec[i, row])
                assert bounds.lower[i, row].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("name", ["conv", "residual", "batchnorm"])
def test_chunks_change_nothing(name: str) -> None:
    model = networks.build(name)
    x, y = networks.batch(name, 5)
    box = linf_box(x, 0.1)
    whole, single = BoundEngine(model, x), BoundEngine(model, x, chunk_mib=0)
    with torch.no_grad():
        expected = whole.margins(box, y, relaxation("hbox"))
        assert single.chunk_size(relaxation("hbox"), box, margin_spec(y, 3), {}) == 1
        assert torch.allclose(single.margins(box, y, relaxation("hbox")), expected, atol=1e-5)


def test_gradient_in_the_box_against_finite_differences() -> None:
    model = networks.build("mlp").double()
    x, y = networks.batch("mlp", 2)
    x = x.double() * 0.6 + 0.2
    bound_engine = BoundEngine(model, x)

    def bound(lower: Tensor, upper: Tensor) -> Tensor:
        return bound_engine.margins(Box(lower, upper), y, relaxation("hbox"))

    ends = ((x - 0.1).requires_grad_(), (x + 0.1).requires_grad_())
    assert torch.autograd.gradcheck(bound, ends, eps=1e-6, atol=1e-6)


def test_a_nan_stays_visible() -> None:
    model = networks.build("conv")
    x, y = networks.batch("conv", 2)
    with torch.no_grad():
        model[2].bias[0] = torch.nan
    assert engine("conv").fits(x)
    assert BoundEngine(model, x).margins(linf_box(x, 0.1), y, relaxation("hbox")).isnan().all()

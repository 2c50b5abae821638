"""HBox against IBP, an independent dense reference, its own full form, and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.hbox import hbox_bounds
from gls_lirpa.engine.hbox_dense import Dense
from gls_lirpa.engine.hbox_windows import Windows
from tests.helpers import networks
from tests.helpers.bounding import engine, relaxation


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


WIDE = (3, 19, 13)


class Ramp(nn.Module):
    """Times a constant that differs by column, whose first is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)


def windowed() -> dict[str, nn.Module]:
    """Bodies on images of the shape WIDE, with odd strides and paddings and with ends of the windowed form."""
    relu, conv = nn.ReLU, nn.Conv2d
    block = nn.Sequential(conv(4, 4, 3, padding=1), relu(), nn.BatchNorm2d(4), conv(4, 4, 1))
    return {
        "two": nn.Sequential(conv(3, 4, 5, 2, 2), relu(), conv(4, 5, 4, 2, 1), relu()),
        "odd": nn.Sequential(conv(3, 4, (3, 2), (3, 2), (2, 1)), relu(), conv(4, 2, (1, 3), (2, 1), (0, 2)), relu()),
        "three": nn.Sequential(
            conv(3, 2, 3, 2), relu(), conv(2, 3, 2, 1, 1, bias=False), relu(), conv(3, 2, 2, 2, 1), relu()
        ),
        "cropped": nn.Sequential(conv(3, 2, 2, 5), relu(), conv(2, 2, 1, 2), relu()),
        "linear-chain": nn.Sequential(conv(3, 3, 3, padding=1), conv(3, 3, 3, padding=2, groups=3), relu()),
        "too-large": nn.Sequential(conv(3, 2, 5, 2, 2), relu(), conv(2, 2, 5, 2, 2), relu(), conv(2, 2, 3), relu()),
        "dilated": nn.Sequential(conv(3, 2, 3, padding=1), relu(), conv(2, 2, 3, 2, dilation=2), relu()),
        "pooled": nn.Sequential(conv(3, 4, 3), relu(), nn.AvgPool2d((3, 2), (2, 1), (1, 0)), conv(4, 2, 2), relu()),
        "normalised": nn.Sequential(nn.BatchNorm2d(3), conv(3, 4, 3, 2), nn.BatchNorm2d(4), relu(), conv(4, 2, 3)),
        "residual": nn.Sequential(conv(3, 4, 3, 2, 1), relu(), networks.Residual(block, -1), conv(4, 2, 2)),
        "from-the-input": nn.Sequential(networks.Residual(conv(3, 3, 3, padding=1), 1), conv(3, 2, 3, 2), relu()),
        "ramp": nn.Sequential(Ramp(), conv(3, 2, 3, 2, 1), Ramp(), relu(), Ramp(), conv(2, 2, 3), relu()),
        "pixels": nn.Identity(),
    }


def compared(model: nn.Module, box: Box, spec: Tensor, tolerance: float) -> None:
    """Bounds, pre-activations and gradients in the weights and the box, with windows and in full."""
    nodes = BoundEngine(model, box.lower.detach()).graph()
    wanted = [*model.parameters(), box.lower, box.upper]
    values, gradients = [], []
    for windows in (True, False):
        bounds = hbox_bounds(nodes, box, spec, windows=windows)
        values.append([bounds.lower, *(end for pair in bounds.intermediate.values() for end in pair)])
        weights = torch.linspace(0.5, 1.5, bounds.lower.numel()).to(spec).view_as(bounds.lower)
        total = (bounds.lower * weights).sum() + sum((value**2).mean() for value in values[-1])
        gradients.append(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))
    for one, other in [*zip(*values, strict=True), *zip(*gradients, strict=True)]:
        assert one.shape == other.shape
        assert (one - other).abs().max() <= tolerance * (1 + other.abs().max())


def some_box(x: Tensor) -> Box:
    """Radii that differ by sample and pixel, some of them 0."""
    radius = torch.rand_like(x) * torch.linspace(0.02, 0.2, len(x)).to(x).view(-1, 1, 1, 1)
    radius = torch.where(torch.rand_like(x) < 0.2, 0.0, radius)
    return Box((x - radius).clamp(0, 1).requires_grad_(), (x + radius).clamp(0, 1).requires_grad_())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("hidden", [None, 4, 400])
@pytest.mark.parametrize("name", windowed())
def test_windows_change_nothing(name: str, hidden: int | None, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(3)
    body = windowed()[name].to(dtype)
    features = body(torch.zeros(2, *WIDE, dtype=dtype)).flatten(1).shape[1]
    last = (
        [nn.Linear(features, 3)] if hidden is None else [nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 3)]
    )
    model = nn.Sequential(body, nn.Flatten(), *last).to(dtype).eval()
    box = some_box(torch.rand(3, *WIDE, dtype=dtype))
    compared(model, box, margin_spec(torch.tensor([0, 2, 1]), 3, dtype), tolerance)


@pytest.mark.parametrize("name", [name for name, (_, shape) in networks.NETWORKS.items() if len(shape) == 3])
def test_windows_change_nothing_in_the_reference_networks(name: str) -> None:
    torch.manual_seed(4)
    model = networks.build(name).double()
    x, y = networks.batch(name, 3)
    if name == "normalize":
        model = model[1:]  # the engine applies it to the box
    compared(model, some_box(x.double()), margin_spec(y, 3, torch.float64), 1e-10)


def test_windows_are_kept_behind_convolutions() -> None:
    x = torch.rand(2, *WIDE)
    model = nn.Sequential(*windowed()["three"], nn.Flatten(), nn.Linear(48, 3))
    value: Windows | Dense = Windows.identity(x)
    for node in BoundEngine(model, x).graph()[1:-1]:
        if node.affine is not None:
            value = value.through(node, node.affine)
        else:
            value = value.scaled((torch.rand(2, *node.shape) > 0.5).float())
    assert isinstance(value, Windows)
    assert value.window.size == (7, 7)
    assert value.window.stride == (4, 4)
    assert value.to_dense().values.shape == (2, 741, *value.shape)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_nan_weight_stays_visible_in_windows(layer: int) -> None:
    torch.manual_seed(0)
    body = windowed()["two"]
    with torch.no_grad():
        body[layer].weight[0, 0, 0, 0] = torch.nan
    x = torch.rand(2, *WIDE)
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(75, 3))
    assert BoundEngine(model, x).margins(linf_box(x, 0.1), torch.tensor([0, 1]), relaxation("hbox")).isnan().all()

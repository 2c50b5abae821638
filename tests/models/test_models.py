from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.errors import ConfigError
from gls_lirpa.models import INITIALIZERS, MODELS, Normalize, build_model, count_parameters, initialize

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


# ---------------------------------------------------------------- architectures


@pytest.mark.parametrize(
    ("name", "in_shape", "parameters"),
    [
        ("cnn3-tiny", (1, 28, 28), 1_108),
        ("cnn3", (1, 28, 28), 5_170),
        ("cnn5", (1, 28, 28), 165_850),
        ("cnn5-l", (1, 28, 28), 793_930),
        ("cnn7", (3, 32, 32), 17_190_602),
        ("cnn7-bn", (3, 32, 32), 17_192_650),
        ("cnn7-bn", (3, 64, 64), 17_192_650),
    ],
)
def test_parameter_counts(name: str, in_shape: tuple[int, ...], parameters: int) -> None:
    assert count_parameters(build_model(name, in_shape=in_shape)) == parameters


@pytest.mark.parametrize("name", MODELS.names())
@pytest.mark.parametrize("in_shape", [(1, 8, 8), (2, 9, 12)])
def test_any_image_size_and_class_count(name: str, in_shape: tuple[int, int, int]) -> None:
    model = build_model(name, in_shape=in_shape, classes=7)
    assert model(torch.rand(3, *in_shape)).shape == (3, 7)


def test_batchnorm_follows_every_hidden_layer() -> None:
    names = [type(layer).__name__ for layer in build_model("cnn7-bn", in_shape=(1, 8, 8))]
    conv, fc = ["Conv2d", "BatchNorm2d", "ReLU"], ["Linear", "BatchNorm1d", "ReLU"]
    assert names == [*conv * 5, "Flatten", *fc, "Linear"]


@pytest.mark.parametrize("name", MODELS.names())
def test_auto_lirpa_parses_every_network_with_normalisation(name: str) -> None:
    lirpa = load_lirpa()
    size = 4 if name.startswith("cnn7") else 8
    model = build_model(name, in_shape=(3, size, size), mean=CIFAR_MEAN, std=CIFAR_STD).eval()
    x = torch.rand(1, 3, size, size)
    bounded = lirpa.bounded_module(model, x, bound_opts=lirpa.bound_options())
    bounded.eval()
    ball = lirpa.bounded_tensor(x, lirpa.perturbation(norm=math.inf, eps=0.01))
    points = x + 0.01 * (2 * torch.rand(20, *x.shape) - 1)
    outputs = torch.stack([model(p) for p in points])
    for method in ("IBP", "CROWN"):
        lower, upper = bounded.compute_bounds(x=(ball,), method=method)
        assert bool((lower < upper).all())
        assert bool((outputs >= lower - 1e-5).all()) and bool((outputs <= upper + 1e-5).all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cnn33"}, "unknown network 'cnn33'.*did you mean 'cnn3'"),
        ({"name": "cnn5", "in_shape": (1, 3, 3)}, "cnn5 cannot take images of 3x3: nothing is left after"),
        ({"name": "cnn3", "in_shape": (28, 28)}, "expected in_shape"),
        ({"name": "cnn3", "in_shape": (0, 28, 28)}, "expected in_shape"),
        ({"name": "cnn3", "classes": 1}, "expected classes >= 2, got 1"),
        ({"name": "cnn3", "init": "ibq"}, "unknown initialisation 'ibq'.*did you mean 'ibp'"),
        ({"name": "cnn3", "mean": (0.5,)}, "mean and std together"),
        ({"name": "cnn3", "mean": (0.5,) * 3, "std": (0.5,) * 3}, r"one mean per channel \(1\), got 3"),
        ({"name": "cnn3", "mean": (0.5,), "std": (0.0,)}, "expected std > 0"),
        ({"name": "cnn3", "mean": (0.5,), "std": (0.5, 0.5)}, "got 1 means and 2 stds"),
    ],
)
def test_bad_network(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- normalisation


def test_normalisation_is_the_first_layer_and_is_not_trained() -> None:
    plain = build_model("cnn3", in_shape=(3, 32, 32))
    model = build_model("cnn3", in_shape=(3, 32, 32), mean=CIFAR_MEAN, std=CIFAR_STD)
    assert isinstance(model[0], Normalize) and not isinstance(plain[0], Normalize)
    assert count_parameters(model) == count_parameters(plain)
    x = torch.rand(4, 3, 32, 32)
    mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) for v in (CIFAR_MEAN, CIFAR_STD))
    torch.testing.assert_close(model[0](x), (x - mean) / std, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(x), plain((x - mean) / std), rtol=1e-4, atol=1e-5)
    other = build_model("cnn3", in_shape=(3, 32, 32), mean=(0.0,) * 3, std=(1.0,) * 3, seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


# ---------------------------------------------------------------- initialisation


def _affine(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]


def test_ibp_initialisation() -> None:
    for layer in _affine(build_model("cnn5-l", init="ibp")):
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
        std = math.sqrt(2 * math.pi) / weight[0].numel()
        assert weight.std().item() == pytest.approx(std, rel=0.1)
        assert weight.mean().abs().item() < 5 * std / math.sqrt(weight.numel())
        # A normal distribution has 4.6 % beyond two standard deviations, a uniform one none.
        assert (weight.abs() > 2 * std).float().mean().item() == pytest.approx(0.0455, abs=0.02)
        assert not bias.any()


def test_ibp_initialisation_keeps_interval_widths() -> None:
    model = build_model("cnn7", in_shape=(1, 16, 16), init="ibp")
    centre, radius = torch.full((1, 1, 16, 16), 0.5), torch.full((1, 1, 16, 16), 0.1)
    widths = []
    for block in model.blocks()[:-1]:
        for layer in block:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                absolute = copy.deepcopy(layer)
                with torch.no_grad():
                    absolute.weight.abs_()
                centre, radius = layer(centre), absolute(radius)
            elif isinstance(layer, nn.ReLU):
                lower, upper = (centre - radius).relu(), (centre + radius).relu()
                centre, radius = (lower + upper) / 2, (upper - lower) / 2
            else:
                centre, radius = layer(centre), layer(radius)
        widths.append(radius.mean().item())
    assert max(widths) / min(widths) < 3


def test_the_output_layer_may_be_left_at_torchs_default() -> None:
    whole, hidden = (_affine(build_model("cnn5", init=init, seed=1)) for init in ("ibp", "ibp-hidden"))
    for first, second in zip(whole[:-1], hidden[:-1], strict=True):
        assert torch.equal(first.weight, second.weight)
    weight = hidden[-1].weight
    assert isinstance(weight, Tensor)
    bound = 1 / math.sqrt(weight[0].numel())
    assert 0.99 * bound < weight.abs().max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert hidden[-1].bias is not None and not hidden[-1].bias.any()


def test_kaiming_uniform_initialisation() -> None:
    for layer in _affine(build_model("cnn5-l", init="kaiming-uniform")):
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
        bound = math.sqrt(6 / weight[0].numel())
        assert 0.99 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert not bias.any()


@pytest.mark.parametrize("init", INITIALIZERS)
def test_weights_follow_from_the_seed_alone(init: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model("cnn7-bn", in_shape=(1, 8, 8), init=init, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = build_model("cnn7-bn", in_shape=(1, 8, 8), init=init, seed=3)
    other = build_model("cnn7-bn", in_shape=(1, 8, 8), init=init, seed=4)
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert not torch.equal(first[0].weight, other[0].weight)


def test_initialize_resets_batchnorm_and_layers_without_bias() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2))
    net.train()(torch.rand(4, 1, 5, 5) + 3)
    initialize(net, "ibp")
    assert not net[1].running_mean.any() and net[1].num_batches_tracked.item() == 0

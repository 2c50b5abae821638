"""Our convolutions of many small maps against torch's, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.engine import convolutions
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.engine.convolutions import InputGradients

FEW, MANY = 3, 700
CASES: list[tuple[tuple[int, int, int], tuple[int, int], dict[str, Any]]] = [
    ((2, 5, 5), (3, 3), {}),
    ((2, 6, 4), (3, 2), {"stride": 2}),
    ((4, 5, 5), (3, 3), {"stride": (2, 1), "padding": (1, 0)}),
    ((4, 5, 5), (2, 2), {"padding": 1, "dilation": 2}),
    ((4, 4, 4), (3, 3), {"groups": 2, "padding": 1}),
    ((8, 4, 4), (5, 5), {"stride": 2, "padding": 2}),
]


def _weight(name: str, channels: int, kernel: tuple[int, int], groups: int) -> Tensor:
    shape = (6, channels // groups) if name == "conv2d" else (channels, 6 // groups)
    return torch.randn(*shape, *kernel, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
@pytest.mark.parametrize("maps", [FEW, MANY])
@pytest.mark.parametrize(("shape", "kernel", "options"), CASES)
def test_values_and_gradients_are_torchs(
    name: str, maps: int, shape: tuple[int, int, int], kernel: tuple[int, int], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(maps, *shape, dtype=torch.float64, requires_grad=True)
    weight = _weight(name, shape[0], kernel, options.get("groups", 1))
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ours = getattr(convolutions, name)(x, weight, bias, **options)
    theirs = getattr(F, name)(x, weight, bias, **options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    direction = torch.randn_like(theirs)
    for own, reference in zip(
        torch.autograd.grad(ours, (x, weight, bias), direction),
        torch.autograd.grad(theirs, (x, weight, bias), direction),
        strict=True,
    ):
        torch.testing.assert_close(own, reference, rtol=0, atol=1e-9)


def test_many_small_maps_become_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = F.conv2d

    def counted(x: Tensor, *args: Any, **named: Any) -> Tensor:
        seen.append(len(x))
        return original(x, *args, **named)

    monkeypatch.setattr(F, "conv2d", counted)
    convolutions.conv2d(torch.randn(MANY, 2, 5, 5), torch.randn(3, 2, 3, 3))
    assert seen == [50]


def test_auto_lirpa_convolves_with_ours() -> None:
    load_lirpa()
    import auto_LiRPA.operators.convolution as operators

    assert operators.F.conv_transpose2d is convolutions.conv_transpose2d
    assert operators.F.relu is F.relu
    assert F.conv_transpose2d is not convolutions.conv_transpose2d


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), [(5, 2, 2, 1), (4, 2, 1, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_input_gradients_are_those_of_autograd(
    channels: int, kernel: int, stride: int, padding: int, dilation: int, bias: bool
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 4, kernel, stride, padding, dilation, bias=bias)
    net = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(3, channels, 9, 11, dtype=torch.float64, requires_grad=True)
    (usual,) = torch.autograd.grad(net(x).square().sum(), x)
    with InputGradients():
        value = net(x).square().sum()
    (ours,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(ours, usual, atol=1e-12, rtol=1e-12)


def test_input_gradients_end_with_their_block() -> None:
    conv, x = nn.Conv2d(1, 2, 3), torch.randn(2, 1, 5, 5)
    with InputGradients():
        conv(x.requires_grad_()).sum().backward()
    assert conv.weight.grad is None
    conv(x).sum().backward()
    assert conv.weight.grad is not None


def test_input_gradients_leave_padding_by_name_and_groups_to_torch() -> None:
    x = torch.randn(2, 2, 5, 5, requires_grad=True)
    for conv in (nn.Conv2d(2, 2, 3, padding="same"), nn.Conv2d(2, 2, 3, groups=2)):
        (usual,) = torch.autograd.grad(conv(x).square().sum(), x)
        with InputGradients():
            (ours,) = torch.autograd.grad(conv(x).square().sum(), x)
        torch.testing.assert_close(ours, usual)

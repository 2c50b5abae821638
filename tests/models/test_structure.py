from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.errors import ConfigError
from gls_lirpa.models import MODELS, build_model, fold_batchnorm, split_blocks

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


@pytest.mark.parametrize("name", MODELS.names())
def test_blocks_compose_to_the_network_and_share_its_weights(name: str) -> None:
    model = build_model(name, in_shape=(3, 8, 8), mean=CIFAR_MEAN, std=CIFAR_STD).eval()
    architecture = MODELS.get(name)
    blocks = model.blocks()
    assert len(blocks) == len(architecture.convs) + len(architecture.hidden) + 1
    assert all(isinstance(block[-1], nn.ReLU) for block in blocks[:-1]) and isinstance(blocks[-1][-1], nn.Linear)
    for block in blocks:
        assert sum(isinstance(layer, (nn.Conv2d, nn.Linear)) for layer in block) == 1
    x = torch.rand(2, 3, 8, 8)
    out = x
    for block in blocks:
        out = block(out)
    assert torch.equal(out, model(x))
    assert blocks[-1][-1] is model[-1]


def test_blocks_of_a_users_network() -> None:
    relu = nn.ReLU()
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu), nn.Linear(4, 2))
    assert [len(block) for block in split_blocks(net)] == [2, 2, 1]
    with pytest.raises(ConfigError, match="Linear cannot be split into blocks"):
        split_blocks(nn.Linear(4, 2))


# ---------------------------------------------------------------- BatchNorm folding


def _trained_statistics(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            size = module.num_features
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.copy_(torch.randn(size, generator=generator))
                module.running_var.copy_(torch.rand(size, generator=generator) + 0.1)
            if module.affine:
                nn.init.normal_(module.weight, 0.5, 1.0, generator=generator)
                nn.init.normal_(module.bias, 0.0, 1.0, generator=generator)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_folded_network_equals_the_eval_forward(dtype: torch.dtype, tolerance: float) -> None:
    model = build_model("cnn7-bn", in_shape=(3, 8, 8), mean=CIFAR_MEAN, std=CIFAR_STD, init="kaiming-uniform")
    model = _trained_statistics(model).to(dtype).train()
    state = copy.deepcopy(model.state_dict())
    folded = fold_batchnorm(model)
    assert not any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) for m in folded.modules())
    assert not folded.training and model.training
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    assert set(dict(folded.named_parameters())) < set(dict(model.named_parameters()))
    x = torch.rand(4, 3, 8, 8, dtype=dtype)
    expected = model.eval()(x)
    scale = expected.abs().max().item()
    assert (folded(x) - expected).abs().max().item() <= tolerance * max(scale, 1.0)


def test_folding_handles_missing_bias_missing_affine_and_nesting() -> None:
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 3, 3, bias=False)),
        nn.BatchNorm2d(3, affine=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Sequential(nn.Linear(27, 4), nn.BatchNorm1d(4)),
    )
    net = _trained_statistics(net).eval()
    folded = fold_batchnorm(net)
    assert not any("Norm" in type(m).__name__ for m in folded.modules())
    x = torch.rand(2, 1, 5, 5)
    torch.testing.assert_close(folded(x), net(x), rtol=1e-5, atol=1e-5)


class _ReadsInside(nn.Module):
    """Uses the output of the convolution before BatchNorm as well: folding would change it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2))

    def forward(self, x: Tensor) -> Tensor:
        first = self.net[0](x)
        out: Tensor = first + self.net[1](first)
        return out


def _shared_convolution() -> nn.Module:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(nn.Conv2d(1, 2, 1), conv, nn.BatchNorm2d(2), nn.ReLU(), conv)


def _norm_first() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 2, 3), nn.ReLU(), nn.BatchNorm2d(2))


def _parametrised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), nn.BatchNorm2d(2))


def _batch_statistics() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False))


@pytest.mark.parametrize("make", [_ReadsInside, _shared_convolution, _norm_first, _parametrised, _batch_statistics])
def test_batchnorm_that_cannot_be_folded_stays(make: type[nn.Module]) -> None:
    net = _trained_statistics(make()).eval()
    folded = fold_batchnorm(net)
    norms = [sum(isinstance(m, nn.BatchNorm2d) for m in n.modules()) for n in (net, folded)]
    assert norms[0] == norms[1] > 0
    x = torch.rand(3, 1, 5, 5)
    torch.testing.assert_close(folded(x), net(x))

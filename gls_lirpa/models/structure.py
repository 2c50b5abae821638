"""Reading and rewriting the layers of sequential networks: blocks, BatchNorm folding, sizes."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.batchnorm import batchnorm_map
from gls_lirpa.errors import ConfigError

_NORM_AFTER = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _chain(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, layer) in the order of execution, nested Sequentials opened.

    Only where every ancestor is a Sequential is that order known; in any other module the forward
    pass may use the layers differently, so those are single layers here.
    """
    found: list[tuple[nn.Module, str, nn.Module]] = []
    if _is_chain(module):
        # named_children() would leave out the second use of a shared ReLU.
        for name, child in module._modules.items():
            if child is not None:
                found += _chain(child) if _is_chain(child) else [(module, name, child)]
    return found


def split_blocks(model: nn.Module) -> list[nn.Sequential]:
    """The network cut after every ReLU; run one after the other, the blocks are the network.

    A block is affine [+ BatchNorm] + ReLU, with the normalisation or flattening that precedes it;
    the last one is the output layer. The blocks share the layers of ``model``: training changes
    both, but ``model.train()`` does not set the flag of the block containers themselves.

    >>> [len(b) for b in split_blocks(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))]
    [2, 1]
    """
    layers = [layer for _, _, layer in _chain(model)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} cannot be split into blocks: expected an nn.Sequential of layers, "
            "or a network with a blocks() method"
        )
    groups: list[list[nn.Module]] = [[]]
    for position, layer in enumerate(layers):
        groups[-1].append(layer)
        if isinstance(layer, nn.ReLU) and position + 1 < len(layers):
            groups.append([])
    return [nn.Sequential(*group) for group in groups]


def count_parameters(model: nn.Module) -> int:
    """Number of trainable scalars of ``model``.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in eval mode whose BatchNorms are merged into the layer directly before them.

    Folding happens in nested Sequentials; inside other modules the order of execution is not known
    and BatchNorm stays. Remaining parameters keep their names.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())
    >>> fold_batchnorm(net)
    Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
      (2): ReLU()
    )
    """
    folded = copy.deepcopy(model).eval()
    chain = _chain(folded)
    uses = Counter(id(module) for _, module in folded.named_modules(remove_duplicate=False))
    for (_, _, layer), (parent, name, norm) in itertools.pairwise(chain):
        # A layer used in several places has several successors.
        if uses[id(layer)] == 1 and _foldable(layer, norm):
            _fold(layer, norm)
            delattr(parent, name)
    return folded


def _foldable(layer: Any, norm: Any) -> bool:
    # Exact types: subclasses and parametrised layers may compute their weight anew in each forward.
    if type(norm) is not _NORM_AFTER.get(type(layer)):
        return False
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in (layer, norm))
    return not hooked and norm.running_mean is not None and norm.num_features == len(layer.weight)


@torch.no_grad()
def _fold(layer: Any, norm: Any) -> None:
    weight = layer.weight
    rows = len(weight)

    def exact(tensor: Tensor | None, default: float) -> Tensor:
        if tensor is None:
            return torch.full((rows,), default, dtype=torch.float64)
        return tensor.detach().cpu().double()

    statistics = exact(norm.running_mean, 0.0), exact(norm.running_var, 1.0)
    scale, shift = batchnorm_map(*statistics, exact(norm.weight, 1.0), exact(norm.bias, 0.0), norm.eps)
    shift = exact(layer.bias, 0.0) * scale + shift
    scaled = exact(weight, 0.0) * scale.reshape(-1, *[1] * (weight.dim() - 1))
    layer.weight = nn.Parameter(scaled.to(weight))
    layer.bias = nn.Parameter(shift.to(weight))

"""Turn a user's network into a BoundedModule without side effects on it."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.engine.boxes import Box
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.errors import UnsupportedLayerError


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, train/eval flags and ``requires_grad`` are as before afterwards.

    auto_LiRPA sets ``requires_grad`` of the shared weights to the BoundedModule's own training flag.
    """
    training = {module: module.training for module in model.modules()}
    grads = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag
        for parameter, flag in grads.items():
            parameter.requires_grad = flag


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def wrap(model: nn.Module, example: Tensor, *, conv_mode: str) -> Any:
    """A BoundedModule that shares the weights of ``model``, traced in eval mode on ``example``."""
    lirpa = load_lirpa()
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UnsupportedLayerError(
                f"layer {name!r} ({type(module).__name__}) cannot be bounded: replace it by nn.Identity() or set p=0"
            )
    logger = logging.getLogger("auto_LiRPA.utils")
    messages, level = _Messages(), logger.level
    logger.addHandler(messages)
    logger.setLevel(logging.ERROR)
    propagate, logger.propagate = logger.propagate, False
    try:
        with preserved(model), torch.no_grad():
            model.eval()
            bounded = lirpa.bounded_module(
                model, example, bound_opts={**lirpa.bound_options(), "conv_mode": conv_mode}, device=example.device
            )
    except NotImplementedError as error:
        raise UnsupportedLayerError(_unsupported(model, messages.text or str(error))) from error
    finally:
        logger.removeHandler(messages)
        logger.setLevel(level)
        logger.propagate = propagate
    for node in bounded._modules.values():
        if type(node).__name__ == "BoundBatchNormalization":
            node.forward = functools.partial(_normalise, node)
    return bounded


def _normalise(node: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """BatchNorm with given statistics. torch's own is not differentiable in them, and in train mode
    would replace them by those of whatever part of the batch is being bounded."""
    node.current_mean, node.current_var = mean, var
    shape = (1, -1) + (1,) * (x.dim() - 2)
    scale = weight * torch.rsqrt(var + node.eps)
    return x * scale.view(shape) + (bias - mean * scale).view(shape)


def _unsupported(model: nn.Module, message: str) -> str:
    operations = sorted(set(re.findall(r"(?:onnx|aten|prim)::(\w+)", message)))
    layers = [
        f"{name!r} ({type(module).__name__})"
        for name, module in model.named_modules()
        if any(operation.lower() in type(module).__name__.lower() for operation in operations)
    ]
    where = f" in layer {', '.join(layers)}" if layers else ""
    named = ", ".join(operations) or " ".join(message.split())[:200]
    return (
        f"auto_LiRPA {load_lirpa().version} cannot bound the operation {named}{where}; supported are Linear, Conv2d, "
        "BatchNorm, AvgPool, Flatten, ReLU, sums, and elementwise affine operations"
    )


def bounded_input(box: Box) -> Any:
    """The box as auto_LiRPA's perturbed input."""
    lirpa = load_lirpa()
    perturbation = lirpa.perturbation(norm=float("inf"), eps=0.0, x_L=box.lower, x_U=box.upper)
    return lirpa.bounded_tensor(box.center, perturbation)

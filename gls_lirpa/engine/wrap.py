"""Turn a user's network into a BoundedModule without side effects on it."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.balls import Ball
from gls_lirpa.base.batchnorm import normalised
from gls_lirpa.base.boxes import Box
from gls_lirpa.base.modes import evaluating
from gls_lirpa.base.normalize import Normalize
from gls_lirpa.engine.batchnorm import batchnorms
from gls_lirpa.engine.compat import default_dtype, load_lirpa
from gls_lirpa.engine.constancy import check_constancy
from gls_lirpa.engine.graph import read_graph
from gls_lirpa.engine.operators import SUPPORTED, check_operations
from gls_lirpa.engine.rewrite import rewritten
from gls_lirpa.errors import DataError, EngineError, UnsupportedLayerError

LIRPA_FAILURES = (
    RuntimeError,
    AssertionError,
    ValueError,
    TypeError,
    NotImplementedError,
    AttributeError,
    IndexError,
    KeyError,
)
"""What auto_LiRPA raises where it meets something it does not expect."""

_KNOWN_LAYERS = (
    *("Linear", "Conv2d", "BatchNorm1d", "BatchNorm2d", "AvgPool2d", "AdaptiveAvgPool2d", "Flatten", "ReLU"),
    *("Identity", "Normalize", "MaxPool2d", "LeakyReLU", "Sigmoid", "Tanh", "Dropout", "Dropout2d", "ConvTranspose2d"),
    *("ReLU6", "Hardtanh", "ZeroPad2d", "ConstantPad2d", "ReflectionPad2d", "ReplicationPad2d", "CircularPad2d"),
)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def check_dropout(model: nn.Module) -> None:
    """Refuse a network that draws random numbers now."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise UnsupportedLayerError(
                f"layer {name!r} ({type(module).__name__}) cannot be bounded in train mode: "
                "call eval() on it, or replace it by nn.Identity()"
            )


def check_layers(model: nn.Module) -> None:
    """Refuse layers that are no fixed function of their input, whatever their operations are."""
    check_dropout(model)
    for name, layer in batchnorms(model).items():
        if layer.running_mean is None:
            raise UnsupportedLayerError(
                f"layer {name!r} ({type(layer).__name__}) cannot be bounded without running statistics: "
                "make it with track_running_stats=True"
            )


def count_classes(model: nn.Module, example: Tensor) -> int:
    """The number of logits of ``model`` on inputs such as ``example``."""
    if example.dim() < 2 or not len(example) or not example.is_floating_point():
        raise DataError(f"expected a batch of floating-point inputs, got {tuple(example.shape)} of {example.dtype}")
    one = example[:1].detach().clone()
    try:
        with torch.no_grad(), evaluating(model):
            output = model(one)
    except RuntimeError as error:
        message = " ".join(str(error).split())[:200]
        raise EngineError(f"the network cannot take inputs of shape {tuple(example.shape[1:])}: {message}") from error
    if one._version:  # torch counts the writes, also those that change nothing at this input
        raise UnsupportedLayerError(
            "the network writes into its own input, so that it means another one the next time: "
            "make its first layer return a new tensor (inplace=False)"
        )
    with torch.no_grad(), evaluating(model):
        check_constancy(model, one, output)
    if output.dim() != 2:
        raise EngineError(f"expected one row of logits per sample, got an output of shape {tuple(output.shape)}")
    return int(output.shape[1])


def split_normalization(model: nn.Module) -> tuple[Normalize | None, nn.Module]:
    """The leading normalisation, if there is one, and the rest of the network."""
    # A subclass may do more than run its layers in turn, and so may hooks.
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward or len(model) < 2:
        return None, model
    first, *rest = model
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in (model, first))
    if type(first) is not Normalize or hooked or not _keeps_order(first):
        return None, model
    return first, nn.Sequential(*rest)


def _keeps_order(layer: Normalize) -> bool:
    """Whether it takes the ends of a box to the ends of one: a weight file may have put anything into its buffers."""
    weight = layer.weight.flatten(1)
    diagonal = torch.diag(weight.diagonal())
    return torch.equal(weight, diagonal) and bool((weight.diagonal() > 0).all())


def wrap(model: nn.Module, example: Tensor, *, conv_mode: str) -> Any:
    """A BoundedModule that shares the weights of ``model``, traced in eval mode on ``example``."""
    lirpa = load_lirpa()
    options = {**lirpa.bound_options(), "conv_mode": conv_mode}
    logger = logging.getLogger("auto_LiRPA.utils")
    messages, level = _Messages(), logger.level
    logger.addHandler(messages)
    logger.setLevel(logging.ERROR)
    propagate, logger.propagate = logger.propagate, False
    try:
        # auto_LiRPA sets ``requires_grad`` of the shared weights to the BoundedModule's own training flag.
        with evaluating(model), torch.no_grad():
            shown = rewritten(model)
            with default_dtype(example.dtype):
                bounded = lirpa.bounded_module(shown, example, bound_opts=options, device=example.device)
            bounded.eval()
            check_operations(bounded)
            read_graph(bounded, all_activations=True)
    except UnsupportedLayerError as error:
        if "onnx::" not in str(error):
            raise
        raise unsupported(f"auto_LiRPA {lirpa.version}", model, str(error)) from error
    except LIRPA_FAILURES as error:
        raise unsupported(f"auto_LiRPA {lirpa.version}", model, messages.text or str(error)) from error
    finally:
        logger.removeHandler(messages)
        logger.setLevel(level)
        logger.propagate = propagate
    for node in bounded._modules.values():
        if type(node).__name__ == "BoundBatchNormalization":
            node.forward = functools.partial(_normalise, node)
    return bounded


def _normalise(node: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """BatchNorm with given statistics: in train mode torch's own would replace them by those of whatever part of
    the batch is being bounded."""
    node.current_mean, node.current_var = mean, var
    return normalised(x, mean, var, weight, bias, node.eps)


def unsupported(who: str, model: nn.Module, message: str) -> UnsupportedLayerError:
    """The error for a network of which ``message`` mentions operations that ``who`` cannot bound."""
    operations = sorted(set(re.findall(r"(?:onnx|aten|prim)::(\w+)", message)))
    what = ", ".join(operations) or " ".join(message.split())[:200]
    condition = re.search(r"onnx::\w+ (with .*|is bounded by .*)", message)
    what += f" {condition.group(1)}" if condition else ""
    where = _suspects(model, operations)
    return UnsupportedLayerError(f"{who} cannot bound the operation {what}{where}; supported are {SUPPORTED}")


def unproven(model: nn.Module, message: str) -> UnsupportedLayerError:
    """The error for a network that was traced as another function, in the way that ``message`` tells."""
    return UnsupportedLayerError(
        f"the network cannot be bounded, because what was traced of it is another function: "
        f"{' '.join(message.split())[:200]}{_suspects(model, [])}; "
        "write its forward pass in torch operations that act on every sample alike"
    )


def _suspects(model: nn.Module, operations: list[str]) -> str:
    leaves = [(name, type(m).__name__) for name, m in model.named_modules() if not any(m.children())]
    named = [leaf for leaf in leaves if any(op.lower() in leaf[1].lower() for op in operations)]
    # A layer of several operations (Softsign: abs, add, divide) does not bear the name of any of them.
    suspects = named or [leaf for leaf in leaves if leaf[1] not in _KNOWN_LAYERS]
    return f" in layer {', '.join(f'{name!r} ({kind})' for name, kind in suspects)}" if suspects else ""


def check_first_layers(bounded: Any) -> None:
    """Refuse a network that does not begin with layers through which auto_LiRPA takes an ℓ2 ball."""
    names = [bounded.input_name[0]]
    while names:
        for node in (bounded[name] for name in bounded[names.pop()].output_name):
            kind = type(node).__name__
            if kind in ("BoundFlatten", "BoundReshape"):
                names.append(node.name)
            elif kind not in ("BoundLinear", "BoundConv"):
                operation = kind.removeprefix("Bound")
                expected = "l2 balls need a network that begins with linear layers or convolutions"
                raise UnsupportedLayerError(f"{expected}, got {operation} there")


def bounded_input(box: Box) -> Any:
    """The box as auto_LiRPA's perturbed input."""
    lirpa = load_lirpa()
    if isinstance(box, Ball):
        return lirpa.bounded_tensor(box.middle, lirpa.perturbation(norm=2.0, eps=box.radius))
    # auto_LiRPA 0.3 takes an interval whose two ends are one object for a constant: 2·x became x·x.
    upper = box.upper.clone() if box.upper is box.lower else box.upper
    perturbation = lirpa.perturbation(norm=float("inf"), eps=0.0, x_L=box.lower, x_U=upper)
    return lirpa.bounded_tensor(box.center, perturbation)

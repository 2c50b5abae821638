"""Every version difference of auto_LiRPA, torch and numpy, in one place.

auto_LiRPA 0.3 (the PyPI release) predates numpy 2 and torch 2; the stand-ins below give it back the
few names it imports. Later versions are used as they are. What an installation can do is found by
looking at the objects, never at version strings.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gls_lirpa.base.torchvision import repair_torchvision
from gls_lirpa.engine.convolutions import conv_transpose2d
from gls_lirpa.errors import EngineError

CURE = "pip install appdirs tqdm graphviz && pip install --no-deps auto_LiRPA==0.3"


@dataclass(frozen=True)
class Lirpa:
    """The parts of auto_LiRPA that the engine uses, and what this installation calls them."""

    version: str
    bounded_module: Any
    bounded_tensor: Any
    perturbation: Any
    interm_key: str
    init_alpha: str
    split_nodes: bool

    def bound_options(self) -> dict[str, Any]:
        """Options under which a bound depends on its own sample alone.

        Sparse intermediate bounds and sparse slopes make a result depend on the rest of the batch
        and on earlier calls; the matrix and patches modes of convolutions agree to rounding.
        """
        return {
            "sparse_intermediate_bounds": False,
            "sparse_conv_intermediate_bounds": False,
            "sparse_intermediate_bounds_with_ibp": False,
            "sparse_features_alpha": False,
            "sparse_spec_alpha": False,
            "verbosity": 0,
        }


def forget(node: Any) -> None:
    """Drop a node's bounds."""
    node.__dict__.pop("interval", None)
    if hasattr(node, "delete_lower_and_upper_bounds"):
        node.delete_lower_and_upper_bounds()
    else:
        node.__dict__.pop("lower", None)
        node.__dict__.pop("upper", None)


_BROKEN = (ImportError, AttributeError, StopIteration, RuntimeError, TypeError, ValueError, SyntaxError, OSError)
"""What an auto_LiRPA raises at import that does not fit its surroundings."""


@functools.cache
def load_lirpa() -> Lirpa:
    """Import auto_LiRPA, repairing what its age makes necessary.

    >>> load_lirpa().bounded_module.__name__
    'BoundedModule'
    """
    try:
        module = _import_lirpa()
        bounded_module = module.BoundedModule
        parameters = inspect.signature(bounded_module.compute_bounds).parameters
        interm_key = next(k for k in ("interm_bounds", "intermediate_layer_bounds") if k in parameters)
        init_alpha = next(k for k in ("init_alpha", "init_slope") if hasattr(bounded_module, k))
    except ModuleNotFoundError as error:
        raise EngineError(f"auto_LiRPA cannot be imported ({error}): install it with `{CURE}`") from error
    except _BROKEN as error:
        raise EngineError(f"this auto_LiRPA cannot be used ({error!r}): install it with `{CURE}`") from error
    _repair_named_members(bounded_module)
    _repair_matmul()
    _keep_eval_mode(bounded_module)
    _repair_dtypes()
    _speed_up_convolutions()
    return Lirpa(
        version=str(getattr(module, "__version__", "unknown")),
        bounded_module=bounded_module,
        bounded_tensor=module.BoundedTensor,
        perturbation=module.PerturbationLpNorm,
        interm_key=interm_key,
        init_alpha=init_alpha,
        split_nodes=hasattr(bounded_module, "get_split_nodes"),
    )


def _import_lirpa() -> types.ModuleType:
    if "auto_LiRPA" not in sys.modules:
        _repair_numpy()
        _repair_onnx_exporter()
        repair_torchvision()
    handlers = logging.getLogger().handlers[:]
    # auto_LiRPA changes the process's warning filters and root logger when imported.
    with warnings.catch_warnings(record=True):
        try:
            module = importlib.import_module("auto_LiRPA")
        finally:
            for handler in set(logging.getLogger().handlers) - set(handlers):
                logging.getLogger().removeHandler(handler)
    logging.getLogger("auto_LiRPA").setLevel(logging.CRITICAL)
    logging.getLogger("auto_LiRPA.utils").setLevel(logging.CRITICAL)
    _repair_node_attributes()
    return module


def _repair_numpy() -> None:
    if not hasattr(np.lib, "arraysetops"):
        stand_in = types.ModuleType("numpy.lib.arraysetops")
        stand_in.__dict__["isin"] = np.isin
        sys.modules.setdefault("numpy.lib.arraysetops", stand_in)


def _exporter(name: str) -> types.ModuleType:
    """A module of torch's TorchScript ONNX exporter, wherever this torch keeps it."""
    for package in ("torch.onnx._internal.torchscript_exporter", "torch.onnx"):
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError:
            continue
    raise ImportError(f"torch {torch.__version__} has no ONNX exporter module {name!r}")


def _repair_onnx_exporter() -> None:
    helper = importlib.import_module("torch.onnx.symbolic_helper")
    if not hasattr(helper, "_set_opset_version"):
        settings = _exporter("_globals").__dict__["GLOBALS"]

        def _set_opset_version(version: int) -> None:
            settings.export_onnx_opset_version = version

        helper.__dict__["_set_opset_version"] = _set_opset_version
    utils = importlib.import_module("torch.onnx.utils")
    if not hasattr(utils, "_optimize_graph"):
        utils.__dict__["_optimize_graph"] = _exporter("utils").__dict__["_optimize_graph"]


class _NodeProxy:
    """A graph node whose attributes can again be read as ``node['name']``."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __getitem__(self, name: str) -> Any:
        return _exporter("symbolic_helper").__dict__["_node_get"](self._node, name)


class _GraphProxy:
    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def nodes(self) -> list[_NodeProxy]:
        return [_NodeProxy(node) for node in self._graph.nodes()]


def _repair_node_attributes() -> None:
    """Give parse_graph nodes with item access, where it expects that and torch lacks it."""
    parse = importlib.import_module("auto_LiRPA.parse_graph")
    original = parse.__dict__["parse_graph"]
    if hasattr(torch._C.Node, "__getitem__") or "n[k]" not in inspect.getsource(original):
        return

    @functools.wraps(original)
    def parse_graph(graph: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_GraphProxy(graph), *args, **kwargs)

    parse.__dict__["parse_graph"] = parse_graph


def _repair_named_members(bounded_module: Any) -> None:
    """``Module.parameters()`` passes remove_duplicate, which auto_LiRPA 0.3's override lacks."""
    original = bounded_module._named_members
    if "remove_duplicate" in inspect.signature(original).parameters:
        return

    @functools.wraps(original)
    def _named_members(
        self: Any, get_members_fn: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Any:
        del remove_duplicate  # the original always removes duplicates
        return original(self, get_members_fn, prefix, recurse)

    bounded_module._named_members = _named_members


def _repair_matmul() -> None:
    """A Linear without bias is a MatMul, whose IBP in 0.3 cannot merge the specification into it."""
    operators = importlib.import_module("auto_LiRPA.operators.linear").__dict__
    matmul, linear = operators["BoundMatMul"], operators["BoundLinear"]
    if {"C", "kwargs"} & set(inspect.signature(matmul.interval_propagate).parameters):
        return

    def interval_propagate(self: Any, *v: Any, C: Any = None) -> Any:
        return linear.interval_propagate(self, *v, C=C)

    matmul.interval_propagate = interval_propagate


def _keep_eval_mode(bounded_module: Any) -> None:
    """Where there is a Dropout layer, auto_LiRPA would trace the whole network in train mode, and print so.

    Here no dropout reaches the trace (``rewrite``).
    """
    bounded_module.check_incompatible_nodes = lambda self, model: None


class _Torch(types.ModuleType):
    """torch, whose ``float`` is the default dtype of the moment."""

    @property
    def float(self) -> torch.dtype:
        return torch.get_default_dtype()


def _repair_dtypes() -> None:
    """auto_LiRPA makes tensors of dtype torch.float beside those of the network, which may be float64."""
    stand_in = _Torch("torch")
    stand_in.__dict__.update(vars(torch))
    for name, module in list(sys.modules.items()):
        if name.startswith("auto_LiRPA.") and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = stand_in


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside it tensors that auto_LiRPA makes without saying of what type are of this one.

    torch has one default per process: threads that make tensors meanwhile see it too.
    """
    before = torch.get_default_dtype()
    if dtype == before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _speed_up_convolutions() -> None:
    """Give auto_LiRPA's convolution operator our transposed convolution; the rest of F stays torch's."""
    functions = types.ModuleType("torch.nn.functional")
    functions.__dict__.update(vars(F))
    functions.__dict__["conv_transpose2d"] = conv_transpose2d
    importlib.import_module("auto_LiRPA.operators.convolution").__dict__["F"] = functions


def versions() -> dict[str, str]:
    """Versions of what results depend on; packages that are missing are left out."""
    found = {"python": sys.version.split()[0]}
    for package in ("gls-lirpa", "torch", "torchvision", "auto_LiRPA", "numpy", "numba", "evotorch", "ray"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

"""Networks in ONNX files: read with onnx2torch, checked against onnxruntime."""

from __future__ import annotations

import gzip
import importlib
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gls_lirpa.base.extras import install_command
from gls_lirpa.base.torchvision import repair_torchvision
from gls_lirpa.errors import CheckpointError, UnsupportedLayerError
from gls_lirpa.exchange.modern import modern
from gls_lirpa.exchange.translate import batched, translate

Array = npt.NDArray[Any]

TOLERANCE = 1e-4
"""How far outputs of torch and onnxruntime may differ, relative to 1 + the largest output."""

_READER_FAILURES = (
    *(NotImplementedError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError),
)
"""What onnx2torch raises where it meets something it does not expect."""


@dataclass(frozen=True)
class OnnxNetwork:
    """``model`` takes batches of samples of ``in_shape`` and gives ``outputs`` numbers each."""

    path: Path
    model: nn.Module
    in_shape: tuple[int, ...]
    outputs: int
    dtype: torch.dtype
    session: Any = field(repr=False, compare=False)

    def replay(self, samples: Array) -> Array:
        """The outputs of onnxruntime for samples of any shape of the right size, one at a time."""
        declared = self.session.get_inputs()[0]
        shape = declared_shape(declared.shape)
        numbers = np.asarray(samples, dtype=torch.empty(0, dtype=self.dtype).numpy().dtype)
        rows = [self.session.run(None, {declared.name: sample.reshape(shape)})[0].reshape(-1) for sample in numbers]
        return np.stack(rows)


def read_onnx(path: str | Path) -> OnnxNetwork:
    """Read an ONNX file (``.onnx`` or ``.onnx.gz``) and compare it with onnxruntime on random inputs.

    Whatever is wrong with the file is one of this package's errors.

    >>> import tempfile
    >>> from gls_lirpa.exchange.export import write_onnx
    >>> net, file = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), Path(tempfile.mkdtemp()) / "net.onnx"
    >>> write_onnx(net, (1, 2, 2), file)
    >>> read_onnx(file).model(torch.zeros(5, 1, 2, 2)).shape
    torch.Size([5, 3])
    """
    path = Path(path)
    content = read_bytes(path, "network")
    proto = _parsed(path, content)
    session = _session(path, content)
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if len(inputs) != 1 or len(outputs) != 1:
        raise UnsupportedLayerError(
            f"network {str(path)!r} has {len(inputs)} inputs and {len(outputs)} outputs, expected one of each"
        )
    dtype = {"tensor(float)": torch.float32, "tensor(double)": torch.float64}.get(inputs[0].type)
    if dtype is None:
        raise UnsupportedLayerError(f"network {str(path)!r} takes {inputs[0].type}, expected float or double")
    try:
        shape = declared_shape(inputs[0].shape)
    except ValueError as error:
        raise UnsupportedLayerError(f"network {str(path)!r} {error}") from error
    example = torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    in_shape = tuple(shape[1:] if batched(shape) else shape)
    model = _converted(path, proto, example)
    width = int(model(example.reshape(1, *in_shape)).shape[1])
    network = OnnxNetwork(path, model, in_shape, width, dtype, session)
    _check(network)
    return network


def import_libraries() -> None:
    """Import what reading a network needs, which takes seconds."""
    repair_torchvision()
    for name in ("onnx", "onnx.reference", "onnxruntime", "onnx2torch"):
        _library(name)


def declared_shape(dimensions: list[Any]) -> tuple[int, ...]:
    """A declared input shape with the batch size 1 where it is left open; any other first size belongs to the sample.

    >>> declared_shape(["batch", 1, 28, 28])
    (1, 1, 28, 28)
    """
    shape = [1 if i == 0 and not isinstance(size, int) else size for i, size in enumerate(dimensions)]
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f"takes inputs of shape {dimensions}, expected fixed sizes behind the batch")
    return tuple(shape)


def read_bytes(path: Path, what: str) -> bytes:
    """A file's content, unpacked if its name ends in ``.gz``."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CheckpointError(f"{what} {str(path)!r} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from error


def _parsed(path: Path, content: bytes) -> Any:
    onnx = _library("onnx")
    message = importlib.import_module("google.protobuf.message")
    try:
        proto = onnx.load_model_from_string(content)
        if path.suffix != ".gz":
            onnx.load_external_data_for_model(proto, str(path.parent))
        onnx.checker.check_model(proto)
        return modern(proto)
    except (message.DecodeError, onnx.checker.ValidationError, ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"network {str(path)!r} is not a valid ONNX file: {_line(error)}") from error


def _session(path: Path, content: bytes) -> Any:
    runtime = _library("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    source = content if path.suffix == ".gz" else str(path)
    try:
        return runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except _runtime_failures() as error:
        # The path again would leave no room for the reason.
        reason = _line(error, without=f"Load model from {path} failed:")
        raise CheckpointError(f"onnxruntime refuses network {str(path)!r}: {reason}") from error


def _runtime_failures() -> tuple[type[Exception], ...]:
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    own = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, RuntimeError, ValueError)


def _converted(path: Path, proto: Any, example: torch.Tensor) -> nn.Module:
    repair_torchvision()
    reader = _library("onnx2torch")
    try:
        graph = reader.convert(proto)
        graph.graph.eliminate_dead_code()
        model = translate(graph, example)
    except UnsupportedLayerError as error:
        raise UnsupportedLayerError(f"network {str(path)!r}: {error}") from error
    except _READER_FAILURES as error:
        raise UnsupportedLayerError(f"network {str(path)!r} cannot be read by onnx2torch: {_line(error)}") from error
    return model.to(example.dtype).eval().requires_grad_(False)


def _check(network: OnnxNetwork) -> None:
    """Several samples at once by torch, one after the other by onnxruntime."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(4, *network.in_shape, generator=generator, dtype=network.dtype)
    x[0] = 0.5
    x[1] = 2 * x[1] - 1
    try:
        with torch.no_grad():
            ours = network.model(x).numpy()
        theirs = network.replay(x.numpy())
    except _runtime_failures() as error:
        raise UnsupportedLayerError(f"network {str(network.path)!r} cannot be evaluated: {_line(error)}") from error
    if ours.shape != theirs.shape or not np.allclose(
        ours, theirs, rtol=0.0, atol=TOLERANCE * (1 + float(np.abs(theirs).max()))
    ):
        difference = float(np.abs(ours - theirs).max()) if ours.shape == theirs.shape else float("nan")
        raise UnsupportedLayerError(
            f"network {str(network.path)!r} is not read rightly: outputs differ from onnxruntime's by {difference:.2g}"
        )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f"ONNX files need the package {name} ({_line(error)}): {install_command('onnx')}"
        ) from error


def _line(error: BaseException, *, without: str = " ") -> str:
    text = " ".join(str(error).replace(without, " ").split())
    return text[:200] or type(error).__name__

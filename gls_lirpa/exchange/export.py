"""Our networks and properties for other verifiers: ONNX, VNN-LIB and an ``instances.csv``."""

from __future__ import annotations

import csv
import importlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box
from gls_lirpa.base.extras import require_installed
from gls_lirpa.base.files import replace_file
from gls_lirpa.base.modes import evaluating
from gls_lirpa.errors import ConfigError, EngineError
from gls_lirpa.exchange.constants import inline_constants
from gls_lirpa.models.structure import fold_batchnorm

OPSET = 13
"""Old enough for every verifier in use, new enough for every layer of ours."""

AGREEMENT = 1e-5
"""How far the exported network may be from ours, relative to 1 + the largest output."""


def write_onnx(model: nn.Module, in_shape: Sequence[int], path: str | Path, *, overwrite: bool = False) -> None:
    """Write a network with an open batch size, BatchNorm folded, and compare it with onnxruntime's answers.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "net.onnx"
    >>> write_onnx(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), (1, 2, 2), file)
    >>> file.exists()
    True
    """
    require_installed("onnx", "onnxruntime", extra="onnx", feature="writing ONNX files")
    path = _free(Path(path), overwrite)
    folded = fold_batchnorm(model).cpu().float().requires_grad_(False)
    x = torch.rand(3, *in_shape, generator=torch.Generator().manual_seed(0))
    content = _exported(folded, x[:1])
    _compare(model, content, x)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def _exported(model: nn.Module, example: Tensor) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.onnx.export(
            model,
            (example,),
            buffer,  # type: ignore[arg-type]
            dynamo=False,
            opset_version=OPSET,
            input_names=["input"],
            output_names=["output"],
            dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}},
        )
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        raise EngineError(f"this network cannot be written as ONNX: {' '.join(str(error).split())[:200]}") from error
    onnx: Any = importlib.import_module("onnx")
    proto = onnx.load_model_from_string(buffer.getvalue())
    inline_constants(proto)
    content: bytes = proto.SerializeToString()
    return content


def _compare(model: nn.Module, content: bytes, x: Tensor) -> None:
    """The written network must answer as the one in memory does, for one sample and for several."""
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    with torch.no_grad(), evaluating(model):
        expected = model.cpu()(x)
    for part in (x[:1], x):
        answer = torch.from_numpy(session.run(None, {"input": part.numpy()})[0])
        error = float((answer - expected[: len(part)]).abs().max())
        if not error <= AGREEMENT * (1 + float(expected.abs().max())):
            raise EngineError(f"the ONNX network differs from ours by {error:.2g}: it was not written")


def property_text(box: Box, label: int, outputs: int, *, comment: str = "") -> str:
    """The VNN-LIB property "some other class reaches ``label``" over a box of one sample.

    Numbers are printed such that reading them gives the box's very bounds.

    >>> print(property_text(Box(torch.zeros(1, 1), torch.full((1, 1), 0.5)), 0, 2))
    (declare-const X_0 Real)
    (declare-const Y_0 Real)
    (declare-const Y_1 Real)
    (assert (>= X_0 0.0))
    (assert (<= X_0 0.5))
    (assert (or
      (and (>= Y_1 Y_0))
    ))
    <BLANKLINE>
    """
    lower, upper = (side[0].flatten().double().tolist() for side in (box.lower, box.upper))
    lines = [f"; {line}" for line in comment.splitlines()]
    lines += [f"(declare-const X_{i} Real)" for i in range(len(lower))]
    lines += [f"(declare-const Y_{j} Real)" for j in range(outputs)]
    for i, (low, high) in enumerate(zip(lower, upper, strict=True)):
        lines += [f"(assert (>= X_{i} {low!r}))", f"(assert (<= X_{i} {high!r}))"]
    lines.append("(assert (or")
    lines += [f"  (and (>= Y_{j} Y_{label}))" for j in range(outputs) if j != label]
    return "\n".join([*lines, "))"]) + "\n"


def write_instances(
    onnx: Path,
    x: Tensor,
    labels: Tensor,
    folder: Path,
    *,
    eps: float,
    outputs: int,
    timeout: float,
    overwrite: bool = False,
    title: str = "",
) -> Path:
    """One VNN-LIB file per sample, and an ``instances.csv`` that names them; its path is returned."""
    table = _free(folder / "instances.csv", overwrite)
    files = [_free(folder / f"sample_{i}.vnnlib", overwrite) for i in range(len(x))]
    folder.mkdir(parents=True, exist_ok=True)
    network = os.path.relpath(onnx, folder)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for i, file in enumerate(files):
        box = linf_box(x[i : i + 1], eps)
        comment = f"{title}sample {i}, label {int(labels[i])}, l-infinity radius {eps!r} in pixels of [0, 1]"
        replace_file(file, property_text(box, int(labels[i]), outputs, comment=comment).encode())
        writer.writerow([network, file.name, f"{timeout:g}"])
    replace_file(table, text.getvalue().encode())
    return table


def _free(path: Path, overwrite: bool) -> Path:
    if path.exists() and not overwrite:
        raise ConfigError(f"{str(path)!r} exists already: add --overwrite, or choose another name")
    return path

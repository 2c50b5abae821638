"""Deciding properties: answers against brute force, counterexamples, limits."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gls_lirpa.errors import DataError
from gls_lirpa.exchange.export import write_onnx
from gls_lirpa.exchange.onnx_model import OnnxNetwork, read_onnx
from gls_lirpa.exchange.query import Limits, decide
from gls_lirpa.exchange.vnnlib import Property, parse_vnnlib
from tests.helpers.onnx_nets import NETS
from tests.helpers.vnnlib import declared

NEAR = 5e-3


def one_input(folder: Path, seed: int, *, width: int = 8, outputs: int = 3) -> OnnxNetwork:
    """A curve with many corners over one input, so that a fine grid decides any property."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0.0, 1.5 / layer.in_features**0.5)
                layer.bias.uniform_(-0.5, 0.5)
    write_onnx(model, (1,), folder / f"{seed}.onnx")
    return read_onnx(folder / f"{seed}.onnx")


def random_property(generator: np.random.Generator, outputs: int = 3) -> Property:
    boxes = " ".join(
        f"(and (>= X_0 {low:.3f}) (<= X_0 {low + 0.7:.3f}))"
        for low in generator.uniform(-1.5, 1.0, generator.integers(1, 3))
    )
    conjunctions = []
    for _ in range(generator.integers(1, 3)):
        rows = [
            f"(<= (+ (* {a:.2f} Y_{i}) (* {b:.2f} Y_{j})) {c:.3f})"
            for (a, b), (i, j), c in zip(
                generator.normal(size=(3, 2)),
                generator.integers(0, outputs, (3, 2)),
                generator.normal(-0.3, 0.5, 3),
                strict=True,
            )
        ]
        conjunctions.append(f"(and {' '.join(rows[: generator.integers(1, 4)])})")
    return parse_vnnlib(declared(1, outputs) + f"(assert (or {boxes}))(assert (or {' '.join(conjunctions)}))")


def deepest(network: OnnxNetwork, query: Property) -> float:
    """min over the boxes of min_k max_i g_ki, on a grid."""
    values = []
    for case in query.cases:
        x = torch.linspace(case.lower[0], case.upper[0], 20_001).unsqueeze(1)
        y = network.model(x).double().numpy()
        values += [(y @ unsafe.rows.T - unsafe.bounds).max(1).min() for unsafe in case.unsafe]
    return float(min(values))


def test_answers_against_brute_force(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    counts = {"sat": 0, "unsat": 0}
    for seed in range(16):
        network, query = one_input(tmp_path, seed), random_property(generator)
        depth = deepest(network, query)
        if abs(depth) < NEAR:
            continue
        answer = decide(network, query, Limits(stages=("pgd", "crown", "bab")))
        assert answer.verdict == ("sat" if depth < 0 else "unsat"), (seed, depth, answer)
        counts[answer.verdict] += 1
        if answer.counterexample is not None:
            x, y = answer.counterexample.x, network.replay(answer.counterexample.x[None])[0]
            assert query.holds_at(x, y.astype(np.float64), tolerance=1e-4)
    assert min(counts.values()) >= 4


@pytest.mark.parametrize("name", ["flattened", "column", "residual"])
def test_shapes_of_other_tools(tmp_path: Path, name: str) -> None:
    network = read_onnx(NETS[name](tmp_path / "net.onnx"))
    size = torch.Size(network.in_shape).numel()
    box = "".join(f"(assert (>= X_{i} 0.4))(assert (<= X_{i} 0.42))" for i in range(size))
    y = network.replay(np.full((1, size), 0.41))[0]
    for bound, verdict in ((y[0] + 0.01, "sat"), (y[0] - 20.0, "unsat")):
        query = parse_vnnlib(declared(size, network.outputs) + box + f"(assert (<= Y_0 {bound:.4f}))")
        assert decide(network, query).verdict == verdict


def test_a_fixed_input_is_reported_as_it_was_written(tmp_path: Path) -> None:
    """0.1 is no float32 number: the box searched is wider, the counterexample is 0.1 itself."""
    network = one_input(tmp_path, 0)
    y = float(network.replay(np.array([[0.1]]))[0][0])
    fixed = declared(1, 3) + "(assert (>= X_0 0.1))(assert (<= X_0 0.1))"
    answer = decide(network, parse_vnnlib(fixed + f"(assert (<= Y_0 {y + 1e-3}))"))
    assert answer.verdict == "sat" and answer.counterexample is not None and answer.counterexample.x.tolist() == [0.1]
    assert decide(network, parse_vnnlib(fixed + f"(assert (<= Y_0 {y - 1e-3}))")).verdict == "unsat"


def hard(folder: Path) -> tuple[OnnxNetwork, Property]:
    """Neither attacks nor cheap bounds decide this one."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(12, 40), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(40, 40), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(40, 2))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0.0, 1.6 / layer.in_features**0.5)
    write_onnx(model, (12,), folder / "hard.onnx")
    lowest = float(model(torch.rand(20_000, 12) * 2 - 1)[:, 0].min().detach())
    box = "".join(f"(assert (>= X_{i} -1))(assert (<= X_{i} 1))" for i in range(12))
    text = declared(12, 2) + box + f"(assert (<= Y_0 {3 * lowest - 1.0:.3f}))"
    return read_onnx(folder / "hard.onnx"), parse_vnnlib(text)


def test_limits(tmp_path: Path) -> None:
    network, query = hard(tmp_path)
    cheap = decide(network, query, Limits(stages=("ibp", "crown")))
    assert cheap.verdict == "unknown" and "ibp, crown" in cheap.reason
    nodes = decide(network, query, Limits(stages=("bab",), max_nodes=4))
    assert nodes.verdict == "unknown" and "4 nodes" in nodes.reason
    started = time.monotonic()
    late = decide(network, query, Limits(timeout=2.0))
    assert late.verdict == "timeout" and late.counterexample is None
    assert time.monotonic() - started < 12  # 1.5 × the limit when the machine is idle


def test_a_counterexample_that_does_not_replay_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = one_input(tmp_path, 0)
    query = parse_vnnlib(declared(1, 3) + "(assert (>= X_0 0))(assert (<= X_0 1))(assert (<= Y_0 100))")
    assert decide(network, query).verdict == "sat"
    monkeypatch.setattr(OnnxNetwork, "replay", lambda self, samples: np.full((1, 3), 1000.0))
    answer = decide(network, query)
    assert answer.verdict == "unknown" and "replay" in answer.reason


@pytest.mark.parametrize("sizes", [(2, 3), (1, 2)])
def test_properties_of_other_networks(tmp_path: Path, sizes: tuple[int, int]) -> None:
    inputs, outputs = sizes
    box = "".join(f"(assert (>= X_{i} 0))(assert (<= X_{i} 1))" for i in range(inputs))
    with pytest.raises(DataError, match=r"the property declares \d (inputs|outputs), network .* has \d"):
        decide(one_input(tmp_path, 0), parse_vnnlib(declared(inputs, outputs) + box))

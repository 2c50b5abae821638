"""Training steps with bounds by rows against plain auto_LiRPA at its own best batch size, in one run.

    python benchmarks/speed_rows.py --data-root data --json results.json

Weights: untrained, and trained by IBP for some epochs on MNIST. Plain auto_LiRPA runs as its examples have it, with its
default options and torch's convolutions; it gets the batch size that suits it best among several. Times are CPU
seconds of this process per sample, the least of several repetitions that alternate between the candidates. One thread.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.data import load_dataset
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.compat import load_lirpa, versions
from gls_lirpa.engine.plain import METHODS, torch_convolutions
from gls_lirpa.estimators import RGS
from gls_lirpa.losses import CertifiedLoss
from gls_lirpa.models import build_model
from gls_lirpa.relaxations import get_relaxation

EPS = 0.1
CASES = (("cnn3", 256, (4, 16, 64, 256)), ("cnn5", 64, (1, 2, 4, 16)))
"""Network, our batch size, and those that plain auto_LiRPA may choose from."""
LEAST_ACCURACY = 0.8
"""Of a trained network. One that collapsed is stable nearly everywhere, which says nothing about trained ones."""
Row = dict[str, Any]
Step = Callable[[], None]


def trained(net: str, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """A network trained by IBP, the radius growing over the first two thirds, slowly at first."""
    model = build_model(net, seed=0)
    criterion = CertifiedLoss(model, "ibp", eps=EPS, l1=1e-6)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3 if net == "cnn3" else 1e-3)
    steps = epochs * (len(x) // 256)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        part = torch.randint(len(x), (256,), generator=generator)
        optimizer.zero_grad()
        criterion(x[part], y[part], eps=EPS * min(1.0, 1.5 * step / steps) ** 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    with torch.no_grad():
        accuracy = float((model(x[:1000]).argmax(1) == y[:1000]).double().mean())
    if accuracy < LEAST_ACCURACY:
        raise click.ClickException(f"{net} did not train: natural accuracy {accuracy:.0%}; give it more --epochs")
    return model


def ours(model: nn.Module, relaxation: str, x: Tensor, y: Tensor) -> Step:
    criterion = CertifiedLoss(model, relaxation, eps=EPS)
    return lambda: criterion(x, y).backward()


def plain(model: nn.Module, relaxation: str, x: Tensor, y: Tensor) -> Step:
    lirpa = load_lirpa()
    bounded = lirpa.bounded_module(model, x[:1])
    bounded.train()
    spec = torch.eye(10)[y][:, None] - torch.eye(10)

    def step() -> None:
        ball = lirpa.perturbation(norm=math.inf, x_L=(x - EPS).clamp(0, 1), x_U=(x + EPS).clamp(0, 1))
        inputs = (lirpa.bounded_tensor(x, ball),)
        with torch_convolutions():
            lower = bounded.compute_bounds(x=inputs, C=spec, method=METHODS[relaxation], bound_upper=False)[0]
            F.cross_entropy(-lower, y).backward()

    return step


def milliseconds(steps: dict[str, tuple[Step, int]], repeats: int) -> dict[str, float]:
    """Of a sample, by name; each step comes with its batch size."""
    best = dict.fromkeys(steps, math.inf)
    for step, _ in steps.values():
        step()
    for _ in range(repeats):
        for name, (step, batch) in steps.items():
            start = time.process_time()
            step()
            best[name] = min(best[name], 1e3 * (time.process_time() - start) / batch)
    return best


def unstable(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of ReLUs that interval arithmetic leaves unstable."""
    with torch.no_grad():
        bounds = BoundEngine(model, x).bounds(linf_box(x, EPS), margin_spec(y, 10), get_relaxation("ibp"))
    ends = bounds.intermediate.values()
    return sum(int(((a < 0) & (b > 0)).sum()) for a, b in ends) / sum(a.numel() for a, _ in ends)


def compared(net: str, weights: str, model: nn.Module, data: tuple[Tensor, Tensor], repeats: int) -> list[Row]:
    ours_batch, theirs = next((batch, sizes) for name, batch, sizes in CASES if name == net)
    rows = []
    for relaxation in METHODS:
        slow = weights == "untrained" and relaxation == "crown"
        batch = {"cnn3": 64, "cnn5": 16}[net] if slow else ours_batch
        steps = {"ours": (ours(model, relaxation, data[0][:batch], data[1][:batch]), batch)}
        for size in theirs:
            steps[f"plain {size}"] = (plain(model, relaxation, data[0][:size], data[1][:size]), size)
        found = milliseconds(steps, repeats)
        size, least = min(((n, t) for n, t in found.items() if n != "ours"), key=lambda pair: pair[1])
        share = unstable(model, data[0][:64], data[1][:64])
        rows.append(
            {
                "net": net, "weights": weights, "relaxation": relaxation, "batch": batch, "unstable": share,
                "ours": found["ours"], "plain": least, "plain batch": int(size.split()[1]),
                "ratio": least / found["ours"],
            }
        )  # fmt: skip
    return rows


def scaling(model: nn.Module, data: tuple[Tensor, Tensor], repeats: int) -> dict[str, float]:
    """Milliseconds per sample of a CROWN step by batch size, and of RGS over GRAD."""
    steps = {f"batch {n}": (ours(model, "crown", data[0][:n], data[1][:n]), n) for n in (16, 64, 256, 512)}
    x, y = data[0][:256], data[1][:256]
    for name, split in (("rgs", False), ("split rgs", True)):
        smoothed = RGS(CertifiedLoss(model, "crown", eps=EPS), model, sigma=1e-3, samples=2, split=split)
        steps[name] = (lambda smoothed=smoothed: smoothed(x, y).backward(), 256)
    return milliseconds(steps, repeats)


def peak_memory(net: str, batch: int) -> float:
    """GiB that one CROWN step of an untrained network takes at most, in a process of its own."""
    command = [sys.executable, __file__, "--peak", f"{net}:{batch}"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _high_water() -> float:
    """GiB of memory that this program had at the most. What getrusage says begins with the memory of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


@click.command()
@click.option("--data-root", default="data", help="Where MNIST lies.")
@click.option("--epochs", default=2.0, help="Of cnn3's IBP training; cnn5 has four times as many.")
@click.option("--repeats", default=3)
@click.option("--memory-batch", default=128)
@click.option("--json", "target", type=click.Path(dir_okay=False), default=None)
@click.option("--peak", hidden=True, default=None)
def main(data_root: str, epochs: float, repeats: int, memory_batch: int, target: str | None, peak: str | None) -> None:
    """Compare, print a table, write JSON."""
    torch.set_num_threads(1)
    if peak is not None:
        net, batch = peak.split(":")
        x, y = torch.rand(int(batch), 1, 28, 28), torch.arange(int(batch)) % 10
        ours(build_model(net), "crown", x, y)()
        print(_high_water())
        return
    split = load_dataset("mnist", root=data_root).train
    data = split.batch(range(len(split)), "cpu")
    rows: list[Row] = []
    result: dict[str, Any] = {"versions": versions(), "lirpa": load_lirpa().version, "rows": rows}
    for net, _, _ in CASES:
        model = trained(net, *data, epochs=max(1, round(epochs if net == "cnn3" else 4 * epochs)))
        rows += compared(net, "trained", model, data, repeats)
        if net == "cnn3":
            result["scaling"] = scaling(model, data, repeats)
        rows += compared(net, "untrained", build_model(net), data, repeats)
    result["peak_gib"] = {f"cnn5-l, batch {memory_batch}": peak_memory("cnn5-l", memory_batch)}
    table = Table("net", "weights", "relaxation", "unstable", "ours ms", "plain ms", "at batch", "ratio")
    for row in rows:
        numbers = [f"{100 * row['unstable']:.1f} %", f"{row['ours']:.3f}", f"{row['plain']:.3f}"]
        numbers += [str(row["plain batch"]), f"{row['ratio']:.2f}"]
        table.add_row(row["net"], row["weights"], row["relaxation"], *numbers)
    Console().print(table)
    Console().print(result["scaling"], result["peak_gib"])
    if target is not None:
        Path(target).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

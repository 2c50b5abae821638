"""Speed and memory of the bound engine, compared side by side in one run.

    python benchmarks/speed_engine.py --json results.json
    python benchmarks/speed_engine.py --part memory --memory-batch 128

Times are CPU seconds of this process, the least of several repetitions that alternate between the
candidates, so that other load on the machine hits them alike. Ratios are what to look at.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.compat import load_lirpa, versions
from gls_lirpa.engine.memory import CPU_CHUNK_MIB
from gls_lirpa.engine.plain import METHODS
from gls_lirpa.engine.wrap import bounded_input
from gls_lirpa.losses import CertifiedLoss
from gls_lirpa.losses.terms import margin_cross_entropy
from gls_lirpa.models import build_model
from gls_lirpa.relaxations import RELAXATIONS

MNIST = (1, 28, 28)
LIMIT_GIB = 6.0
Row = dict[str, Any]


def least_seconds(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    for run in candidates.values():
        run()
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


def images(batch: int, shape: tuple[int, int, int] = MNIST) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(batch, *shape, generator=generator), torch.randint(10, (batch,), generator=generator)


def plain_module(model: nn.Module, x: Tensor) -> Any:
    lirpa = load_lirpa()
    bounded = lirpa.bounded_module(model, x, bound_opts=lirpa.bound_options())
    bounded.train()
    return bounded


def plain_bounds(bounded: Any, box: Box, spec: Tensor, method: str) -> Tensor:
    lower: Tensor = bounded.compute_bounds(x=(bounded_input(box),), C=spec, method=method, bound_upper=False)[0]
    return lower


def stepped(function: Callable[[], Tensor]) -> Callable[[], None]:
    """Forward and backward."""
    return lambda: function().sum().backward()


def hbox(batch: int, repeats: int) -> list[Row]:
    """HBox against auto_LiRPA's Forward method: the target is half the time."""
    model = build_model("cnn3")
    x, y = images(batch)
    box, spec = linf_box(x, 0.1), margin_spec(y, 10)
    engine, bounded = BoundEngine(model, x), plain_module(model, x)

    def ours() -> Tensor:
        return engine.bounds(box, spec, RELAXATIONS.get("hbox")).lower

    def forward() -> Tensor:
        return plain_bounds(bounded, box, spec, "Forward")

    rows = []
    for name, wrap in (("forward", lambda f: f), ("forward and backward", stepped)):
        seconds = least_seconds({"ours": wrap(ours), "Forward": wrap(forward)}, repeats)
        rows.append({"what": f"hbox, cnn3 on MNIST, batch {batch}, {name}", **_compared(seconds, "ours", "Forward")})
    return rows


def overhead(repeats: int) -> list[Row]:
    """Our ``CertifiedLoss`` against the same loss over a bare ``compute_bounds``, forward and backward."""
    settings = (("cnn3", (1, 8, 8), 64), ("cnn3", MNIST, 16))
    return [_overhead(name, METHODS[name], *setting, repeats) for setting in settings for name in METHODS]


def _overhead(name: str, method: str, net: str, shape: tuple[int, int, int], batch: int, repeats: int) -> Row:
    model = build_model(net, in_shape=shape)
    x, y = images(batch, shape)
    criterion, bounded = CertifiedLoss(model, name, eps=0.1), plain_module(model, x)

    def plain() -> Tensor:
        return margin_cross_entropy(plain_bounds(bounded, linf_box(x, 0.1), margin_spec(y, 10), method)).mean()

    seconds = least_seconds({"loss": stepped(lambda: criterion(x, y)), "plain": stepped(plain)}, repeats)
    what = f"{name}, {net} on {'x'.join(map(str, shape))}, batch {batch}: CertifiedLoss over compute_bounds"
    return {"what": what, **_compared(seconds, "loss", "plain")}


def chunks(batch: int, repeats: int) -> list[Row]:
    """One CROWN training step of cnn5 for several chunk sizes: why CPU_CHUNK_MIB is what it is."""
    model = build_model("cnn5")
    x, y = images(batch)
    rows = []
    for mib in (0, 48, 96, CPU_CHUNK_MIB, 384, 1024):
        criterion = CertifiedLoss(model, "crown", eps=0.1, chunk_mib=mib)
        seconds = least_seconds({"step": stepped(partial(criterion, x, y))}, repeats)["step"]
        size = criterion.engine(x).chunk_size(RELAXATIONS.get("crown"), linf_box(x, 0.1), margin_spec(y, 10), {})
        rows.append({"what": f"cnn5 CROWN, batch {batch}, chunks of {mib} MiB = {size} samples", "seconds": seconds})
    return rows


def memory(net: str, batch: int) -> list[Row]:
    """Peak resident memory of one CROWN training step, in a process of its own."""
    command = [sys.executable, os.fspath(Path(__file__).resolve()), "--part", "step"]
    command += ["--memory-net", net, "--memory-batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"the memory measurement failed: {done.stderr.strip()[-500:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return [{"what": f"{net} CROWN training step, MNIST batch {batch}", **found, "limit_gib": LIMIT_GIB}]


def step(net: str, batch: int) -> Row:
    model = build_model(net).train()
    x, y = images(batch)
    start = time.process_time()
    CertifiedLoss(model, "crown", eps=0.1)(x, y).backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"peak_gib": peak, "seconds": time.process_time() - start}


def _compared(seconds: dict[str, float], ours: str, other: str) -> Row:
    return {"seconds": seconds[ours], "other": seconds[other], "speedup": seconds[other] / seconds[ours]}


def _show(rows: list[Row]) -> None:
    table = Table("what", "s", "other s", "speedup", "GiB")
    for row in rows:
        numbers = (row.get(key) for key in ("seconds", "other", "speedup", "peak_gib"))
        table.add_row(row["what"], *("" if number is None else f"{number:.3g}" for number in numbers))
    Console(width=130).print(table)


@click.command()
@click.option("--part", type=click.Choice(["all", "hbox", "overhead", "chunks", "memory", "step"]), default="all")
@click.option("--batch", default=16, show_default=True, help="Batch of the hbox and chunk measurements.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--memory-net", default="cnn5-l", show_default=True)
@click.option("--memory-batch", default=128, show_default=True, help="128 takes many minutes on a CPU.")
@click.option("--threads", default=1, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the rows here.")
def main(
    part: str, batch: int, repeats: int, memory_net: str, memory_batch: int, threads: int, output: Path | None
) -> None:
    """Measure the bound engine."""
    torch.set_num_threads(threads)
    if part == "step":
        click.echo(json.dumps(step(memory_net, memory_batch)))
        return
    parts: dict[str, Callable[[], list[Row]]] = {
        "hbox": lambda: hbox(batch, repeats),
        "overhead": lambda: overhead(repeats),
        "chunks": lambda: chunks(batch, max(1, repeats // 2)),
        "memory": lambda: memory(memory_net, memory_batch),
    }
    rows = [row for name, run in parts.items() if part in ("all", name) for row in run()]
    _show(rows)
    if output is not None:
        output.write_text(json.dumps({"versions": versions(), "threads": threads, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

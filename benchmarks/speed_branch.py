"""Branch and bound against the MILP on the samples that alpha-crown leaves open, and batching against none.

    python benchmarks/speed_branch.py RUN [--samples 50] [--timeout 60] [--milp 50] [--data-root DIR]

RUN is a trained run, for the published figures a cnn3 trained with PGD on MNIST at ε = 0.1. Takes the
first test images that are classified correctly, withstand PGD and are not proven by alpha-crown, and
gives each to both stages with the same limit. Wall-clock limits on a shared machine depend on its load,
so the share of the processor that the process got is reported beside them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.certification.attack import pgd
from gls_lirpa.certification.complete import CompleteStage
from gls_lirpa.certification.stage import OpenSamples, Stage, Subject
from gls_lirpa.data import Split
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.solver.ascent import optimise
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.builder import FormBuilder
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.facets import facets_of
from gls_lirpa.solver.tighten import tightened
from gls_lirpa.training.runs import Run, load_run


def left_open(run: Run, count: int) -> tuple[Subject, OpenSamples]:
    model, test, eps = run.model.eval().requires_grad_(False), run.dataset.test, run.config.eps
    engine = BoundEngine(model, images(test, torch.arange(1)))
    kept: list[Tensor] = []
    bounds: list[Tensor] = []
    seen = correct = robust = 0
    while sum(len(part) for part in kept) < count and seen < len(test.labels):
        index = torch.arange(seen, min(seen + 50, len(test.labels)))
        seen += len(index)
        x, y = images(test, index), test.labels[index]
        correct += int((model(x).argmax(1) == y).sum())
        good = pgd(model, x, y, linf_box(x, eps), generator=torch.Generator().manual_seed(seen)).margins > 0
        robust += int(good.sum())
        index, x, y = index[good], x[good], y[good]
        lower = engine.margins(linf_box(x, eps), y, RELAXATIONS.get("alpha-crown"))
        left = lower.amin(1) <= 0
        kept.append(index[left])
        bounds.append(lower[left])
    index, lower = torch.cat(kept)[:count], torch.cat(bounds)[:count]
    print(f"of {seen} images: {correct} correct, {robust} withstand PGD, {sum(map(len, kept))} open after alpha-crown")
    x = images(test, index)
    return Subject(model, engine), OpenSamples(index, x, test.labels[index], linf_box(x, eps), lower, lower > 1e-3)


def images(split: Split, index: Tensor) -> Tensor:
    return split.images[index].float() / 255


def some(samples: OpenSamples, s: slice) -> OpenSamples:
    return OpenSamples(
        samples.indices[s], samples.x[s], samples.labels[s], samples.box[s], samples.lower[s], samples.proven[s]
    )


def verdicts(stage: Stage, subject: Subject, samples: OpenSamples, *, timeout: float) -> list[str]:
    found, seconds, cpu = [], [], []
    for i in range(len(samples)):
        sample = some(samples, slice(i, i + 1))
        wall, processor = time.monotonic(), time.process_time()
        answer = stage(subject, sample, timeout=timeout)
        seconds.append(time.monotonic() - wall)
        cpu.append(time.process_time() - processor)
        if answer.counterexamples[0] is not None:
            found.append("counterexample")
        else:
            lower = torch.where(sample.proven, sample.lower, answer.lower)
            found.append("verified" if float(lower.min()) > 1e-4 else "unknown")
        print(f"{stage.name} {i + 1}/{len(samples)}: {found[-1]} in {seconds[-1]:.1f} s", flush=True)
    decided = len(found) - found.count("unknown")
    ordered = sorted(seconds)
    print(
        f"{stage.name:5} decided {decided}/{len(found)} = {decided / len(found):.1%}  "
        f"(verified {found.count('verified')}, counterexamples {found.count('counterexample')}), "
        f"median {ordered[len(ordered) // 2]:.1f} s, longest {ordered[-1]:.1f} s, total {sum(seconds):.0f} s wall, "
        f"{sum(cpu):.0f} s processor ({sum(cpu) / sum(seconds):.0%})",
        flush=True,
    )
    return found


def batching(subject: Subject, samples: OpenSamples, *, sizes: tuple[int, ...] = (1, 16, 64, 256)) -> None:
    """Domains per second for one sample, twenty iterations each, by batch size: wall clock and processor time."""
    sample = some(samples, slice(0, 1))
    spec = margin_spec(sample.labels, subject.engine.classes)[0][~sample.proven[0]]
    with torch.no_grad():
        form = tightened(FormBuilder(subject.model, sample.x).form(sample.box, spec), iterations=20)
        bounds = SplitBounds(form, facets=facets_of(form, iterations=20))
        generator = torch.Generator().manual_seed(0)
        rates: dict[int, tuple[float, float]] = {}
        for size in sizes:
            batch = Domains.roots(form, torch.zeros(size, dtype=torch.long))
            signs = torch.randint(-9, 10, batch.signs.shape, generator=generator)
            batch = replace(batch, signs=torch.where(signs.abs() == 9, signs.sign(), 0).to(torch.int8))
            work = partial(optimise, bounds, batch, iterations=20, target=1e9)
            work()
            repeats = max(3, 64 // size)
            wall, processor = time.monotonic(), time.process_time()
            for _ in range(repeats):
                work()
            done = size * repeats
            rates[size] = (done / (time.monotonic() - wall), done / (time.process_time() - processor))
    for size, (wall, processor) in rates.items():
        times, more = wall / rates[1][0], processor / rates[1][1]
        print(
            f"batch {size:4}: {wall:7.1f} domains/s ({times:.1f}x), "
            f"{processor:7.1f} per second of processor ({more:.1f}x)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a trained run")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--milp", type=int, default=50, help="how many of the samples the MILP gets")
    parser.add_argument("--data-root", help="where the run's dataset lies, if not where it was in training")
    options = parser.parse_args()
    subject, samples = left_open(load_run(options.run, data_root=options.data_root), options.samples)
    batching(subject, samples)
    ours = verdicts(CompleteStage("bab"), subject, samples, timeout=options.timeout)
    if options.milp:
        theirs = verdicts(
            CompleteStage("milp"), subject, some(samples, slice(0, options.milp)), timeout=options.timeout
        )
        wrong = sum({a, b} == {"verified", "counterexample"} for a, b in zip(ours, theirs, strict=False))
        print(f"contradictions: {wrong}")


if __name__ == "__main__":
    main()

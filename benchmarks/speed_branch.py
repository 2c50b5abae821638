"""Branch and bound against the MILP on the samples that alpha-crown leaves open, and batching against none.

    python benchmarks/speed_branch.py --data DIR [--samples 50] [--timeout 60] [--milp 50] [--weights FILE]

Trains a cnn3 with PGD on MNIST at ε = 0.1 (or reads the weights of an earlier run), takes the first test
images that are classified correctly, withstand PGD and are not proven by alpha-crown, and gives each to
both stages with the same limit. Wall-clock limits on a shared machine depend on its load, so the share
of the processor that the process got is reported beside them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.certification.branch import BranchAndBound
from gls_lirpa.certification.branch_settings import Settings
from gls_lirpa.certification.milp import ExactOracle
from gls_lirpa.certification.stage import OpenSamples, Stage, Subject
from gls_lirpa.data import Split, load_dataset
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.boxes import linf_box, margin_spec
from gls_lirpa.engine.split import FormBuilder
from gls_lirpa.engine.split_bounds import SplitBounds, tightened
from gls_lirpa.engine.split_hull import hull_of
from gls_lirpa.models import build_model
from gls_lirpa.relaxations import RELAXATIONS

EPS = 0.1


def pgd(model: nn.Module, x: Tensor, y: Tensor, *, steps: int, rate: float, generator: torch.Generator) -> Tensor:
    delta = (torch.rand(x.shape, generator=generator) * 2 - 1) * EPS
    for _ in range(steps):
        z = (x + delta).clamp(0, 1).requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(z), y), z)
        delta = (z.detach() + rate * gradient.sign() - x).clamp(-EPS, EPS)
    return (x + delta).clamp(0, 1)


def images(split: Split, index: Tensor) -> Tensor:
    return split.images[index].float() / 255


def trained(train: Split, *, epochs: int, decay: float) -> nn.Module:
    """PGD training with Adam; ``decay`` is the weight of the ℓ1 norm of the weights."""
    generator = torch.Generator().manual_seed(0)
    model = build_model("cnn3", init="kaiming-uniform")
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    total, step = epochs * len(train.labels) // 128, 0
    for epoch in range(epochs):
        for part in torch.randperm(len(train.labels), generator=generator).split(128):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1.0, 2 * max(0.0, 1 - step / total))
            x, y = images(train, part), train.labels[part]
            attacked = pgd(model, x, y, steps=5, rate=0.35 * EPS, generator=generator)
            loss = F.cross_entropy(model(attacked), y)
            if decay:
                loss = loss + decay * sum(p.abs().sum() for p in model.parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        print(f"epoch {epoch + 1}: loss {float(loss):.3f}", flush=True)
    return model


def left_open(model: nn.Module, test: Split, count: int) -> tuple[Subject, OpenSamples]:
    generator = torch.Generator().manual_seed(1)
    engine = BoundEngine(model, images(test, torch.arange(1)))
    kept: list[Tensor] = []
    bounds: list[Tensor] = []
    seen = correct = robust = 0
    while sum(len(part) for part in kept) < count and seen < len(test.labels):
        index = torch.arange(seen, min(seen + 50, len(test.labels)))
        seen += len(index)
        x, y = images(test, index), test.labels[index]
        good = model(x).argmax(1) == y
        correct += int(good.sum())
        for _ in range(3):
            good &= model(pgd(model, x, y, steps=40, rate=0.1 * EPS, generator=generator)).argmax(1) == y
        robust += int(good.sum())
        index, x, y = index[good], x[good], y[good]
        lower = engine.margins(linf_box(x, EPS), y, RELAXATIONS.get("alpha-crown"))
        left = lower.amin(1) <= 0
        kept.append(index[left])
        bounds.append(lower[left])
    index, lower = torch.cat(kept)[:count], torch.cat(bounds)[:count]
    print(f"of {seen} images: {correct} correct, {robust} withstand PGD, {sum(map(len, kept))} open after alpha-crown")
    x = images(test, index)
    return Subject(model, engine), OpenSamples(index, x, test.labels[index], linf_box(x, EPS), lower, lower > 1e-3)


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
    """Subproblems per second of processor time for one sample, twenty iterations each, by batch size."""
    sample = some(samples, slice(0, 1))
    spec = margin_spec(sample.labels, subject.engine.classes)[0][~sample.proven[0]]
    with torch.no_grad():
        form = tightened(FormBuilder(subject.model, sample.x).form(sample.box, spec), iterations=20)
        bounds = SplitBounds(form, hull=hull_of(form, iterations=20))
        generator = torch.Generator().manual_seed(0)
        rates = {}
        for size in sizes:
            batch = bounds.start(torch.zeros(size, dtype=torch.long))
            signs = torch.randint(-9, 10, batch.signs.shape, generator=generator)
            batch = replace(batch, signs=torch.where(signs.abs() == 9, signs.sign(), 0).to(torch.int8))
            work = partial(bounds.optimise, batch, iterations=20, target=1e9)
            work()
            repeats = max(3, 64 // size)
            started = time.process_time()
            for _ in range(repeats):
                work()
            rates[size] = size * repeats / (time.process_time() - started)
    for size, rate in rates.items():
        print(f"batch {size:4}: {rate:7.1f} subproblems/s  ({rate / rates[1]:.1f}x)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--milp", type=int, default=50, help="how many of the samples the MILP gets")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--decay", type=float, default=0.0, help="weight of the l1 norm in training")
    parser.add_argument("--weights", type=Path, help="read the trained weights here, or write them")
    options = parser.parse_args()
    data = load_dataset("mnist", root=options.data)
    if options.weights is not None and options.weights.exists():
        model: nn.Module = build_model("cnn3")
        model.load_state_dict(torch.load(options.weights))
    else:
        model = trained(data.train, epochs=options.epochs, decay=options.decay)
        if options.weights is not None:
            torch.save(model.state_dict(), options.weights)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    subject, samples = left_open(model, data.test, options.samples)
    batching(subject, samples)
    ours = verdicts(BranchAndBound(Settings()), subject, samples, timeout=options.timeout)
    if options.milp:
        theirs = verdicts(ExactOracle(), subject, some(samples, slice(0, options.milp)), timeout=options.timeout)
        wrong = sum({a, b} == {"verified", "counterexample"} for a, b in zip(ours, theirs, strict=False))
        print(f"contradictions: {wrong}")


if __name__ == "__main__":
    main()

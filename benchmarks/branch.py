"""Branch and bound, with parts of it taken away, and the MILP, on the samples that alpha-crown leaves open.

    python benchmarks/branch.py RUN [RUN …] [--samples 50] [--timeout 60] [--only all,no-groups,milp] [--processor]

RUN is a trained run. Its first test images that are classified correctly, withstand PGD and are not proven by
alpha-crown go to every variant with the same limit: a row per run and variant, and how often two contradict each other.
Wall-clock limits depend on what else the machine does, so the share of the processor that the process got is reported;
--processor limits and counts seconds of processor time of one thread instead.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.certification.attack import pgd
from gls_lirpa.certification.complete import CompleteStage
from gls_lirpa.certification.stage import OpenSamples, Subject
from gls_lirpa.data import Split
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.models import fold_batchnorm
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.solver import SolverSettings
from gls_lirpa.training.runs import load_run

# Without groups there is no second tree.
VARIANTS = {
    "all": partial(CompleteStage, "bab"),
    "no-facets-in-trees": partial(CompleteStage, "bab", SolverSettings(facet_iterations=0)),
    "no-tightening": partial(CompleteStage, "bab", SolverSettings(tightening_iterations=0)),
    "no-groups": partial(CompleteStage, "bab", SolverSettings(group_iterations=0)),
    "no-descent": partial(CompleteStage, "bab", SolverSettings(attack_starts=0)),
    "one-at-a-time": partial(CompleteStage, "bab", SolverSettings(batch_size=2)),
    "matrix-free": partial(CompleteStage, "bab", SolverSettings(form_mib=1)),
    "milp": partial(CompleteStage, "milp"),
}


def left_open(subject: Subject, test: Split, eps: float, count: int, *, most: int) -> OpenSamples:
    """The first samples that are correct, withstand PGD and are not proven by alpha-crown."""
    kept: list[tuple[Tensor, Tensor]] = []
    seen = 0
    while sum(len(index) for index, _ in kept) < count and seen < min(most, len(test.labels)):
        index = torch.arange(seen, min(seen + 100, len(test.labels)))
        seen += len(index)
        x, y = test.batch(index.tolist())
        lower = torch.empty(0)
        for name in ("natural", "ibp", "crown", "pgd", "alpha-crown"):
            if name == "natural":
                left = subject.model(x).argmax(1) == y
            elif name == "pgd":
                generator = torch.Generator().manual_seed(seen)
                left = pgd(subject.model, x, y, linf_box(x, eps), generator=generator).margins > 0
            else:
                lower = subject.engine.margins(linf_box(x, eps), y, RELAXATIONS.get(name))
                left = lower.amin(1) <= 0
            index, x, y = index[left], x[left], y[left]
            if not len(index):
                break
        else:
            kept.append((index, lower[left]))
    index, lower = (torch.cat(part)[:count] for part in zip(*kept, strict=True))
    x, y = test.batch(index.tolist())
    print(f"# {len(index)} open of the first {seen} images", flush=True)
    return OpenSamples(index, x, y, linf_box(x, eps), lower, lower > 1e-3)


def one(samples: OpenSamples, i: int) -> OpenSamples:
    s = slice(i, i + 1)
    return OpenSamples(
        samples.indices[s], samples.x[s], samples.labels[s], samples.box[s], samples.lower[s], samples.proven[s]
    )


def measure(subject: Subject, samples: OpenSamples, stage: CompleteStage, *, timeout: float) -> tuple[str, list[str]]:
    """What becomes of each sample, and a row of the table."""
    verdicts, seconds = [], []
    processor = time.process_time()
    for i in range(len(samples)):
        sample = one(samples, i)
        started = time.monotonic()
        answer = stage(subject, sample, timeout=timeout)
        seconds.append(time.monotonic() - started)
        lower = torch.where(sample.proven, sample.lower, answer.lower)
        falsified = answer.counterexamples[0] is not None
        verdicts.append("falsified" if falsified else "verified" if float(lower.min()) > 1e-4 else "unknown")
    ordered, count = sorted(seconds), Counter(verdicts)
    share = (time.process_time() - processor) / max(sum(seconds), 1e-9)
    return (
        f"{len(verdicts) - count['unknown']} of {len(verdicts)} | {count['verified']} | {count['falsified']} "
        f"| {ordered[len(ordered) // 2]:.1f} | {ordered[-1]:.1f} | {sum(ordered):.0f} | {share:.0%}"
    ), verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of trained runs")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--most", type=int, default=5000, help="images of the test set that are looked through")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds per sample")
    parser.add_argument("--eps", type=float, help="another radius than the run's")
    parser.add_argument("--processor", action="store_true", help="seconds of processor time, of one thread")
    parser.add_argument("--only", default="all,milp", help=f"by commas, of {', '.join(VARIANTS)}")
    parser.add_argument("--data-root", help="where the runs' dataset lies, if not where it was in training")
    parser.add_argument("--net", help="allow a run's own file.py:factory to be executed")
    options = parser.parse_args()
    if options.processor:
        torch.set_num_threads(1)
        time.monotonic = time.process_time
    print("| network | variant | decided | verified | falsified | median | longest | total | processor |", flush=True)
    for path in options.runs:
        run = load_run(path, data_root=options.data_root, net=options.net)
        model = fold_batchnorm(run.model).eval().requires_grad_(False)
        subject = Subject(model, BoundEngine(model, run.dataset.test.batch([0])[0]))
        eps = run.config.eps if options.eps is None else options.eps
        samples = left_open(subject, run.dataset.test, eps, options.samples, most=options.most)
        seen: list[set[str]] = [set() for _ in range(len(samples))]
        for name in options.only.split(","):
            row, verdicts = measure(subject, samples, VARIANTS[name](), timeout=options.timeout)
            print(f"| {path.name} | {name} | {row} |", flush=True)
            for found, verdict in zip(seen, verdicts, strict=True):
                found.add(verdict)
        print(f"# {sum({'verified', 'falsified'} <= found for found in seen)} contradictions", flush=True)


if __name__ == "__main__":
    main()

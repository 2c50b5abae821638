"""Branch and bound with one of its parts taken away, on the samples that alpha-crown leaves open.

    python benchmarks/ablation_branch.py RUN [RUN …] [--samples 20] [--timeout 8] [--only all,no-groups]

A row per run and variant: how many samples were decided, the median and the total of the seconds. The limit is in
seconds of processor time of one thread, so that the figures do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.certification.attack import pgd
from gls_lirpa.certification.complete import CompleteStage
from gls_lirpa.certification.stage import OpenSamples, Subject
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.models import fold_batchnorm
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.solver import SolverSettings
from gls_lirpa.training.runs import Run, load_run

# Without groups there is no second tree.
VARIANTS: dict[str, dict[str, int]] = {
    "all": {},
    "no-facets-in-trees": {"facet_iterations": 0},
    "no-tightening": {"tightening_iterations": 0},
    "no-groups": {"group_iterations": 0},
    "small-first-tree": {"first_nodes": 32},
    "no-descent": {"attack_starts": 0},
    "matrix-free": {"form_mib": 1},
}


def left_open(run: Run, count: int, *, most: int) -> tuple[Subject, OpenSamples]:
    """The first samples that are correct, withstand PGD and are not proven by alpha-crown."""
    model = fold_batchnorm(run.model).eval().requires_grad_(False)
    test, eps = run.dataset.test, run.config.eps
    engine = BoundEngine(model, test.batch([0])[0])
    kept: list[tuple[Tensor, Tensor]] = []
    seen = 0
    while sum(len(index) for index, _ in kept) < count and seen < min(most, len(test.labels)):
        index = torch.arange(seen, min(seen + 100, len(test.labels)))
        seen += len(index)
        x, y = test.batch(index.tolist())
        for name in ("", "ibp", "crown", "pgd", "alpha-crown"):
            if name == "":
                left = model(x).argmax(1) == y
            elif name == "pgd":
                generator = torch.Generator().manual_seed(seen)
                left = pgd(model, x, y, linf_box(x, eps), generator=generator).margins > 0
            else:
                lower = engine.margins(linf_box(x, eps), y, RELAXATIONS.get(name))
                left = lower.amin(1) <= 0
            index, x, y = index[left], x[left], y[left]
            if not len(index):
                break
        else:
            kept.append((index, lower[left]))
    index, lower = (torch.cat(part)[:count] for part in zip(*kept, strict=True))
    x, y = test.batch(index.tolist())
    print(f"# {len(index)} open of the first {seen} images", flush=True)
    return Subject(model, engine), OpenSamples(index, x, y, linf_box(x, eps), lower, lower > 1e-3)


def measure(
    subject: Subject, samples: OpenSamples, settings: SolverSettings, *, timeout: float
) -> tuple[str, list[str]]:
    verdicts, seconds = [], []
    for i in range(len(samples)):
        s = slice(i, i + 1)
        one = OpenSamples(
            samples.indices[s], samples.x[s], samples.labels[s], samples.box[s], samples.lower[s], samples.proven[s]
        )
        started = time.process_time()
        answer = CompleteStage("bab", settings)(subject, one, timeout=timeout)
        seconds.append(time.process_time() - started)
        lower = torch.where(one.proven, one.lower, answer.lower)
        counterexample = answer.counterexamples[0] is not None
        verdicts.append("falsified" if counterexample else "verified" if float(lower.min()) > 1e-4 else "unknown")
    ordered = sorted(seconds)
    decided = len(verdicts) - verdicts.count("unknown")
    return (
        f"{decided} | {verdicts.count('verified')} | {verdicts.count('falsified')} | {len(verdicts)} "
        f"| {ordered[len(ordered) // 2]:.2f} | {sum(ordered):.0f}"
    ), verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of trained runs")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--most", type=int, default=5000, help="images of the test set that are looked through")
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds of processor time per sample")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants, by commas")
    parser.add_argument("--data-root", help="where the runs' dataset lies, if not where it was in training")
    parser.add_argument("--net", help="allow a run's own file.py:factory to be executed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    time.monotonic = time.process_time
    print("| network | variant | decided | verified | falsified | of | median | total |", flush=True)
    for path in options.runs:
        run = load_run(path, data_root=options.data_root, net=options.net)
        subject, samples = left_open(run, options.samples, most=options.most)
        seen: list[set[str]] = [set() for _ in range(len(samples))]
        for name in options.only.split(","):
            row, verdicts = measure(subject, samples, SolverSettings(**VARIANTS[name]), timeout=options.timeout)
            print(f"| {path.name} | {name} | {row} |", flush=True)
            for found, verdict in zip(seen, verdicts, strict=True):
                found.add(verdict)
        wrong = sum({"verified", "falsified"} <= found for found in seen)
        if wrong:
            print(f"# {wrong} contradictions", flush=True)


if __name__ == "__main__":
    main()

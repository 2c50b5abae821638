"""Train, certify and collect the runs behind RESULTS.md's tables that are still missing, one after the other.

    python benchmarks/evidence.py                                     what there is and what is missing
    python benchmarks/evidence.py EXPERIMENT [EXPERIMENT …] [--workers 2] [--only crown-rgs] [--data-root data]

A run is missing where benchmarks/results has no file of its outcome. Ctrl-C stops after the step that is under way;
the same command continues. Each run has one thread, and its output in runs/evidence/<name>.log.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
SHORT = "--epochs 14 --milestones 10,12 --eps-anneal-epochs 4"
IBP_AND_CROWN = {
    f"{relaxation}-{estimator}": f"--relaxation {relaxation} --estimator {estimator}"
    for relaxation, estimator in (("crown", "rgs"), ("crown", "grad"), ("ibp", "grad"), ("ibp", "rgs"))
}
BALANCED = {
    f"{relaxation}-grad-balanced": f"--relaxation {relaxation} --estimator grad --warmup 0.5"
    for relaxation in ("crown", "ibp")
}
RGS_VARIANTS = {
    "grad": "--estimator grad",
    "rgs-1e-3": "--estimator rgs --sigma 1e-3",
    "rgs-1e-2": "--estimator rgs --sigma 1e-2",
    "relative": "--estimator rgs --sigma 0.1 --relative",
    "per-lr": "--estimator rgs --sigma-per-lr 2",
    "split-1e-3": "--estimator rgs --sigma 1e-3 --split",
    "split-1e-2": "--estimator rgs --sigma 1e-2 --split",
}


@dataclass(frozen=True)
class Experiment:
    """``options`` of all its runs, those of its ``cells`` by name, and how its files are called.

    ``certify``: options of the certification, where they are others; ``split``: the images certified; ``titles``: by
    cell its row and column in the table, where they are not the run's relaxation and estimator; ``exploratory``: cells
    whose settings were chosen after a look at outcomes.
    """

    label: str
    options: str
    cells: dict[str, str]
    seeds: int = 5
    certify: str | None = None
    split: str = "test"
    titles: dict[str, tuple[str, str]] = field(default_factory=dict)
    exploratory: tuple[str, ...] = ()


EXPERIMENTS = {
    "mnist-0.1-cnn3-tiny-14-epochs": Experiment(
        "cnn3-tiny-14",
        f"--dataset mnist --preset paper-mnist-0.1 --net cnn3-tiny {SHORT}",
        {**IBP_AND_CROWN, **BALANCED},
        titles={cell: (cell.partition("-")[0], "grad balanced") for cell in BALANCED},
        exploratory=tuple(BALANCED),
    ),
    "mnist-0.1-cnn3-14-epochs": Experiment(
        "cnn3-14", f"--dataset mnist --preset paper-mnist-0.1 --net cnn3 {SHORT}", IBP_AND_CROWN
    ),
    "mnist-0.1-cnn3-tiny-paper": Experiment(
        "cnn3-tiny-70", "--dataset mnist --preset paper-mnist-0.1 --net cnn3-tiny", IBP_AND_CROWN
    ),
    "mnist-0.1-cnn3-paper": Experiment("cnn3-70", "--dataset mnist --preset paper-mnist-0.1 --net cnn3", IBP_AND_CROWN),
    "held-out-initialisation": Experiment(
        "init-cnn3",
        f"--dataset mnist --preset mnist-0.1 --relaxation ibp --estimator grad --limit 10000 {SHORT}",
        {"ibp": "--init ibp", "ibp-hidden": "--init ibp-hidden"},
        certify="--timeout 2",
        split="val",
        titles={"ibp": ("ibp", "grad"), "ibp-hidden": ("ibp, output layer as in torch", "grad")},
    ),
    "held-out-rgs": Experiment(
        "rgs",
        "--dataset mnist --preset mnist-0.1 --net cnn3-tiny --relaxation crown --init ibp-hidden --limit 6000 "
        "--batch-size 64 --epochs 7 --milestones 5,6 --eps-anneal-epochs 2",
        RGS_VARIANTS,
        certify="--timeout 2",
        split="val",
        titles={cell: ("crown", cell.replace("-", " ", 1)) for cell in RGS_VARIANTS},
    ),
}
CERTIFY = "--timeout 20"


@dataclass(frozen=True)
class Job:
    """One run: its name, its experiment and the options that train it."""

    name: str
    experiment: str
    cell: str
    options: str

    @property
    def collected(self) -> list[str]:
        """Options of collecting: which images, where in the table, and how chosen."""
        of = EXPERIMENTS[self.experiment]
        row, column = of.titles.get(self.cell, ("", ""))
        place = ["--method", row, "--estimator", column] if row else []
        return ["--split", of.split, *place, *(["--exploratory"] if self.cell in of.exploratory else [])]

    @property
    def done(self) -> bool:
        return (RESULTS / f"{self.name}.json").exists()

    def run(self, folder: Path, data_root: str) -> bool:
        """Whether every step succeeded; what was done before is not done again."""
        run = folder / self.name
        train = f"--out {shlex.quote(str(run))} --resume"
        if not (run / "config.json").exists():
            train = f"--out {shlex.quote(str(run))} --data-root {shlex.quote(data_root)} {self.options}"
        of = EXPERIMENTS[self.experiment]
        certify = shlex.split(CERTIFY if of.certify is None else of.certify)
        steps = [
            ["train", *shlex.split(train)],
            ["certify", str(run), "--data-root", data_root, "--split", of.split, *certify],
            ["collect", str(run), "--experiment", self.experiment, "--out", str(RESULTS), *self.collected],
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(folder / f"{self.name}.log", "ab") as log:
            return all(
                subprocess.run(
                    [sys.executable, "-m", "glscert", *step], stdout=log, stderr=log, env=environment
                ).returncode
                == 0
                for step in steps
            )


def jobs(experiment: str) -> Iterator[Job]:
    """All of an experiment's runs, seed by seed, so that every cell has as many seeds as another."""
    found = EXPERIMENTS[experiment]
    for seed in range(found.seeds):
        for cell, options in found.cells.items():
            yield Job(f"{found.label}-{cell}-{seed}", experiment, cell, f"{found.options} {options} --seed {seed}")


def work(waiting: list[Job], failed: list[Job], stop: threading.Event, folder: Path, data_root: str) -> None:
    """Take runs from ``waiting`` until there are none."""
    while waiting and not stop.is_set():
        job = waiting.pop(0)
        print(f"{job.name}: begun", flush=True)
        good = job.run(folder, data_root)
        print(f"{job.name}: {'done' if good else 'not finished, see its log'}", flush=True)
        if not good:
            failed.append(job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT")
    parser.add_argument("--only", help="cells, by commas")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"), help="where the run folders go")
    parser.add_argument("--data-root", default="data")
    options = parser.parse_args()
    for name in options.experiments:
        if name not in EXPERIMENTS:
            parser.error(f"unknown experiment {name!r}: expected some of {', '.join(EXPERIMENTS)}")
    if not options.experiments:
        for name in EXPERIMENTS:
            every = list(jobs(name))
            print(f"{name}: {sum(job.done for job in every)} of {len(every)}")
        return 0
    wanted = options.only.split(",") if options.only else None
    waiting = [job for name in options.experiments for job in jobs(name) if not job.done]
    waiting = [job for job in waiting if wanted is None or job.cell in wanted]
    options.runs.mkdir(parents=True, exist_ok=True)
    failed: list[Job] = []
    stop = threading.Event()
    threads = [
        threading.Thread(target=work, args=(waiting, failed, stop, options.runs, options.data_root))
        for _ in range(options.workers)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # the runs got it too, and end by themselves
        stop.set()
        for thread in threads:
            thread.join()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

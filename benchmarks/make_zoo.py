"""Train, certify and add the networks of the zoo: ``make zoo``, or this file with names and --data-root.

A run that is there already (``runs/zoo/<name>``) is not trained again. To add a network, add a line to RECIPES.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from gls_lirpa import load_run
from gls_lirpa.models import count_parameters
from gls_lirpa.zoo.add import add_network
from gls_lirpa.zoo.catalogue import ZooEntry

SHORT = "--epochs 15 --milestones 10,13 --eps-anneal-epochs 5"
RECIPES = {
    "digits-cnn3-crown-rgs": "--dataset digits --net cnn3 --eps 0.1 --relaxation crown --estimator rgs",
    "mnist-cnn3-ibp": f"--dataset mnist --net cnn3 --eps 0.1 --relaxation ibp --estimator grad {SHORT}",
    "mnist-cnn5-ibp": "--dataset mnist --net cnn5 --eps 0.1 --relaxation ibp --estimator grad",
    "mnist-cnn3-crown-rgs": "--dataset mnist --net cnn3 --eps 0.1 --relaxation crown --estimator rgs "
    "--init-from zoo:mnist-cnn3-ibp --epochs 4 --milestones 2,3 --eps-anneal-epochs 0 --eps-shape none --lr 0.001",
    "mnist-cnn3-tiny-crown-rgs": "--dataset mnist --net cnn3-tiny --eps 0.1 --relaxation crown --estimator rgs "
    f"--limit 10000 {SHORT}",
}
STAGES = ("ibp", "pgd", "crown-ibp", "crown", "alpha-crown")
TIMEOUT = 60.0
SEED = 0


def make(name: str, folder: Path, data_root: str) -> ZooEntry:
    """Train a recipe if its run is not there, certify the whole test set and add the network."""
    options = f"{RECIPES[name]} --seed {SEED}"
    if not (folder / "weights.pt").exists():
        command = [sys.executable, "-m", "glscert", "train", "--out", str(folder), "--data-root", data_root]
        subprocess.run([*command, *shlex.split(options)], check=True)
    run = load_run(folder, data_root=data_root)
    result = run.certify(stages=STAGES, timeout=TIMEOUT, progress=True)
    assert run.dataset is not None
    entry = ZooEntry(
        name=name,
        sha256="",
        net=run.config.net,
        dataset=run.config.dataset,
        in_shape=run.dataset.in_shape,
        classes=run.dataset.classes,
        mean=run.dataset.mean,
        std=run.dataset.std,
        parameters=count_parameters(run.model),
        eps=run.config.eps,
        method=run.config.method,
        seed=SEED,
        natural=result.natural,
        adversarial=result.adversarial,
        certified=result.certified,
        samples=len(result),
        stages=STAGES,
        timeout=TIMEOUT,
        command=f"glscert train {options}",
        config={**run.config.to_dict(), "data_root": "data", "init_from": _warm_start(RECIPES[name])},
    )
    return add_network(run.model, entry)


def _warm_start(options: str) -> str | None:
    words = shlex.split(options)
    return words[words.index("--init-from") + 1] if "--init-from" in words else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(RECIPES))
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"))
    options = parser.parse_args()
    for name in options.names:
        entry = make(name, options.out / name, options.data_root)
        print(f"{name}: natural {entry.natural:.4f}, certified {entry.certified:.4f} of {entry.samples}")


if __name__ == "__main__":
    main()

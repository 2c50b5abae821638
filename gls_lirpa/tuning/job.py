"""``glscert tune`` and ``glscert bench fronts``: studies run and shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gls_lirpa.base.checks import require
from gls_lirpa.base.files import replace_file, take_lock
from gls_lirpa.bench.paper import slug
from gls_lirpa.bench.suite import scaled
from gls_lirpa.errors import ConfigError
from gls_lirpa.training.job import make_config
from gls_lirpa.training.runs import dataset_of
from gls_lirpa.tuning.fronts import draw_fronts, finals_table, fronts_table, read_front
from gls_lirpa.tuning.study import FILE, Plan, Study


def tune_job(
    *,
    plan: Plan,
    options: dict[str, Any],
    config_file: Path | None = None,
    epochs: int | None = None,
    out: Path | None = None,
    workers: int | None = None,
) -> Path:
    """Run or continue a study; returns its folder.

    ``plan``: the budget; ``options`` and ``config_file``: of all runs, as for training. ``epochs``: those of the last
    rung, at most; the recipe's schedule is scaled to them. ``workers``: runs at a time. The same call continues.
    """
    require(workers is None or workers >= 1, "workers >= 1", workers)
    config = make_config(options, config_file)
    require(epochs is None or epochs >= 1, "epochs >= 1", epochs)
    config = config if epochs is None else scaled(config, epochs / config.epochs)
    folder = out or Path("tune") / slug(config.dataset, f"{config.eps:.4g}", config.net, *config.method.split("·"))
    study = Study(config, plan, folder)
    dataset_of(config)  # where it is missing, say so before anything is written
    console = Console(stderr=True)
    sizes = " → ".join(map(str, plan.sizes()))
    console.print(
        f"{config.method}: {sizes} configurations, at most {plan.epochs(config.epochs):.0f} epochs in all; {folder}",
        highlight=False,
    )
    if study.evaluations:
        console.print(f"continued: {len(study.evaluations)} evaluations are there", highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "study.lock").open("a") as lock:
        take_lock(lock, busy=f"another process is running the study in {str(folder)!r}")
        study.run(workers=workers or os.cpu_count() or 1, console=console)
    found = read_front(folder)
    table = finals_table(found)
    draw_fronts([found], folder / "front.png")
    replace_file(folder / "front.md", (table.markdown() + "\n").encode())
    replace_file(folder / "front.csv", table.csv().encode())
    Console().print(table.markdown(), highlight=False, markup=False, soft_wrap=True)
    console.print(f"study, table and picture: {folder / FILE}, front.md, front.csv, front.png", highlight=False)
    return folder


def fronts_job(studies: Sequence[Path], *, out: Path | None) -> Path:
    """Several studies' fronts in one picture and table; returns the folder."""
    if not studies:
        raise ConfigError("fronts needs studies: add --study FOLDER for each, the folders of glscert tune")
    folder = out or Path("bench") / "fronts"
    fronts = [read_front(study) for study in studies]
    table = fronts_table(fronts)
    folder.mkdir(parents=True, exist_ok=True)
    draw_fronts(fronts, folder / "fronts.png")
    replace_file(folder / "fronts.md", (table.markdown() + "\n").encode())
    replace_file(folder / "fronts.csv", table.csv().encode())
    Console().print(table.markdown(), highlight=False, markup=False, soft_wrap=True)
    Console(stderr=True).print(f"table and picture: {folder}/fronts.md, fronts.csv, fronts.png", highlight=False)
    return folder

"""``glscert tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import Assignment, MethodCommand, Radius, plugin_option


@click.command(
    cls=MethodCommand, method_options="switches", short_help="Search a method's settings for its front of accuracies."
)
@click.option("--dataset", help="{datasets} (default: digits).")
@click.option("--data-root", help="Where the dataset's files lie (default: data).")
@click.option("--eps", type=Radius(), help="Radius in pixel space, e.g. 0.1 or 2/255.")
@click.option("--net", help="{nets}.")
@click.option("--loss", help="The method's loss: {losses} (default: robust).")
@click.option("--relaxation", help="Its relaxation: {relaxations}.")
@click.option("--estimator", help="Its estimator: {estimators}.")
@click.option("--teacher", help="The network that --loss {learners} learns from.")
@click.option("--set", "assignments", type=Assignment(), multiple=True, help="A fixed loss option, e.g. steps=1.")
@click.option("--config", type=click.Path(path_type=Path), help="JSON or TOML file with other fields of all runs.")
@click.option("--init-from", help="All runs start from these weights: a run folder, a weight file or zoo:NAME.")
@click.option("--epochs", type=int, help="Epochs of the last rung, at most (default: the tuned recipe's).")
@click.option("--limit", type=int, help="Use only the first samples of the data.")
@click.option("--val-fraction", type=float, help="Share of the training set held out, on which all is judged.")
@click.option("--trials", type=int, default=27, show_default=True, help="Configurations of the first rung.")
@click.option("--rungs", type=int, default=3, show_default=True, help="A third goes on to three times the epochs.")
@click.option("--finalists", type=int, default=3, show_default=True, help="Of the last front, how many get more seeds.")
@click.option("--seeds", type=int, default=3, show_default=True, help="Seeds of every finalist.")
@click.option("--samples", type=int, default=1000, show_default=True, help="Held-out images certified.")
@click.option("--timeout", type=float, default=5.0, show_default=True, help="Seconds for each of them.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search and of its runs.")
@click.option("--workers", type=int, help="Runs at a time, on Ray (default: one per core).")
@click.option("--out", type=click.Path(path_type=Path), help="Study folder (default: tune/<setting and method>).")
@plugin_option
def tune(
    out: Path | None, workers: int | None, epochs: int | None, seed: int, config: Path | None, **options: Any
) -> None:
    """Search over the method's own space: lr, L1, epochs, eps factor, and what its loss and estimator have.

    Judged on held-out training images alone. Give every method the same --trials, --rungs and --epochs, and
    compare them with `glscert bench fronts --study A --study B`. Calling the same command again resumes.
    """
    from gls_lirpa.tuning.job import tune_job
    from gls_lirpa.tuning.study import Plan

    plan = {name: options.pop(name) for name in ("trials", "rungs", "finalists", "seeds", "samples", "timeout")}
    tune_job(
        plan=Plan(**plan, seed=seed),
        options={**options, "seed": seed},
        config_file=config,
        epochs=epochs,
        out=out,
        workers=workers,
    )

"""``glscert bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .options import MethodCommand, plugin_option


@click.command(cls=MethodCommand, short_help="Run a suite of trainings and certifications and write its report.")
@click.argument("suite", required=False)
@click.option("--list", "show", is_flag=True, help="List the suites.")
@click.option("--out", type=click.Path(path_type=Path), help="Suite folder (default: bench/<suite>[-<preset>]).")
@click.option("--run", type=click.Path(path_type=Path), help="Study this trained run (landscape, tightness).")
@click.option("--net", help="Allow the run's file.py:factory to be executed.")
@click.option("--study", "studies", type=click.Path(path_type=Path), multiple=True, help="For fronts: a tune folder.")
@click.option("--preset", help="Recipe of the paper's tables: paper (default), literature or tuned.")
@click.option("--workers", type=int, help="Runs at a time, on Ray (default: one per core; one on a GPU).")
@click.option("--epochs-scale", type=float, default=1.0, help="Shorten every training, e.g. 0.1.")
@click.option("--samples", type=int, help="Certified test images per run; perturbations in a landscape.")
@click.option("--seeds", type=int, help="Number of seeds.")
@click.option("--only", help="Run only these rows, columns or cells, e.g. grad,crown-rgs.")
@click.option("--data-root", help="Where the datasets' files lie (default: data).")
@click.option("--device", help="cpu, cuda, cuda:1, …")
@click.option("--dry-run", is_flag=True, help="List the runs with an estimate of time, and do nothing.")
@click.option("--report-only", is_flag=True, help="Write the report of what is there, and run nothing.")
@plugin_option
def bench(suite: str | None, show: bool, studies: tuple[Path, ...], **options: Any) -> None:
    """Run SUITE: ordinary trainings and certifications, then a report. `fronts` compares studies of glscert tune.

    Calling the same command again skips what is complete, resumes what was interrupted and repeats what
    failed. The report is report.html (one self-contained page) with Markdown, CSV, JSON and PNG beside it.
    """
    if suite is None and not show:
        raise click.UsageError("expected a suite, e.g. `glscert bench paradox-digits`; --list shows all of them")
    from gls_lirpa.bench.job import bench_job, list_suites
    from gls_lirpa.bench.suite import Budget
    from gls_lirpa.jobs.certify import shell_command

    if suite is None or show:
        list_suites()
        return
    if suite == "fronts":
        from gls_lirpa.tuning.job import fronts_job

        fronts_job(studies, out=options["out"])
        return
    only = tuple(filter(None, (options.pop("only") or "").split(",")))
    budget = Budget(options.pop("epochs_scale"), options.pop("samples"), options.pop("seeds"), only)
    bench_job(suite, budget=budget, command=shell_command(["glscert", *sys.argv[1:]]), strict=True, **options)

"""``glscert certify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .options import Radius


@click.command(short_help="Certify a trained network sample by sample.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--eps", type=Radius(), help="Radius in pixel space (default: the run's).")
@click.option("--samples", type=int, help="Certify the first samples of the split (default: all).")
@click.option("--split", default="test", show_default=True, help="test, val or train.")
@click.option("--stages", help="Comma-separated, in order (default: ibp,pgd,crown-ibp,crown,alpha-crown,bab).")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds per sample.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the attack.")
@click.option("--cross-check", is_flag=True, help="Attack what was verified and bound what was attacked.")
@click.option("--out", type=click.Path(path_type=Path), help="Result folder (default: RUN/certify-eps<eps>-<split>).")
@click.option("--data-root", help="Where the dataset's files lie (default: the run's).")
@click.option("--net", help="Allow the run's network file path/to/file.py:factory to be executed.")
@click.option("--device", help="cpu, cuda, cuda:1, … (default: the run's).")
def certify(run: Path, **options: Any) -> None:
    """Certify the network of the run folder RUN; calling the same command again resumes.

    Every sample is decided by the cheapest stage that can: verified, falsified (with a counterexample
    on file), misclassified, or unknown after all of them.
    """
    from gls_lirpa.certification.job import certify_job, shell_command

    certify_job(run, **options, command=shell_command(["glscert", *sys.argv[1:]]))

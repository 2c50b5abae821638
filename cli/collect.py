"""``glscert collect``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import MethodCommand, plugin_option


@click.command(cls=MethodCommand, short_help="Keep a certified run's raw outcome as one small file.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--experiment", required=True, help="The table it belongs to, e.g. mnist-0.1-cnn3-paper.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("benchmarks/results"), show_default=True)
@click.option("--name", help="Name of the file (default: the run folder's).")
@click.option("--method", help="Its row in the table (default: loss and relaxation).")
@click.option("--estimator", help="Its column in the table (default: the estimator), e.g. 'rgs relative'.")
@click.option("--exploratory", is_flag=True, help="Mark settings that were chosen after looking at such outcomes.")
@click.option("--commit", "made_by", help="The commit that trained it (default: what the run noted).")
@click.option("--split", default="test", show_default=True, help="Images that were certified: test, or val: held out.")
@click.option("--certification", type=click.Path(path_type=Path), help="Folder of records, where there are several.")
@click.option("--force", is_flag=True, help="Replace files that hold another outcome.")
@plugin_option
def collect(runs: tuple[Path, ...], out: Path, **options: Any) -> None:
    """Collect each RUN, trained and certified, into OUT/<name>.json.

    The file holds configuration, commit, accuracies and the verdict on every image, and nothing of this
    machine. One that is there and holds another outcome is kept, unless --force is given.
    `python benchmarks/tables.py` recomputes all tables from such files.
    """
    from gls_lirpa.bench.results import collect_job

    collect_job(runs, out=out, **options)

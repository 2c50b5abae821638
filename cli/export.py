"""``glscert export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import MethodCommand, Radius, plugin_option


@click.command(cls=MethodCommand, short_help="Write a network as ONNX and its properties as VNN-LIB.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--onnx", type=click.Path(path_type=Path), required=True, help="The ONNX file to write.")
@click.option("--vnnlib", type=click.Path(path_type=Path), help="Folder for VNN-LIB files and instances.csv.")
@click.option("--samples", type=int, default=10, show_default=True, help="The first samples of the split.")
@click.option("--eps", type=Radius(), help="Radius in pixel space (default: the run's).")
@click.option("--split", default="test", show_default=True, help="test, val or train.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds per property, in instances.csv.")
@click.option("--dataset", help="For a weight file: {datasets}.")
@click.option("--data-root", help="Where the dataset's files lie (default: the run's).")
@click.option("--net", help="For a weight file: its network; or allow the run's file.py:factory to be executed.")
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@plugin_option
def export(run: Path, **options: Any) -> None:
    """Write the network of the run folder (or weight file) RUN for other verifiers.

    The network takes pixels in [0, 1]: normalisation is inside. With --vnnlib, each sample becomes the
    property that another class reaches its label within the radius; `unsat` means robust.
    """
    from gls_lirpa.jobs.exchange import export_job

    export_job(run, **options)

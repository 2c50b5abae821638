"""``glscert certify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .options import Assignment, MethodCommand, Radius, plugin_option


@click.command(cls=MethodCommand, short_help="Certify a network sample by sample, or decide properties of it.")
@click.argument("network", metavar="[RUN|ONNX|WEIGHTS]", type=click.Path(path_type=Path), required=False)
@click.option("--eps", type=Radius(), help="Radius in pixel space (default: the run's).")
@click.option("--norm", help="Of the balls: linf or l2 (default: the run's, or linf).")
@click.option("--dataset", help="For a network file: {datasets}.")
@click.option("--samples", type=int, help="Certify the first samples of the split (default: all).")
@click.option("--split", default="test", show_default=True, help="test, val or train.")
@click.option("--stages", help="In order, by commas: {stages} (default: {default_stages}).")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds per sample or property.")
@click.option("--max-nodes", type=int, help="Domains per sample in branch and bound (default: no limit).")
@click.option("--bab", type=Assignment(), multiple=True, help="A setting of branch and bound, e.g. --bab iterations=9.")
@click.option("--workers", type=int, default=1, show_default=True, help="Processes that share the samples, on Ray.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the attack and of branch and bound.")
@click.option("--cross-check", is_flag=True, help="Attack what was verified and bound what was attacked.")
@click.option("--out", type=click.Path(path_type=Path), help="Result folder (default: RUN/certify-eps<eps>-<split>).")
@click.option("--data-root", help="Where the dataset's files lie (default: the run's, or data).")
@click.option("--net", help="For a weight file: its network; or allow the run's file.py:factory to be executed.")
@click.option("--device", help="cpu, cuda, cuda:1, … (default: the run's).")
@click.option("--vnnlib", type=click.Path(path_type=Path), help="Decide this VNN-LIB property of an ONNX file.")
@click.option(
    *("--witness", "--counterexample", "witness"),
    type=click.Path(path_type=Path, allow_dash=True),
    help="With --vnnlib: file for a counterexample; - prints it.",
)
@click.option("--result", type=click.Path(path_type=Path), help="With --vnnlib: file for VNN-COMP's result lines.")
@click.option("--csv", type=click.Path(path_type=Path), help="Decide the rows of a VNN-COMP instances.csv.")
@plugin_option
@click.pass_context
def certify(
    ctx: click.Context,
    network: Path | None,
    vnnlib: Path | None,
    witness: Path | None,
    result: Path | None,
    csv: Path | None,
    **options: Any,
) -> None:
    """Certify the network of a run folder or file; calling the same command again resumes.

    \b
    glscert certify RUN                                        a run, on its own dataset
    glscert certify zoo:mnist-cnn3-ibp                         a network of `glscert zoo`
    glscert certify net.onnx --dataset mnist --eps 0.1         an ONNX file (pixels in [0, 1])
    glscert certify net.pt --net cnn3 --dataset mnist --eps 0.1    a PyTorch state_dict
    glscert certify net.onnx --vnnlib prop.vnnlib              unsat, sat, unknown or timeout
    glscert certify --csv instances.csv                        the same for every row

    Every sample is decided by the cheapest stage that can: verified, falsified (with a counterexample
    on file), misclassified, or unknown after all of them.
    """
    from gls_lirpa.jobs.certify import shell_command
    from gls_lirpa.jobs.command import certify_command

    given = {name for name in ctx.params if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
    certify_command(
        network,
        vnnlib=vnnlib,
        csv=csv,
        witness=witness,
        result=result,
        command=shell_command(["glscert", *sys.argv[1:]]),
        given=given - {"network"},
        options=options,
    )

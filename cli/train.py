"""``glscert train``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import Assignment, MethodCommand, Numbers, Radius, plugin_option


@click.command(cls=MethodCommand, method_options="all", short_help="Train a network with certified training.")
@click.option("--dataset", help="{datasets} (default: digits).")
@click.option("--data-root", help="Where the dataset's files lie (default: data).")
@click.option("--eps", type=Radius(), help="Radius in pixel space, e.g. 0.1 or 2/255.")
@click.option("--norm", help="Of the balls: linf (default) or l2 (losses {ball_losses}; {ball_relaxations}).")
@click.option("--net", help="{nets}, or path/to/file.py:factory.")
@click.option("--loss", help="{losses} (default: robust).")
@click.option("--relaxation", help="{relaxations}.")
@click.option("--estimator", help="{estimators}.")
@click.option("--preset", help="paper, literature, tuned (default, if there is one), or a recipe by name: {presets}.")
@click.option("--config", type=click.Path(path_type=Path), help="JSON or TOML file with any of the run's fields.")
@click.option("--out", type=click.Path(path_type=Path), help="Run folder (default: runs/<date-time>).")
@click.option("--resume", is_flag=True, help="Continue the run in --out exactly where it stopped.")
@click.option("--dry-run", is_flag=True, help="Print configuration, network, time and memory, and do nothing.")
@click.option("--log", multiple=True, help="Also tell {logs}.")
@click.option("--init-from", help="Warm start from a run folder, a weight file or zoo:NAME.")
@click.option("--teacher", help="Run folder or weight file of the network that --loss {learners} learns from.")
@click.option("--init", help="{inits}.")
@click.option("--epochs", type=int)
@click.option("--batch-size", type=int)
@click.option("--lr", type=float)
@click.option("--lr-factor", type=float, help="Learning rate decay at each milestone.")
@click.option("--milestones", type=Numbers(), help="Epochs after which the learning rate decays, e.g. 50,60.")
@click.option("--eps-warmup-epochs", type=float, help="Epochs at eps 0.")
@click.option("--eps-anneal-epochs", type=float, help="Epochs over which eps grows.")
@click.option("--eps-shape", help="{shapes}.")
@click.option("--eps-factor", type=float, help="Train for this times eps, e.g. 2 (certification is for eps).")
@click.option("--padding", help="Of augmented images: edge or zero.")
@click.option("--natural-weight", type=float, help="Share of the natural loss in the mix, 0 to 1.")
@click.option("--l1", type=float, help="Weight of the L1 norm of the weights.")
@click.option("--warmup", type=float, help="Weight of the tightness and balance penalty while eps grows.")
@click.option("--grad-clip", type=float)
@click.option("--average-from", type=float, help="Average the weights of the epochs from this one on.")
@click.option("--sigma-per-lr", type=float, help="Sigma is this times the learning rate, always ({decaying}).")
@click.option(
    *("--set", "assignments"),
    type=Assignment(),
    multiple=True,
    help="An option of the loss or the relaxation, e.g. --set steps=10; see below.",
)
@click.option("--actors", type=int, help="Ray actors that share the perturbed networks ({pooled}).")
@click.option("--ray-address", help="An existing Ray cluster.")
@click.option("--gpus-per-actor", type=float)
@click.option("--val-fraction", type=float, help="Share of the training set held out.")
@click.option("--limit", type=int, help="Use only the first samples of the data.")
@click.option("--eval-samples", type=int, help="Held-out samples evaluated after each epoch.")
@click.option("--seed", type=int)
@click.option("--device", help="cpu, cuda, cuda:1, …")
@plugin_option
def train(
    config: Path | None, out: Path | None, resume: bool, dry_run: bool, log: tuple[str, ...], **options: Any
) -> None:
    """Train a network with loss × relaxation × estimator.

    Without options: digits, cnn3, CROWN bounds smoothed by RGS, in about a minute.
    """
    from gls_lirpa.training.job import train_job

    train_job(config_file=config, out=out, resume=resume, options=options, dry_run=dry_run, log=log)

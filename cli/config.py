"""``glscert config``."""

from __future__ import annotations

import click

from .options import MethodCommand, plugin_option


@click.group(short_help="Show presets and configurations.")
def config() -> None:
    """Show presets and configurations."""


@config.command(cls=MethodCommand, short_help="Print a preset's or a run's whole configuration.")
@click.argument("name", metavar="[PRESET|RUN]", required=False)
@click.option("--estimator", help="{estimators} (default: rgs).")
@click.option("--net", help="{nets} (default: cnn3).")
@click.option("--toml", is_flag=True, help="As TOML instead of JSON.")
@plugin_option
def show(name: str | None, estimator: str | None, net: str | None, toml: bool) -> None:
    """Print the configuration that PRESET (or the folder RUN) stands for, as a file for `train --config`.

    Without a name: the presets there are.
    """
    from gls_lirpa.training.show import shown

    click.echo(shown(name, estimator=estimator, net=net, toml=toml))

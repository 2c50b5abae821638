"""``glscert doctor``."""

from __future__ import annotations

import click

from .options import MethodCommand, plugin_option


@click.command(cls=MethodCommand, short_help="Check the installation by computing small bounds.")
@click.option("--deep", is_flag=True, help="Also check every operation in every relaxation, which takes a minute.")
@click.option("--net", help="Only say which way bounds of this network go, and why: a name, or file.py:factory.")
@click.option("--dataset", default="digits", show_default=True, help="The images that --net is for.")
@click.option("--data-root", default="data", show_default=True, help="Where the dataset's files lie.")
@plugin_option
@click.pass_context
def doctor(ctx: click.Context, deep: bool, net: str | None, dataset: str, data_root: str) -> None:
    """Print versions and device, compute a small bound with every relaxation, and fail if one is broken."""
    from gls_lirpa.doctor import deep_report, report, route_report

    if net is not None:
        route_report(net, dataset, data_root)
        return
    healthy = report()
    ctx.exit(0 if healthy and (not deep or deep_report()) else 1)

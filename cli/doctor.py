"""``glscert doctor``."""

from __future__ import annotations

import click


@click.command(short_help="Check the installation by computing small bounds.")
@click.option("--deep", is_flag=True, help="Also check every operation in every relaxation, which takes a minute.")
@click.pass_context
def doctor(ctx: click.Context, deep: bool) -> None:
    """Print versions and device, compute a small bound with every relaxation, and fail if one is broken."""
    from gls_lirpa.doctor import deep_report, report

    healthy = report()
    ctx.exit(0 if healthy and (not deep or deep_report()) else 1)

"""``glscert doctor``."""

from __future__ import annotations

import click


@click.command(short_help="Check the installation by computing small bounds.")
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Print versions and device, compute a small bound with every relaxation, and fail if one is broken."""
    from gls_lirpa.doctor import report

    ctx.exit(0 if report() else 1)

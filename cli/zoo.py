"""``glscert zoo``."""

from __future__ import annotations

import click


@click.command(short_help="List the certified networks that come with the package.")
@click.argument("name", required=False)
def zoo(name: str | None) -> None:
    """List the networks, or say all about NAME: how it was made, its accuracies and checksum.

    \b
    glscert certify zoo:NAME           certify it again
    glscert train --init-from zoo:NAME start from it
    """
    from gls_lirpa.zoo.table import print_zoo

    print_zoo(name)

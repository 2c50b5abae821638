"""The zoo on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gls_lirpa.zoo.catalogue import info, names


def print_zoo(name: str | None = None) -> None:
    """A table of all networks, or everything about one."""
    console = Console()
    if name is not None:
        entry = info(name)
        for key, value in vars(entry).items():
            shown = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
            console.print(f"{key}: {shown}", highlight=False, markup=False, soft_wrap=True)
        return
    table = Table("name", "weights", "eps", "natural", "attacked", "certified", title="zoo", title_justify="left")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for entry in map(info, names()):
        shares = [f"{100 * share:.2f} %" for share in (entry.natural, entry.adversarial, entry.certified)]
        table.add_row(entry.name, f"{entry.parameters:,}", f"{entry.eps:.4g}", *shares)
    table.caption = "of the test set (attacked: right under all attacks); glscert zoo NAME says how each was made"
    table.caption_justify = "left"
    console.print(table)

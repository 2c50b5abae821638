"""Numbers that fit into one line of a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def fitted(parts: Sequence[str], room: int) -> str:
    """The parts in order, leaving out whole ones that no longer fit: a number is shown entirely or not at all.

    >>> fitted(["loss 0.741", "nat 95.2", "eval/s 54"], 20), fitted(["loss 0.741"], 4)
    ('loss 0.741 nat 95.2', '')
    """
    line = ""
    for part in parts:
        longer = f"{line} {part}" if line else part
        if len(longer) <= room:
            line = longer
    return line

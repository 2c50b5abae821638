"""Matplotlib figures without a display, readable without colour, written as whole files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from gls_lirpa.base.extras import installed, optional
from gls_lirpa.base.files import replace_file

LOOKS = (
    ("#000000", "-", "o"),
    ("#0072B2", "--", "s"),
    ("#D55E00", "-.", "^"),
    ("#009E73", ":", "D"),
    ("#CC79A7", (0, (6, 1, 1, 1, 1, 1)), "v"),
    ("#7F7F7F", (0, (8, 3)), "x"),
)
"""Colour (told apart by colour-blind readers too), line and marker of the first, second, … curve."""

MARKS = 10
"""Markers per curve: enough to recognise it."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Those that can be filled."""

HATCHES = ("", "///", "xxx", "...")


def shade(index: int, count: int, *, light: float = 1.0, dark: float = 0.0) -> str:
    """The grey of one of ``count``, evenly from ``light`` (1: white) to ``dark``.

    >>> [shade(index, 3) for index in range(3)]
    ['1.0', '0.5', '0.0']
    """
    return str(light - (light - dark) * index / max(count - 1, 1))


def can_draw() -> bool:
    """Whether pictures can be drawn here; where one is not asked for, its absence is no error."""
    return installed("matplotlib")


def new_figure(width: float = 7.0, height: float = 4.5) -> Any:
    """An empty figure of this size in inches."""
    agg = optional("matplotlib.backends.backend_agg", extra="plots", feature="drawing pictures")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    agg.FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, file: Path, *, dpi: int = 110) -> None:
    """Write a figure as PNG.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "empty.png"
    >>> save_figure(new_figure(), file)
    >>> file.read_bytes()[1:4]
    b'PNG'
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    replace_file(file, buffer.getvalue())


def curve_look(index: int, points: int) -> dict[str, Any]:
    """How the curve with this number is drawn, as arguments of ``plot``.

    >>> curve_look(1, 5)["linestyle"], curve_look(1, 5)["marker"]
    ('--', 's')
    """
    color, line, marker = LOOKS[index % len(LOOKS)]
    # Shifted from curve to curve, so that markers of curves on top of each other stay visible.
    every = max(1, points // MARKS)
    offset = index * every // len(LOOKS) if every > 1 else 0
    return {
        "color": color,
        "linestyle": line,
        "marker": marker,
        "markersize": 4,
        "markevery": (offset, every),
        "linewidth": 1.4,
    }


def legend_above(figure: Any, panel: Any, title: str, *, columns: int = 4) -> None:
    """The curves of a panel named above the whole figure."""
    handles, labels = panel.get_legend_handles_labels()
    ncols = min(len(labels), columns)
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols, fontsize=9, title=title, frameon=False)

"""Matplotlib figures without a display, written as whole files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from gls_lirpa.base.extras import installed, optional
from gls_lirpa.base.files import replace_file


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

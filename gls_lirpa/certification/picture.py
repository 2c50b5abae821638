"""The cactus picture: how many samples are decided within how much time each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from gls_lirpa.base.figures import curve_look, new_figure, save_figure
from gls_lirpa.certification.records import Record

LEAST_SECONDS = 1e-4
DECIDED = {"verified": "verified: provably robust", "falsified": "falsified: counterexample found"}


def draw_cactus(records: Sequence[Record], file: Path, *, title: str = "") -> None:
    """Draw, for verified and falsified samples, their number against the seconds that each of them took.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "cactus.png"
    >>> draw_cactus([Record(0, 1, 1, "verified", "ibp", 0.5, {"ibp": 0.01})], file)
    >>> file.stat().st_size > 1000
    True
    """
    figure = new_figure(6.0, 4.0)
    axes = figure.subplots()
    decades: list[float] = []
    for index, (verdict, meaning) in enumerate(DECIDED.items()):
        times = sorted(max(r.seconds, LEAST_SECONDS) for r in records if r.verdict == verdict)
        if times:
            label = f"{meaning} ({len(times)})"
            decades += [math.floor(math.log10(times[0])), math.floor(math.log10(times[-1])) + 1]
            axes.step(times, range(1, len(times) + 1), where="post", label=label, **curve_look(index, len(times)))
    open_samples = sum(r.verdict == "unknown" for r in records)
    axes.set_xscale("log")
    if decades:  # within less than one, tick labels would be many and long
        axes.set_xlim(10 ** min(decades), 10 ** max(decades))
    axes.set_xlabel("seconds per sample, at most")
    axes.set_ylabel("samples")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{title}\n{len(records)} samples, {open_samples} unknown".strip(), fontsize=10)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")
    save_figure(figure, file, dpi=150)

"""Pictures of the analyses, readable without colour: every curve has its own line and marker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gls_lirpa.analysis.dynamics import Dynamics
from gls_lirpa.analysis.landscape import Landscape
from gls_lirpa.analysis.tightness import Tightness
from gls_lirpa.analysis.toys import Toy
from gls_lirpa.base.figures import curve_look, legend_above, new_figure, save_figure
from gls_lirpa.relaxations import RELAXATIONS

BAND = 1.96
"""Standard errors on either side of a mean that hold 95 % of it."""

WIDE = 30.0
"""Losses whose largest is more than this times the smallest are drawn on a logarithmic axis."""


def draw_landscape(landscape: Landscape, file: Path, *, title: str = "") -> None:
    """One panel per sigma: every relaxation's normalised loss along the line, with a 95 % band.

    Of a ``landscape``, into ``file``, under a ``title``.

    >>> import tempfile
    >>> from gls_lirpa.analysis import Curve, Scores
    >>> curve = Curve("ibp", 0.0, [4.0, 2.0, 1.0], [2.0, 1.0, 0.5], [0.0] * 3, Scores(50.0, 1250.0, 0.0))
    >>> file = Path(tempfile.mkdtemp()) / "landscape.png"
    >>> draw_landscape(Landscape(0.1, 1e-3, 0.02, 1, 8, 1.0, [-0.02, 0.0, 0.02], [curve]), file)
    >>> file.stat().st_size > 1000
    True
    """
    sigmas, relaxations = landscape.sigmas, landscape.relaxations
    columns = 1 if len(sigmas) == 1 else 2
    figure = new_figure(height=4.5 if len(sigmas) <= 4 else 2.2 * math.ceil(len(sigmas) / 2))
    panels = figure.subplots(math.ceil(len(sigmas) / columns), columns, sharex=True, sharey=True, squeeze=False)
    for panel, sigma in zip(panels.flat, sigmas, strict=False):
        for index, name in enumerate(relaxations):
            curve = landscape.curve(name, sigma)
            values, errors = np.array(curve.values), BAND * np.array(curve.errors)
            look = curve_look(_number(name, index), len(values))
            panel.plot(landscape.positions, values, label=name, **look)
            if np.any(errors > 0):
                bounds = (values - errors, values + errors)
                panel.fill_between(landscape.positions, *bounds, color=look["color"], alpha=0.2, linewidth=0)
        panel.set_title("original" if sigma == 0 else f"σ = {sigma:.3g}", fontsize=9)
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(sigmas) :]:
        panel.set_visible(False)
    length = landscape.lr * landscape.gradient_norm
    figure.supxlabel(f"gradient steps t  (t = 1: lr {landscape.lr:.3g}, length {length:.2g})", fontsize=9)
    figure.supylabel("loss / loss at t = 0", fontsize=9)
    legend_above(figure, panels.flat[0], title)
    save_figure(figure, file)


def draw_scores(landscape: Landscape, file: Path, *, title: str = "") -> None:
    """The three scores of a ``landscape`` over sigma, one line per relaxation, into ``file``, under a ``title``.

    >>> import tempfile
    >>> from gls_lirpa.analysis import Curve, Scores
    >>> curve = Curve("ibp", 0.0, [4.0, 2.0, 1.0], [2.0, 1.0, 0.5], [0.0] * 3, Scores(50.0, 1250.0, 0.0))
    >>> file = Path(tempfile.mkdtemp()) / "scores.png"
    >>> draw_scores(Landscape(0.1, 1e-3, 0.02, 1, 8, 1.0, [-0.02, 0.0, 0.02], [curve]), file)
    >>> file.stat().st_size > 1000
    True
    """
    names = {
        "max_slope": "largest slope",
        "curvature": "mean curvature",
        "nonconvexity": "deviation from convexity",
    }
    sigmas, relaxations = landscape.sigmas, landscape.relaxations
    figure = new_figure(width=8.0, height=3.6)
    panels = figure.subplots(1, len(names))
    positions = range(len(sigmas))
    for panel, (score, label) in zip(panels, names.items(), strict=True):
        for index, name in enumerate(relaxations):
            heights = [getattr(landscape.curve(name, sigma).scores, score) for sigma in sigmas]
            # A convex curve's deviation is 0, which a logarithmic axis cannot show.
            positive = [height if height > 0 else math.nan for height in heights]
            panel.plot(positions, positive, label=name, **curve_look(_number(name, index), len(sigmas)))
        _whole_decades(panel)
        panel.set_title(label, fontsize=9)
        panel.set_xticks(list(positions), ["0" if s == 0 else f"{s:.3g}" for s in sigmas], rotation=45, fontsize=8)
        panel.set_xlabel("σ", fontsize=9)
        panel.tick_params(axis="y", labelsize=8)
        panel.grid(alpha=0.3)
    legend_above(figure, panels[0], title)
    save_figure(figure, file)


def draw_tightness(tightness: Tightness, file: Path, *, title: str = "") -> None:
    """Certified accuracy over the radius, each relaxation with the area under its curve.

    ``tightness``: what is drawn, into ``file``, under a ``title``.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "tightness.png"
    >>> draw_tightness(Tightness([0.0, 0.1], 0.9, {"ibp": [0.9, 0.1]}, {"ibp": 0.5}, [], 10), file)
    >>> file.stat().st_size > 1000
    True
    """
    figure = new_figure()
    axes = figure.subplots()
    radii, number = tightness.radii, len(tightness.radii)
    if tightness.adversarial:
        shares = [100 * share for share in tightness.adversarial]
        axes.plot(radii, shares, label="PGD (upper limit)", color="0.6", linestyle="-", linewidth=2.5)
    for index, (name, shares) in enumerate(tightness.certified.items()):
        area = f" (area {tightness.areas[name]:.3f})" if name in tightness.areas else ""
        look = curve_look(_number(name, index), number)
        axes.plot(radii, [100 * share for share in shares], label=name + area, **look)
    axes.axhline(100 * tightness.natural, color="0.3", linewidth=0.8, label="natural")
    axes.set_xlabel("radius ε")
    axes.set_ylabel(f"certified accuracy [%], {tightness.samples} samples")
    axes.set_ylim(-3, 103)
    axes.grid(alpha=0.3)
    legend_above(figure, axes, title, columns=3)
    save_figure(figure, file)


def draw_toys(toys: Sequence[Toy], file: Path, *, title: str = "") -> None:
    """Each of the ``toys`` in a panel of its own: the loss over its weight, and smoothed.

    The picture goes into ``file``, under a ``title``.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "toys.png"
    >>> draw_toys([Toy("jump", [-1.0, 0.0, 1.0], [1.0, 1.0, 1.0], {})], file)
    >>> file.stat().st_size > 1000
    True
    """
    figure = new_figure(width=8.0 if len(toys) > 1 else 5.0, height=3.8)
    panels = figure.subplots(1, len(toys), squeeze=False)[0]
    for panel, toy in zip(panels, toys, strict=True):
        curves = {0.0: toy.original, **toy.smoothed}
        for index, (sigma, values) in enumerate(curves.items()):
            label = "original" if sigma == 0 else f"σ = {sigma:.3g}"
            look = {**curve_look(index, len(values)), "marker": ""}
            points = _broken_at_jumps(toy.weights, values) if sigma == 0 else (toy.weights, values)
            panel.plot(*points, label=label, **look)
        panel.set_title(toy.name, fontsize=10)
        panel.set_xlabel("weight w")
        panel.set_ylabel("loss")
        low, high = min(map(min, curves.values())), max(toy.original)
        # Strong smoothing near a steep wall would make the rest of the picture flat.
        room = high - low or 1.0
        panel.set_ylim(low - 0.05 * room, high + 0.25 * room)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, file)


def draw_dynamics(dynamics: Dynamics, file: Path, *, title: str = "") -> None:
    """Training loss above, held-out certified accuracy below; a grey line where annealing of the radius ends.

    ``dynamics``: whose runs are drawn, into ``file``, under a ``title``.

    >>> import tempfile
    >>> from gls_lirpa.analysis import RunCurve
    >>> run = RunCurve("grad", [1.0, 2.0], [2.0, 1.0], [0.0, 0.1], [50.0, 90.0], [0.0, 70.0], "val")
    >>> file = Path(tempfile.mkdtemp()) / "dynamics.png"
    >>> draw_dynamics(Dynamics([run]), file)
    >>> file.stat().st_size > 1000
    True
    """
    figure = new_figure(height=5.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for index, run in enumerate(dynamics.runs):
        look = curve_look(index, len(run.epochs))
        upper.plot(run.epochs, run.loss, label=run.label, **look)
        lower.plot(run.epochs, run.certified, **look)
    losses = [loss for run in dynamics.runs for loss in run.loss if loss > 0]
    if losses and max(losses) > WIDE * min(losses):
        upper.set_yscale("log")
    upper.set_ylabel("training loss")
    held_out = sorted({run.held_out for run in dynamics.runs})
    lower.set_ylabel(f"certified on {', '.join(held_out)} [%]")
    lower.set_xlabel("epoch")
    lower.xaxis.get_major_locator().set_params(integer=True)
    lower.set_ylim(0, 100)
    annealed = sorted({run.annealed for run in dynamics.runs if run.annealed > run.epochs[0]})
    for panel in (upper, lower):
        panel.grid(alpha=0.3)
        for epoch in annealed:
            label = "ε is full" if panel is upper and epoch == annealed[0] else None
            panel.axvline(epoch, color="0.5", linewidth=1, linestyle=(0, (2, 2)), label=label)
    legend_above(figure, upper, title)
    save_figure(figure, file)


def _broken_at_jumps(weights: Sequence[float], values: Sequence[float]) -> tuple[Any, Any]:
    """The points of a curve with a NaN at each jump, where a line would show values that do not exist."""
    steps = np.abs(np.diff(values))
    jumps = np.flatnonzero(steps > max(20 * float(np.median(steps)), 0.2)) + 1
    return np.insert(np.array(weights), jumps, math.nan), np.insert(np.array(values), jumps, math.nan)


def _whole_decades(panel: Any) -> None:
    """A logarithmic axis from one power of ten to another, so that only those need labels."""
    heights = [h for line in panel.get_lines() for h in line.get_ydata() if h > 0]
    panel.set_yscale("log")
    if heights:
        low, high = math.floor(math.log10(min(heights))), math.ceil(math.log10(max(heights)))
        panel.set_ylim(10.0**low, 10.0 ** max(high, low + 1))


def _number(name: str, index: int) -> int:
    """A relaxation looks the same in every picture, whichever others are drawn with it."""
    return RELAXATIONS.names().index(name) if name in RELAXATIONS.names() else index

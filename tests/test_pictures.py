"""Every picture shows the numbers it was given, under their names, and is a small PNG file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from gls_lirpa.analysis import (
    Curve,
    Dynamics,
    Landscape,
    RunCurve,
    Scores,
    Surface,
    Tightness,
    draw_dynamics,
    draw_landscape,
    draw_scores,
    draw_surface,
    draw_tightness,
    draw_toys,
    jump_toy,
    smoothness_scores,
    valley_toy,
)
from gls_lirpa.bench import figures as suites
from gls_lirpa.bench.outcomes import Outcome
from gls_lirpa.certification import Record
from gls_lirpa.certification.picture import draw_cactus
from gls_lirpa.training.summary import draw_curve
from gls_lirpa.tuning import fronts as studies
from gls_lirpa.tuning.study import Final

Draw = Callable[..., None]
NAMES = ("ibp", "hbox", "crown-ibp", "crown")
SIGMAS = (0.0, 1e-6, 5e-5, 5e-4)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The figure that a call of ``draw(…, file, …)`` has written."""
    figures: list[Figure] = []
    save = Figure.savefig

    def watched(self: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", watched)

    def call(draw: Draw, what: Any, **options: Any) -> Figure:
        file = tmp_path / "picture.png"
        draw(what, file, **options)
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n") and 1_000 < len(content) < 120_000
        return figures.pop()

    return call


def lines(panel: Any) -> dict[str, tuple[list[float], list[float]]]:
    """The labelled curves of a panel."""
    found = {str(line.get_label()): line for line in panel.get_lines()}
    return {
        label: (list(line.get_xdata()), list(line.get_ydata()))
        for label, line in found.items()
        if not label.startswith("_")
    }


def legend(figure: Any) -> tuple[str, list[str]]:
    (found,) = figure.legends
    return found.get_title().get_text(), [text.get_text() for text in found.get_texts()]


def landscape(points: int = 101) -> Landscape:
    t = np.linspace(-1.0, 1.0, points)
    step = t[1] - t[0]
    curves = []
    for slope, name in enumerate(NAMES):
        for k, sigma in enumerate(SIGMAS):
            values = 1.0 - 0.1 * slope * t + 0.01 * (k + 1) * np.sign(np.sin(20 * t))
            found = smoothness_scores(values, step=step)
            curves.append(Curve(name, sigma, values.tolist(), values.tolist(), [0.01 * (sigma > 0)] * points, found))
    return Landscape(0.1, 1e-3, step, 8, 4, 20.0, t.tolist(), curves)


def test_landscape(drawn: Callable[..., Any]) -> None:
    found = landscape()
    figure = drawn(draw_landscape, found, title="cnn3")
    assert [panel.get_title() for panel in figure.axes] == ["original", "σ = 1e-06", "σ = 5e-05", "σ = 0.0005"]
    assert legend(figure) == ("cnn3", list(NAMES))
    for panel, sigma in zip(figure.axes, SIGMAS, strict=True):
        assert lines(panel) == {name: (found.positions, found.curve(name, sigma).values) for name in NAMES}
        assert len(panel.collections) == (len(NAMES) if sigma else 0), "bands where there are errors"
    band = figure.axes[1].collections[0].get_paths()[0].vertices[:, 1]
    values = np.array(found.curve("ibp", 1e-6).values)
    assert (band.min(), band.max()) == pytest.approx((values.min() - 0.0196, values.max() + 0.0196))


def test_scores(drawn: Callable[..., Any]) -> None:
    found = landscape()
    figure = drawn(draw_scores, found, title="cnn3")
    names = ("max_slope", "curvature", "nonconvexity")
    assert [p.get_title() for p in figure.axes] == ["largest slope", "mean curvature", "deviation from convexity"]
    assert legend(figure) == ("cnn3", list(NAMES))
    for panel, score in zip(figure.axes, names, strict=True):
        shown = {name: [getattr(found.curve(name, s).scores, score) for s in SIGMAS] for name in NAMES}
        assert lines(panel) == {name: ([0, 1, 2, 3], heights) for name, heights in shown.items()}
        assert [text.get_text() for text in panel.get_xticklabels()] == ["0", "1e-06", "5e-05", "0.0005"]
        low, high = panel.get_ylim()
        assert panel.get_yscale() == "log" and all(low <= h <= high for heights in shown.values() for h in heights)


@pytest.mark.parametrize("draw", [draw_landscape, draw_scores])
def test_curves_of_nan_are_named_and_empty(draw: Draw, drawn: Callable[..., Any]) -> None:
    nan = math.nan
    curve = Curve("crown", 0.0, [nan] * 3, [nan] * 3, [nan] * 3, Scores(nan, nan, nan))
    figure = drawn(draw, Landscape(0.1, 1e-3, 0.02, 1, 1, 1.0, [-0.02, 0.0, 0.02], [curve]))
    assert legend(figure)[1] == ["crown"]
    for panel in figure.axes:
        assert np.isnan(lines(panel)["crown"][1]).all()


def test_tightness(drawn: Callable[..., Any]) -> None:
    radii = [0.0, 0.1, 0.2]
    shares = {"ibp": [0.9, 0.4, 0.1], "crown": [0.9, 0.5, 0.2]}
    found = Tightness(radii, 0.95, shares, {"ibp": 0.45, "crown": 0.525}, [0.9, 0.8, 0.7], 100)
    figure = drawn(draw_tightness, found, title="cnn3")
    shown = {label: y for label, (_, y) in lines(figure.axes[0]).items()}
    assert {label: pytest.approx(y) for label, y in shown.items()} == {
        "PGD (upper limit)": [90, 80, 70],
        "ibp (area 0.450)": [90, 40, 10],
        "crown (area 0.525)": [90, 50, 20],
        "natural": [95, 95],
    }
    assert legend(figure) == ("cnn3", list(shown)) and "100 samples" in figure.axes[0].get_ylabel()


def test_toys(drawn: Callable[..., Any]) -> None:
    toys = [jump_toy(), valley_toy()]
    figure = drawn(draw_toys, toys)
    assert [panel.get_title() for panel in figure.axes] == [toy.name for toy in toys]
    for panel, toy in zip(figure.axes, toys, strict=True):
        shown = lines(panel)
        assert list(shown) == ["original", *(f"σ = {sigma:.3g}" for sigma in toy.smoothed)]
        for sigma, values in toy.smoothed.items():
            assert shown[f"σ = {sigma:.3g}"] == (toy.weights, values)
        original = np.array(shown["original"][1])
        assert original[~np.isnan(original)].tolist() == toy.original
    assert np.isnan(lines(figure.axes[0])["original"][1]).sum() == 1, "no line across the jump"


def test_dynamics(drawn: Callable[..., Any]) -> None:
    epochs = [float(e) for e in range(1, 71)]
    eps = [min(e / 20, 1.0) * 0.1 for e in epochs]
    losses = {"grad": [3.0 / e for e in epochs], "rgs": [2.0 / e for e in epochs]}
    runs = [RunCurve(name, epochs, loss, eps, [90.0] * 70, epochs, "val") for name, loss in losses.items()]
    figure = drawn(draw_dynamics, Dynamics(runs), title="cnn3")
    upper, lower = figure.axes
    assert legend(figure) == ("cnn3", ["grad", "rgs", "ε is full"])
    shown = lines(upper)
    assert shown["ε is full"][0] == [20.0, 20.0]
    assert {name: shown[name] for name in losses} == {name: (epochs, loss) for name, loss in losses.items()}
    assert [list(line.get_ydata()) for line in lower.get_lines()[:2]] == [epochs, epochs]
    assert lower.get_ylabel() == "certified on val [%]" and upper.get_yscale() == "log"


def test_surface(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_surface, Surface(1e-3, [-1.0, 0.0, 1.0], {4: [2.0, 1.0, 3.0], 2: [5.0, 1.0, 2.0]}))
    (axes,) = figure.axes
    # The widest curve spans 4: so far each next one is shifted.
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[5.0, 1.0, 2.0], [6.0, 5.0, 7.0]]
    assert [text.get_text() for text in axes.texts] == ["2", "4"] and "σ = 0.001" in axes.get_ylabel()


def test_cactus(drawn: Callable[..., Any]) -> None:
    times = {"verified": (0.5, 0.02, 3.0), "falsified": (0.1,), "unknown": (9.0, 9.0)}
    records = [
        Record(i, 1, 1, verdict, "bab", 0.5, {"bab": seconds})
        for verdict, every in times.items()
        for i, seconds in enumerate(every)
    ]
    (axes,) = drawn(draw_cactus, records, title="run").axes
    assert axes.get_title() == "run\n6 samples, 2 unknown"
    assert lines(axes) == {
        "verified: provably robust (3)": ([0.02, 0.5, 3.0], [1, 2, 3]),
        "falsified: counterexample found (1)": ([0.1], [1]),
    }
    assert axes.get_xlim() == pytest.approx((0.01, 10)) and axes.get_xscale() == "log"


def test_training_curve(drawn: Callable[..., Any]) -> None:
    rows = [
        {"epoch": e, "loss": 2.0 / e, "eps": 0.1 * e, "natural": 90.0 + e, "certified": 80.0 + e, "held_out": "val"}
        for e in (1, 2, 3)
    ]
    upper, lower, radius = drawn(draw_curve, rows, title="cnn3").axes
    assert upper.get_title() == "cnn3" and lower.get_ylabel() == "accuracy on val [%]"
    for panel, names in ((upper, {"training loss": "loss"}), (radius, {"ε": "eps"})):
        assert lines(panel) == {label: ([1, 2, 3], [row[key] for row in rows]) for label, key in names.items()}
    assert lines(lower) == {name: ([1, 2, 3], [row[name] for row in rows]) for name in ("natural", "certified")}


def outcomes() -> list[Outcome]:
    numbers = {("ibp", "grad"): (95.0, 90.0), ("crown", "grad"): (96.0, 80.0), ("crown", "rgs"): (97.0, 92.0)}
    done = [
        Outcome("", "", *cell, seed, "done", natural=natural + seed, certified=certified - seed)
        for cell, (natural, certified) in numbers.items()
        for seed in (-1, 1)
    ]
    return [*done, Outcome("", "", "ibp", "rgs", 0, "failed", certified=1.0, natural=1.0)]


def test_fronts_of_a_suite(drawn: Callable[..., Any]) -> None:
    rows, columns = ("ibp", "crown"), ("grad", "rgs")
    (axes,) = drawn(suites.draw_fronts, outcomes(), rows=rows, columns=columns).axes
    shown = {container.get_label(): container for container in axes.containers}
    points = {label: (float(c[0].get_xdata()[0]), float(c[0].get_ydata()[0])) for label, c in shown.items()}
    assert points == {"ibp · grad": (95, 90), "crown · grad": (96, 80), "crown · rgs": (97, 92)}
    looks = {label: (c[0].get_marker(), c[0].get_markerfacecolor()) for label, c in shown.items()}
    assert looks["ibp · grad"][0] != looks["crown · grad"][0] == looks["crown · rgs"][0]
    assert looks["ibp · grad"][1] == looks["crown · grad"][1] != looks["crown · rgs"][1]
    segment = shown["ibp · grad"][2][1].get_segments()[0]
    assert segment[:, 1] == pytest.approx([90 - math.sqrt(2), 90 + math.sqrt(2)])


def test_every_cell_of_a_larger_suite_is_drawn_in_a_look_of_its_own(drawn: Callable[..., Any]) -> None:
    rows, columns = [f"row {i}" for i in range(6)], [f"column {i}" for i in range(5)]
    done = [Outcome("", "", r, c, 0, "done", natural=90.0, certified=80.0) for r in rows for c in columns]
    (axes,) = drawn(suites.draw_fronts, done, rows=rows, columns=columns).axes
    assert len({(c[0].get_marker(), c[0].get_markerfacecolor()) for c in axes.containers}) == len(done)
    (axes,) = drawn(suites.draw_bars, done, rows=rows, columns=columns).axes
    assert len(axes.patches) == len(done) and len({bar.get_facecolor() for bar in axes.patches}) == len(rows)


def test_bars_of_a_suite(drawn: Callable[..., Any]) -> None:
    rows, columns = ("ibp", "crown"), ("grad", "rgs")
    (axes,) = drawn(suites.draw_bars, outcomes(), rows=rows, columns=columns).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == list(columns)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(rows)
    bars = [(round(bar.get_x() + bar.get_width() / 2, 6), bar.get_height()) for bar in axes.patches]
    assert bars == [(-0.2, 90.0), (0.2, 80.0), (1.2, 92.0)]
    low, high = axes.get_ylim()
    assert low < 80 - math.sqrt(2) and high > 92 + math.sqrt(2)


def test_fronts_of_studies(drawn: Callable[..., Any]) -> None:
    points = {"ibp": [(95.0, 90.0), (94.0, 91.0), (93.5, 90.5)], "crown": [(97.0, 92.0)]}
    found = [
        studies.MethodFront(method, tuple(Final(i, {}, (p,)) for i, p in enumerate(every)), 3, 1.0, 0.1)
        for method, every in points.items()
    ]
    (axes,) = drawn(studies.draw_fronts, found).axes
    marks = [container[0] for container in axes.containers]
    shown = [(mark.get_xdata()[0], mark.get_ydata()[0]) for mark in marks]
    assert shown == [point for every in points.values() for point in every]
    assert [mark.get_markerfacecolor() == "white" for mark in marks] == [False, False, True, False], "dominated: hollow"
    assert len({mark.get_marker() for mark in marks}) == len(points)
    steps = [line for line in axes.get_lines() if line.get_drawstyle() == "steps-pre"]
    left, low = axes.get_xlim()[0], axes.get_ylim()[0]
    assert [list(line.get_xdata()) for line in steps] == [[left, 94.0, 95.0, 95.0], [left, 97.0, 97.0]]
    assert [list(line.get_ydata()) for line in steps] == [[91.0, 91.0, 90.0, low], [92.0, 92.0, low]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(points)

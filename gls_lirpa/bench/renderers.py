"""From outcomes and studied networks to the sections of a report; a suite names its renderer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gls_lirpa.analysis.dynamics import training_dynamics
from gls_lirpa.analysis.landscape import Landscape, loss_landscape
from gls_lirpa.analysis.pictures import draw_dynamics, draw_landscape, draw_scores, draw_tightness, draw_toys
from gls_lirpa.analysis.surface import Surface, draw_surface, sampled_surface
from gls_lirpa.analysis.tightness import Tightness, tightness_curves
from gls_lirpa.analysis.toys import jump_toy, valley_toy
from gls_lirpa.bench.context import Context, test_images
from gls_lirpa.bench.figures import draw_bars, draw_fronts
from gls_lirpa.bench.sections import Entry, Figure, Section, Table
from gls_lirpa.bench.speed import speed_sections
from gls_lirpa.bench.tables import cell_table, matrix_table, verdict_table
from gls_lirpa.relaxations import drawn_relaxations
from gls_lirpa.training.runs import Run

Renderer = Callable[[Context], list[Section]]

NO_NETWORK = "The network under study has no weights yet: see the runs without a result."


def table_sections(context: Context) -> list[Section]:
    """Every cell beside the paper's number."""
    return [Section("Results", tables=(cell_table(context.suite, context.outcomes),))]


def paradox_sections(context: Context) -> list[Section]:
    """Does the tightest relaxation win? Under which estimator?"""
    cells = [cell for cell in context.suite.cells if not cell.once]
    shared = all(cell.start is not None for cell in cells)
    rows, columns = _names(cell.row for cell in cells), _names(cell.column for cell in cells)
    outcomes = context.outcomes
    run = context.studied()
    tightness = None if run is None else _tightness(context, run, rows, samples=200)
    areas = None if tightness is None else tightness.areas
    bars, fronts = context.out / "certified.png", context.out / "fronts.png"
    draw_bars(outcomes, bars, rows=rows, columns=columns)
    draw_fronts(outcomes, fronts, rows=rows, columns=columns)
    verdict = verdict_table(outcomes, tight="crown", loose="ibp", estimators=columns)
    matrices = [
        matrix_table(outcomes, rows=rows, columns=columns, quantity=quantity, tightness=areas)
        for quantity in ("certified", "natural", "adversarial")
    ]
    said = " ".join(f"{row[0].text}: {row[4].text}." for row in verdict.rows)
    return [
        Section(
            "Verdict",
            (
                "The paradox: under plain gradients the loosest relaxation trains best. Smoothing is meant to turn "
                f"this around. Here: {said}",
            ),
            (verdict,),
        ),
        Section(
            "Relaxations against estimators",
            (
                "Every cell starts from the same PGD-trained network and sees the same data."
                if shared
                else "Cells under pgpe start from the same PGD-trained network, all others from the recipe's "
                "initialisation.",
            ),
            tuple(matrices),
            (
                Figure(bars, "Certified accuracy by estimator; whiskers: one standard deviation over seeds."),
                Figure(fronts, "Natural against certified accuracy, mean and standard deviation over seeds."),
            ),
        ),
        *([] if tightness is None else [_tightness_section(context, tightness)]),
        Section("All cells", tables=(cell_table(context.suite, outcomes),)),
    ]


def tightness_sections(context: Context) -> list[Section]:
    run = context.studied()
    if run is None:
        return [Section("Tightness", (NO_NETWORK,))]
    names = tuple(drawn_relaxations())
    return [_tightness_section(context, _tightness(context, run, names, samples=context.samples))]


def _tightness(context: Context, run: Run, relaxations: tuple[str, ...], *, samples: int | None) -> Tightness:
    points, reach = context.suite.settings.get("points", 9), context.suite.settings.get("reach", 2.0)
    radii = [min(1.0, reach * run.config.eps) * i / (points - 1) for i in range(points)]
    x, y = test_images(run, samples)

    def compute() -> dict[str, object]:
        found = context.watched(
            "tightness",
            lambda progress: tightness_curves(
                run.model, x, y, radii=radii, relaxations=relaxations, attack_steps=40, progress=progress
            ),
        )
        return dict(found.to_dict())

    settings = {"radii": radii, "relaxations": relaxations, "samples": len(x)}
    return Tightness.from_dict(context.stored("tightness", run, settings, compute))


def _tightness_section(context: Context, found: Tightness) -> Section:
    file = context.out / "tightness.png"
    draw_tightness(found, file)
    order = sorted(found.areas, key=lambda name: found.areas[name])
    areas = (Entry("AUC"), *(Entry(f"{found.areas[name]:.4f}") for name in order), Entry(""))
    rows = (
        areas,
        *(
            (
                Entry(f"{radius:.3g}"),
                *(Entry(f"{100 * found.certified[name][i]:.1f}") for name in order),
                Entry(f"{100 * found.adversarial[i]:.1f}" if found.adversarial else ""),
            )
            for i, radius in enumerate(found.radii)
        ),
    )
    header = ("radius", *order, "PGD")
    shown = f"{found.samples} test images; natural {100 * found.natural:.1f}"
    note = f"Certified accuracy in per cent at each radius on {shown}; PGD: what an attack leaves, an upper limit."
    return Section(
        "Tightness",
        (
            "Accuracy certified by each relaxation alone, over the radius, on the network under study. The area under "
            "the curve, divided by the range of radii, is the tightness score.",
        ),
        (Table("tightness", header, rows, note=note),),
        (Figure(file, "Certified accuracy over the radius."),),
    )


def landscape_sections(context: Context) -> list[Section]:
    run = context.studied()
    if run is None:
        return [Section("Loss landscape", (NO_NETWORK,)), _toys(context)]
    return [*_landscape(context, run, sigmas=context.suite.settings["sigmas"]), _dynamics(context), _toys(context)]


def _landscape(context: Context, run: Run, *, sigmas: tuple[float, ...]) -> list[Section]:
    settings = dict(context.suite.settings)
    batch, samples = settings.get("batch", 16), settings.get("samples", 128)
    if context.budget.samples is not None:
        samples = min(samples, context.budget.samples)
    x, y = test_images(run, batch)
    steps = (settings.get("points", 41) - 1) // 2

    def compute() -> dict[str, object]:
        found = context.watched(
            "landscape",
            lambda progress: loss_landscape(
                run.model,
                x,
                y,
                eps=run.config.eps,
                sigmas=sigmas,
                samples=samples,
                step=settings.get("step", 1 / 50),
                steps=steps,
                progress=progress,
            ),
        )
        return dict(found.to_dict())

    key = {**settings, "sigmas": sigmas, "samples": samples, "eps": run.config.eps}
    found = Landscape.from_dict(context.stored("landscape", run, key, compute))
    curves, scores = context.out / "landscape.png", context.out / "scores.png"
    draw_landscape(found, curves)
    draw_scores(found, scores)
    rows = tuple(
        (
            Entry(c.relaxation),
            Entry(f"{c.sigma:g}"),
            *(Entry(f"{v:.3g}") for v in (c.scores.max_slope, c.scores.curvature, c.scores.nonconvexity)),
        )
        for c in found.curves
    )
    header = ("relaxation", "σ", "largest difference", "mean curvature", "deviation from convexity")
    return [
        Section(
            "Loss landscape",
            (
                f"The loss of each relaxation along the CROWN gradient (t = 1: one gradient step with learning rate "
                f"{found.lr:g}), divided by its value at t = 0, on {found.batch} images with {found.samples} "
                "perturbations for each σ > 0; bands are 95 % intervals.",
            ),
            figures=(Figure(curves, "Original and smoothed loss along the CROWN gradient."),),
        ),
        Section(
            "Smoothness scores",
            tables=(Table("scores", header, rows, labels=1, note="Lower is smoother."),),
            figures=(Figure(scores, "The three scores against σ."),),
        ),
    ]


def _dynamics(context: Context) -> Section:
    folders = [run.folder(context.out) for run in context.runs if run.cell.start is not None]
    ready = [folder for folder in folders if (folder / "metrics.jsonl").exists()]
    if not ready:
        return Section("Training dynamics", ("No run to compare.",))
    file = context.out / "dynamics.png"
    draw_dynamics(training_dynamics(ready), file)
    return Section("Training dynamics", figures=(Figure(file, "Plain gradients against smoothing, epoch by epoch."),))


def _toys(context: Context) -> Section:
    file = context.out / "toys.png"
    draw_toys([jump_toy(), valley_toy()], file)
    text = "Smoothing makes a discontinuous bound continuous, and moves its minima towards the global one."
    caption = "Two functions of one weight, and their smoothing."
    return Section("Toy pictures", (text,), figures=(Figure(file, caption),))


def ablation_sections(context: Context) -> list[Section]:
    """Short trainings over one option, beside the loss surface."""
    run = context.studied()
    sections = table_sections(context)
    if run is None:
        return sections
    settings = context.suite.settings
    if settings["option"] == "population":
        return [*sections, _surface(context, run, settings["values"], settings["sigma"])]
    return [*sections, *_landscape(context, run, sigmas=(0.0, *settings["values"]))]


def _surface(context: Context, run: Run, populations: tuple[int, ...], sigma: float) -> Section:
    """What is left of the sampling's noise on the smoothed loss, for each population."""
    settings = {
        "eps": run.config.eps,
        "sigma": sigma,
        "populations": tuple(int(size) for size in populations),
        "points": context.suite.settings.get("points", 41),
    }
    x, y = test_images(run, context.suite.settings.get("batch", 4))

    def compute() -> dict[str, object]:
        found = context.watched(
            "surface", lambda progress: sampled_surface(run.model, x, y, **settings, progress=progress)
        )
        return dict(found.to_dict())

    found = Surface.from_dict(context.stored("surface", run, {**settings, "batch": len(x)}, compute))
    file = context.out / "surface.png"
    draw_surface(found, file)
    rows = tuple((Entry(str(size)), Entry(f"{value:.3g}")) for size, value in sorted(found.roughness.items()))
    note = f"Mean distance from the curve of the largest population, along the CROWN gradient; {len(x)} images."
    return Section(
        "Noise of the estimated surface",
        (f"The loss smoothed with σ = {sigma:g}, estimated anew at every point with each population.",),
        (Table("surface", ("population", "distance"), rows, note=note),),
        (Figure(file, "The smoothed CROWN loss as PGPE sees it; curves are set apart."),),
    )


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


RENDERERS: dict[str, Renderer] = {
    "table": table_sections,
    "paradox": paradox_sections,
    "tightness": tightness_sections,
    "landscape": landscape_sections,
    "ablation": ablation_sections,
    "speed": speed_sections,
}

"""Outcomes as tables: cell by cell beside the paper's numbers, and relaxations against estimators."""

from __future__ import annotations

from collections.abc import Sequence

from gls_lirpa.bench.bootstrap import Unit
from gls_lirpa.bench.letters import certified, unpacked
from gls_lirpa.bench.outcomes import Outcome
from gls_lirpa.bench.sections import Entry, Table, marks
from gls_lirpa.bench.statistics import Bits, Cells, Estimate, estimate, paradox_verdicts
from gls_lirpa.bench.suite import Cell, Suite
from gls_lirpa.training.presets import PAPER_LR

NONE = "–"
VERDICT_WORDS = (
    "grad: paradox if its gap lies below 0, no paradox if above. Others: effect if shift and gap lie above 0, shift "
    "without lead if the shift alone does, negative shift if it lies below 0. Undecided: the interval contains 0, or "
    "there is one seed. Exploratory: fewer than five seeds."
)


def of_cell(cell: Cell, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of one cell, over its seeds."""
    key = (cell.group, cell.row, cell.column)
    return [o for o in outcomes if (o.group, o.row, o.column) == key]


def _number(value: Estimate | None) -> str:
    return NONE if value is None else str(value)


def _difference(ours: Estimate | None, paper: float | None) -> str:
    return NONE if ours is None or paper is None else f"{ours.mean - paper:+.2f}"


def cell_table(suite: Suite, outcomes: Sequence[Outcome]) -> Table:
    """One row per cell; best and second certified accuracy are marked within each setting.

    Where there is one setting alone it stands in the note, so that the table fits a page.
    """
    paper = any(cell.paper for cell in suite.cells)
    header = ["setting", "method", "estimator", "natural", "adversarial", "certified", "unknown", "seeds", "minutes"]
    if paper:
        header[8:8] = ["paper nat.", "paper cert.", "Δ nat.", "Δ cert."]
    rows = []
    accuracy = {cell.key: estimate(o.certified for o in of_cell(cell, outcomes)) for cell in suite.cells}
    for cell in suite.cells:
        own = of_cell(cell, outcomes)
        rivals = [other.key for other in suite.cells if other.group == cell.group and other.row != "pgd"]
        means = [None if (value := accuracy[key]) is None else value.mean for key in rivals]
        mark = dict(zip(rivals, marks(means), strict=True)).get(cell.key, "")
        rows.append(tuple(_cell_row(cell, own, accuracy[cell.key], mark, paper)))
    note = "Mean ± standard deviation over seeds, in per cent of the certified test images; bold: best, italic: second."
    if suite.preset is not None:
        note += " " + _recipe_note(suite)
    settings = sorted({cell.group for cell in suite.cells})
    if len(settings) > 1:
        return Table("cells", tuple(header), tuple(rows), labels=3, note=note)
    note = f"{settings[0]}. {note}" if settings and settings[0] else note
    return Table("cells", tuple(header[1:]), tuple(row[1:] for row in rows), labels=2, note=note)


def _recipe_note(suite: Suite) -> str:
    """Which recipe the cells were trained by, and what in it is not the paper's.

    >>> cell = Cell("", "ibp", "grad", {"preset": "literature"})
    >>> _recipe_note(Suite("s", "", (cell,), preset="literature"))
    'Recipe: literature.'
    """
    note = f"Recipe: {suite.preset}"
    if suite.preset == "paper":
        note += f", but with learning rate {PAPER_LR:g}: the printed 5e-5 cannot reach its numbers"
    others = [cell for cell in suite.cells if cell.options["preset"] != suite.preset]
    for name in sorted({cell.options["preset"] for cell in others}):
        methods = sorted({f"{cell.options['net']} {cell.row}" for cell in others if cell.options["preset"] == name})
        note += f"; {name} for {', '.join(methods)}, whose numbers the paper took from there"
    return f"{note}."


def _cell_row(
    cell: Cell, outcomes: Sequence[Outcome], accuracy: Estimate | None, mark: str, paper: bool
) -> list[Entry]:
    labels = [Entry(cell.group), Entry(cell.row), Entry(cell.column)]
    done = [o for o in outcomes if o.done]
    failed = [o for o in outcomes if o.status == "failed"]
    natural = estimate(o.natural for o in done)
    if not done:
        state = Entry("failed", "failed") if failed else Entry("not run")
        numbers = [Entry(NONE), Entry(NONE), state, Entry(NONE), Entry("0")]
    else:
        unknown, samples = sum(o.unknown or 0 for o in done), sum(o.samples or 0 for o in done)
        numbers = [
            Entry(_number(natural)),
            Entry(_number(estimate(o.adversarial for o in done))),
            Entry(_number(accuracy), mark),
            Entry(f"{unknown} of {samples}"),
            Entry(f"{len(done)}" + (f", {len(failed)} failed" if failed else ""), "failed" if failed else ""),
        ]
    row = cell.paper
    beside = [
        Entry(NONE if row is None else f"{row.natural:.2f}"),
        Entry(NONE if row is None else f"{row.certified:.2f}"),
        Entry(_difference(natural, row.natural if row else None)),
        Entry(_difference(accuracy, row.certified if row else None)),
    ]
    seconds = sum((o.train_seconds or 0) + (o.certify_seconds or 0) for o in done)
    return [*labels, *numbers, *(beside if paper else []), Entry(f"{seconds / 60:.1f}" if done else NONE)]


def cells_of(outcomes: Sequence[Outcome]) -> Cells:
    """Which images are certified, by relaxation, estimator and seed; outcomes without verdicts are left out."""
    cells: dict[tuple[str, str], dict[Unit, Bits]] = {}
    for o in outcomes:
        if o.done and o.verdicts:
            cells.setdefault((o.row, o.column), {})[Unit("", o.seed)] = certified(unpacked(o.verdicts))
    return cells


def matrix_table(
    outcomes: Sequence[Outcome],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    quantity: str,
    tightness: dict[str, float] | None = None,
) -> Table:
    """One quantity, relaxations down and estimators across; marks are within an estimator's column."""
    found = {
        (row, column): estimate(getattr(o, quantity) for o in outcomes if (o.row, o.column) == (row, column))
        for row in rows
        for column in columns
    }
    mark = {
        column: dict(zip(rows, marks([None if (v := found[r, column]) is None else v.mean for r in rows]), strict=True))
        for column in columns
    }
    body = []
    for row in rows:
        tight = [Entry(f"{tightness[row]:.3f}" if tightness and row in tightness else NONE)] if tightness else []
        cells = [Entry(_number(found[row, column]), mark[column][row]) for column in columns]
        body.append((Entry(row), *tight, *cells))
    header = [f"{quantity} [%]", *(["tightness (AUC)"] if tightness else []), *columns]
    return Table(quantity, tuple(header), tuple(body))


def verdict_table(outcomes: Sequence[Outcome], *, tight: str, loose: str, estimators: Sequence[str]) -> Table:
    """The gap between the tight and the loose relaxation, and how smoothing moves it."""
    rows = []
    for verdict in paradox_verdicts(cells_of(outcomes), tight=tight, loose=loose, estimators=estimators):
        best = _best(outcomes, verdict.estimator)
        gap, shift = (NONE if value is None else str(value) for value in (verdict.gap, verdict.shift))
        rows.append(tuple(Entry(text) for text in (verdict.estimator, best, gap, shift, verdict.verdict)))
    header = ("estimator", "best relaxation", f"{tight} − {loose}", "shift against grad", "verdict")
    note = (
        f"Certified accuracy, {tight} minus {loose}, seed by seed and image by image, with 95 % intervals from "
        f"resampled seeds and images. The shift is this gap minus grad's. {VERDICT_WORDS}"
    )
    return Table("verdict", header, tuple(rows), labels=2, note=note)


def _best(outcomes: Sequence[Outcome], estimator: str) -> str:
    rows = {o.row for o in outcomes if o.column == estimator}
    means = {row: estimate(o.certified for o in outcomes if (o.row, o.column) == (row, estimator)) for row in rows}
    found = {row: value.mean for row, value in means.items() if value is not None}
    return max(found, key=lambda row: found[row]) if found else NONE

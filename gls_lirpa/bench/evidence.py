"""Tables and intervals recomputed from result files, and the blocks of a Markdown page that hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gls_lirpa.bench.bootstrap import Interval, Unit
from gls_lirpa.bench.letters import certified, natural
from gls_lirpa.bench.paper import PaperRow, all_paper_rows
from gls_lirpa.bench.results import Result, read_results
from gls_lirpa.bench.sections import Entry, Table, marks
from gls_lirpa.bench.statistics import ENOUGH_SEEDS, Bits, Cell, Cells, contrast, estimate, paradox_verdicts
from gls_lirpa.bench.tables import NONE, VERDICT_WORDS
from gls_lirpa.errors import ConfigError
from gls_lirpa.training.job import make_config

BEGIN, END = "<!-- evidence: {} -->", "<!-- end of evidence -->"
_INCOMPARABLE = ("popsize",)
"""The paper names no ε there, and starts from a network that beats its main table."""
_BLOCK = re.compile(BEGIN.format(r"(\S+)") + r"\n.*?" + END, re.DOTALL)


def cells_of(results: Sequence[Result], bits: Callable[[str], Bits]) -> Cells:
    """The images that ``bits`` finds, by method and estimator, and by seed."""
    cells: dict[Cell, dict[Unit, Bits]] = {}
    for result in results:
        cell = cells.setdefault((result.method, result.estimator), {})
        if result.unit in cell:
            raise ConfigError(
                f"experiment {result.experiment!r} has two results for {result.method} {result.estimator} "
                f"seed {result.seed}: give one of them another method or estimator name"
            )
        cell[result.unit] = bits(result.letters)
    return cells


def accuracy_table(results: Sequence[Result]) -> Table:
    """One row per cell; the paper's numbers stand beside runs of the paper's recipe alone."""
    by_cell: dict[Cell, list[Result]] = {}
    for result in results:
        by_cell.setdefault((result.method, result.estimator), []).append(result)
    papers = {cell: _paper_row(own) for cell, own in by_cell.items()}
    means = [sum(r.certified for r in own) / len(own) for own in by_cell.values()]
    rows = []
    for (cell, own), mark in zip(by_cell.items(), marks(means), strict=True):
        numbers = {name: estimate(getattr(r, name) for r in own) for name in ("natural", "adversarial", "certified")}
        paper = papers[cell]
        row = [Entry(cell[0]), Entry(cell[1] + (" †" if any(r.exploratory for r in own) else ""))]
        row += [Entry(str(value), mark if name == "certified" else "") for name, value in numbers.items()]
        row += [Entry(f"{sum(r.unknown for r in own)} of {sum(r.samples for r in own)}"), Entry(str(len(own)))]
        if any(papers.values()):
            row += [Entry(NONE if paper is None else f"{paper.natural:.2f} / {paper.certified:.2f}")]
        row.append(Entry(f"{sum(r.train_seconds for r in own) / 60 / len(own):.1f}"))
        rows.append(tuple(row))
    header = ["method", "estimator", "natural", "adversarial", "certified", "unknown", "seeds"]
    header += [*(["paper nat. / cert."] if any(papers.values()) else []), "minutes"]
    splits = {str(r.certification.get("split")) for r in results}
    images = " and ".join(sorted("held-out training" if split == "val" else split for split in splits))
    note = f"Per cent of the certified {images} images, mean ± standard deviation over seeds; minutes of a training."
    note += " † exploratory." if any(r.exploratory for r in results) else ""
    return Table("accuracies", tuple(header), tuple(rows), labels=2, note=note)


def _paper_row(results: Sequence[Result]) -> PaperRow | None:
    """The paper's row of a cell whose runs all follow that row's recipe in full."""
    config = results[0].config
    if not all(r.certification.get("split") == "test" and _follows_a_recipe(dict(r.config)) for r in results):
        return None
    rows = (row for row in all_paper_rows() if row.table not in _INCOMPARABLE and row.recipe == _recipe(config))
    return next((row for row in rows if _same(row, config) and bool(results[0].start) == _started(row)), None)


_FREE = ("seed", "init_from", "eval_samples")
_OF_THE_ROW = ("rho", "population")


def _follows_a_recipe(config: dict[str, Any]) -> bool:
    """Whether a run is what its preset makes of its method, but for what the table's rows vary."""
    if _recipe(config) not in {row.recipe for row in all_paper_rows()}:
        return False
    chosen = {key: config[key] for key in ("preset", "estimator", "net", "loss", "relaxation")}
    recipe = json.loads(json.dumps(make_config(chosen).to_dict()))
    for given in (config, recipe):
        options = given["estimator_options"]
        given["estimator_options"] = {key: value for key, value in options.items() if key not in _OF_THE_ROW}
    return all(recipe.get(key, value) == value for key, value in config.items() if key not in _FREE)


def _recipe(config: dict[str, Any]) -> str:
    return str(config.get("preset") or "").partition("-")[0]


def _same(row: PaperRow, config: dict[str, Any]) -> bool:
    options = row.options
    given = {**config, **config["estimator_options"]}
    return abs(given["eps"] - options["eps"]) < 1e-9 and all(
        given.get(key) == value for key, value in options.items() if key != "eps"
    )


def _started(row: PaperRow) -> bool:
    return row.from_ibp or row.estimator.startswith("pgpe")


def difference_table(results: Sequence[Result]) -> Table | None:
    """Paired differences: each estimator against grad under one method, each method against ibp under one estimator."""
    found, proven = cells_of(results, natural), cells_of(results, certified)
    rows = []
    for cell in proven:
        for other in ((cell[0], "grad"), ("ibp", cell[1])):
            if cell == other or other not in proven:
                continue
            terms = [(cell, 1), (other, -1)]
            gain, interval = contrast(found, terms), contrast(proven, terms)
            if gain is None or interval is None:
                continue
            text = (" ".join(cell), " ".join(other), str(gain), str(interval), _word(interval), str(interval.seeds))
            rows.append(tuple(Entry(part) for part in text))
    header = ("cell", "minus", "natural", "certified", "certified is", "seeds")
    note = (
        "Points of per cent, paired by seed and image, with 95 % intervals from resampled seeds and images. "
        f"Undecided: the interval contains 0 or there is one seed; exploratory: fewer than {ENOUGH_SEEDS} seeds."
    )
    return Table("differences", header, tuple(rows), labels=2, note=note) if rows else None


def _word(interval: Interval) -> str:
    word = {1: "higher", -1: "lower", 0: "undecided"}[interval.sign]
    return f"{word} (exploratory)" if interval.sign and interval.seeds < ENOUGH_SEEDS else word


def verdict_table(results: Sequence[Result], *, tight: str = "crown", loose: str = "ibp") -> Table | None:
    """Whether smoothing turns the order of the tight and the loose relaxation around."""
    cells = cells_of(results, certified)
    estimators = [e for e in dict.fromkeys(r.estimator for r in results) if (tight, e) in cells and (loose, e) in cells]
    if "grad" not in estimators or len(estimators) < 2:
        return None
    rows = tuple(
        tuple(Entry(NONE if part is None else str(part)) for part in (v.estimator, v.gap, v.shift, v.verdict))
        for v in paradox_verdicts(cells, tight=tight, loose=loose, estimators=estimators)
    )
    header = ("estimator", f"{tight} − {loose}", "shift against grad", "verdict")
    return Table("verdict", header, rows, labels=1, note=VERDICT_WORDS)


def block(results: Sequence[Result]) -> str:
    """All tables of one experiment, as Markdown."""
    ordered = sorted(results, key=lambda r: (r.estimator != "grad", r.estimator, r.method != "ibp", r.method, r.seed))
    tables = [accuracy_table(ordered), difference_table(ordered), verdict_table(ordered)]
    commits = sorted({r.commit or "unknown" for r in results})
    setting = sorted({f"{r.config['dataset']}, {r.config['net']}, ε = {r.config['eps']:.4g}" for r in results})
    recipes = sorted({str(r.config.get("preset") or "none") for r in results})
    head = f"{'; '.join(setting)}; preset {', '.join(recipes)}; commit {', '.join(commits)}."
    return "\n\n".join([head, *(table.markdown() for table in tables if table is not None)])


def updated(page: str, results: Sequence[Result]) -> str:
    """The page with every experiment's block recomputed; experiments without one get it at the end.

    >>> updated("text <!-- nothing to do -->", [])
    'text <!-- nothing to do -->'
    """
    blocks: dict[str, list[Result]] = {}
    for result in results:
        blocks.setdefault(result.experiment, []).append(result)
    present = _BLOCK.findall(page)
    for name in present:
        if name not in blocks:
            raise ConfigError(f"the page has a block for experiment {name!r}, of which there are no results")
    page = _BLOCK.sub(lambda match: _framed(match[1], blocks[match[1]]), page)
    for name in sorted(set(blocks) - set(present)):
        page = f"{page.rstrip()}\n\n## {name}\n\n{_framed(name, blocks[name])}\n"
    return page


def _framed(name: str, results: Sequence[Result]) -> str:
    return f"{BEGIN.format(name)}\n{block(results)}\n{END}"


def update_page(page: Path, folder: Path, *, check: bool = False) -> bool:
    """Recompute the blocks of ``page`` from the results in ``folder``; returns whether it was up to date.

    With ``check`` nothing is written.
    """
    before = page.read_text()
    after = updated(before, read_results(folder))
    if not check and after != before:
        page.write_text(after)
    return after == before

"""Intervals against closed forms and by their coverage; result files; the page that is recomputed from them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student

from gls_lirpa.bench.bootstrap import Unit, paired_interval
from gls_lirpa.bench.evidence import BEGIN, END, accuracy_table, difference_table, update_page, updated, verdict_table
from gls_lirpa.bench.letters import packed, unpacked
from gls_lirpa.bench.results import Result, collect, read_result, read_results
from gls_lirpa.errors import CheckpointError, ConfigError
from gls_lirpa.training.job import make_config
from tests.helpers.command import Glscert

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- intervals


def test_seeds_alone_give_students_interval() -> None:
    """Where every image of a network counts alike, only seeds vary: a spread of whole networks."""
    means = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0] * 2
    found = paired_interval({Unit("", seed): [value] * 50 for seed, value in enumerate(means)}, resamples=40_000)
    assert found is not None and found.low is not None and found.high is not None
    half = 100 * float(student.ppf(0.975, 19)) * float(np.std(means, ddof=1)) / math.sqrt(20)
    assert found.mean == pytest.approx(60.0)
    # Percentiles of a mean of twenty coins lie on a lattice of 5 points.
    assert found.high - found.mean == pytest.approx(half, abs=3.0)
    assert found.mean - found.low == pytest.approx(half, abs=3.0)


def test_images_count_too() -> None:
    """Networks that are all alike differ in nothing but the images drawn: z·√(p(1−p)/m)."""
    images = np.arange(400) < 100
    found = paired_interval({Unit("", seed): images for seed in range(2)}, resamples=40_000)
    assert found is not None and found.high is not None
    half = 1.96 * 100 * math.sqrt(0.25 * 0.75 / 400)
    assert found.high - found.mean == pytest.approx(half, rel=0.05)


def test_pairing_removes_what_networks_share() -> None:
    rng = np.random.default_rng(0)
    easy = rng.random(2000) < 0.5
    first = {Unit("", seed): easy | (rng.random(2000) < 0.02) for seed in range(5)}
    second = {Unit("", seed): easy & (rng.random(2000) > 0.02) for seed in range(5)}
    gap = paired_interval({unit: first[unit].astype(int) - second[unit] for unit in first})
    alone = paired_interval(first)
    assert gap is not None and alone is not None and gap.high is not None and alone.high is not None
    assert gap.sign == 1
    assert gap.high - gap.mean < 0.4 * (alone.high - alone.mean)


def test_starts_are_the_unit_where_there_are_several() -> None:
    """Seeds of one start agree: many of them are no evidence about other starts."""
    rows = {Unit(f"start{s}", seed): [s] * 20 for s in (0, 1) for seed in range(10)}
    clustered = paired_interval(rows)
    flat = paired_interval({Unit("", i): row for i, row in enumerate(rows.values())})
    assert clustered is not None and flat is not None
    assert (clustered.starts, clustered.seeds, clustered.sign, flat.sign) == (2, 20, 0, 1)


def test_coverage_with_five_seeds() -> None:
    """Random effects of seeds and of images: the truth lies in 95 of 100 intervals, give or take."""
    rng = np.random.default_rng(1)
    hits, trials = 0, 200
    for trial in range(trials):
        seeds = rng.normal(0.1, 0.05, size=5)
        difficulty = rng.random(300)
        rows = {Unit("", i): difficulty < 0.5 + effect for i, effect in enumerate(seeds)}
        found = paired_interval(rows, resamples=1000, seed=trial)
        assert found is not None and found.low is not None and found.high is not None
        hits += found.low <= 60.0 <= found.high
    assert 0.91 <= hits / trials <= 1.0


def test_one_seed_has_no_interval() -> None:
    found = paired_interval({Unit("", 0): [1, 0]})
    assert found is not None
    assert (found.mean, found.low, found.sign, str(found)) == (50.0, None, 0, "+50.00")
    assert paired_interval({}) is None


# ---------------------------------------------------------------- result files


def a_result(method: str, estimator: str, seed: int, certified: int, **changes: object) -> Result:
    letters = "v" * certified + "f" * (90 - certified) + "m" * 9 + "u"
    config = make_config({"relaxation": method, "estimator": estimator, "seed": seed, "preset": "paper-mnist-0.1"})
    result = Result(
        name=f"{method}-{estimator}-{seed}",
        experiment="mnist-cnn3",
        method=method,
        estimator=estimator,
        seed=seed,
        start="",
        exploratory=False,
        commit="0123456789ab",
        versions={"torch": "2.13.0"},
        config=json.loads(json.dumps(config.to_dict())),
        certification={"eps": 0.1, "split": "test", "timeout": 20.0},
        epochs=70,
        train_seconds=60.0,
        certify_seconds=6.0,
        samples=100,
        natural=91.0,
        adversarial=certified + 1.0,
        certified=float(certified),
        unknown=1,
        verdicts=packed(letters),
    )
    return dataclasses.replace(result, **changes)  # type: ignore[arg-type]


def experiment() -> list[Result]:
    means = {("ibp", "grad"): 70, ("crown", "grad"): 60, ("ibp", "rgs"): 70, ("crown", "rgs"): 80}
    return [a_result(*cell, seed, mean + seed % 2) for cell, mean in means.items() for seed in range(5)]


def test_result_files_round_trip_and_are_checked(tmp_path: Path) -> None:
    result = a_result("crown", "grad", 3, 60)
    file = result.write(tmp_path)
    assert read_result(file) == result
    assert file.stat().st_size < 3000
    content = json.loads(file.read_text())
    for broken, message in (
        ({**content, "certified": 61.0}, "not those of its verdicts"),
        ({**content, "verdicts": packed("vz")}, "no verdict 'z'"),
        ({**content, "verdicts": "?"}, "damaged"),
        ({"name": "other"}, "not a result file"),
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(CheckpointError, match=message):
            read_result(file)


def test_letters_are_lossless() -> None:
    letters = "".join(np.random.default_rng(0).choice(list("vfmux"), 10_000))
    assert unpacked(packed(letters)) == letters


def test_collecting_a_run(glscert: Glscert, tmp_path: Path) -> None:
    run, out = tmp_path / "secret" / "my-run", tmp_path / "results"
    options = ["--limit", "60", "--epochs", "1", "--net", "cnn3-tiny", "--estimator", "grad", "--relaxation", "ibp"]
    assert glscert("train", *options, "--out", str(run)).code == 0
    missing = glscert("collect", str(run), "--experiment", "digits", "--out", str(out))
    assert missing.code != 0 and "run `glscert certify" in missing.err.replace("\n", " ")
    assert glscert("certify", str(run), "--samples", "5", "--stages", "ibp,pgd").code == 0
    done = glscert("collect", str(run), "--experiment", "digits", "--out", str(out))
    assert done.code == 0, done.err
    (file,) = out.iterdir()
    result = read_result(file)
    assert (result.name, result.method, result.estimator, result.samples) == ("my-run", "ibp", "grad", 5)
    summary = json.loads(next(run.glob("certify-*/summary.json")).read_text())
    for name in ("natural", "adversarial", "certified"):
        assert getattr(result, name) == pytest.approx(100 * summary[name])
    assert "secret" not in file.read_text() and str(tmp_path) not in file.read_text()
    with pytest.raises(CheckpointError, match=r"on the val split: run `glscert certify .* --split val` first"):
        collect(run, experiment="digits", split="val")
    assert glscert("certify", str(run), "--samples", "3", "--stages", "ibp", "--split", "val").code == 0
    held_out = collect(run, experiment="digits", split="val")
    assert (held_out.samples, held_out.certification["split"]) == (3, "val")
    assert collect(run, experiment="digits").verdicts == result.verdicts
    records = next(f for f in run.glob("certify-*/records.jsonl") if "-val" not in f.parent.name)
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(CheckpointError, match="4 of 5 images"):
        collect(run, experiment="digits")


def test_collecting_loses_no_file(glscert: Glscert, tmp_path: Path) -> None:
    options = ["--limit", "60", "--epochs", "1", "--net", "cnn3-tiny", "--estimator", "grad", "--relaxation", "ibp"]
    runs = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for seed, run in enumerate(runs):
        assert glscert("train", *options, "--seed", seed, "--out", run).code == 0
        assert glscert("certify", run, "--samples", "5", "--stages", "ibp,pgd").code == 0
    out = tmp_path / "results"

    def collected(*arguments: object) -> str:
        answer = glscert("collect", *arguments, "--out", out)
        assert answer.err.count("\n") == 1 and answer.code == (2 if answer.err.startswith("glscert: ") else 0)
        return answer.err

    digits = ("--experiment", "digits")
    assert "two runs are called 'run'" in collected(*runs, *digits)
    assert not out.exists()
    collected(runs[0], *digits)
    (file,) = out.iterdir()
    first = file.read_bytes()
    assert "seed 0" in collected(runs[0], *digits)  # the same again is no loss
    for arguments, held in (
        ((runs[1], *digits), "holds digits, ibp grad seed 0"),
        ((runs[0], "--experiment", "other"), "holds the same run collected differently"),
        ((runs[0], *digits, "--exploratory"), "holds the same run collected differently"),
    ):
        answer = collected(*arguments)
        assert held in answer and "--force" in answer and file.read_bytes() == first
    assert "without a folder" in collected(runs[1], *digits, "--name", "../x")
    collected(runs[1], *digits, "--name", "other")
    assert file.read_bytes() == first and read_result(out / "other.json").seed == 1
    collected(runs[1], *digits, "--force")
    assert read_result(file).seed == 1
    file.write_text("notes")
    assert "holds something else" in collected(runs[1], *digits) and file.read_text() == "notes"
    (out / "taken").write_text("")
    answer = glscert("collect", runs[0], *digits, "--out", out / "taken")
    assert answer.code == 2 and "cannot be written" in answer.err and answer.err.count("\n") == 1


# ---------------------------------------------------------------- tables


def test_tables_of_an_experiment() -> None:
    results = experiment()
    accuracies = accuracy_table(results)
    row = {(r[0].text, r[1].text): [e.text for e in r] for r in accuracies.rows}["ibp", "grad"]
    assert row[accuracies.header.index("certified")] == "70.40 ± 0.55"
    assert row[accuracies.header.index("paper nat. / cert.")] == "96.02 / 91.23"
    differences = difference_table(results)
    assert differences is not None
    found = {(r[0].text, r[1].text): r[4].text for r in differences.rows}
    assert found["crown rgs", "crown grad"] == "higher"
    assert found["ibp rgs", "ibp grad"] == "undecided"
    assert found["crown grad", "ibp grad"] == "lower"
    verdicts = verdict_table(results)
    assert verdicts is not None
    assert [r[3].text for r in verdicts.rows] == ["paradox", "effect"]


def test_paper_numbers_stand_beside_its_recipe_alone() -> None:
    tuned = [dataclasses.replace(r, config={**r.config, "preset": "mnist-0.1"}) for r in experiment()]
    assert "paper nat. / cert." not in accuracy_table(tuned).header
    for change in ({"epochs": 7}, {"lr": 5e-5}, {"limit": 1000}, {"l1": 1e-6}):
        short = [dataclasses.replace(r, config={**r.config, **change}) for r in experiment()]
        assert "paper nat. / cert." not in accuracy_table(short).header
    held_out = [dataclasses.replace(r, certification={**r.certification, "split": "val"}) for r in experiment()]
    assert "held-out training images" in accuracy_table(held_out).note
    assert "paper nat. / cert." not in accuracy_table(held_out).header
    marked = [dataclasses.replace(r, exploratory=True) for r in experiment()]
    assert "†" in accuracy_table(marked).rows[0][1].text


def test_what_the_paper_took_from_elsewhere_stands_beside_that_recipe() -> None:
    def header(preset: str, method: str) -> tuple[str, ...]:
        given = {"dataset": "mnist", "net": "cnn7-bn", "relaxation": method, "estimator": "grad", "preset": preset}
        config = json.loads(json.dumps(make_config(given).to_dict()))
        return accuracy_table([a_result(method, "grad", 0, 70, config=config)]).header

    for preset, method, beside in (
        ("literature-mnist-0.1", "ibp", True),
        ("paper-mnist-0.1", "ibp", False),
        ("literature-mnist-0.1", "crown-ibp", False),
        ("paper-mnist-0.1", "crown-ibp", True),
    ):
        assert ("paper nat. / cert." in header(preset, method)) == beside


def test_two_results_in_one_place_are_refused() -> None:
    twice = [a_result("ibp", "grad", 0, 70), a_result("ibp", "grad", 0, 71, name="other")]
    with pytest.raises(ConfigError, match="two results for ibp grad seed 0"):
        difference_table(twice)


def test_a_page_is_recomputed_and_checked(tmp_path: Path) -> None:
    page, folder = tmp_path / "RESULTS.md", tmp_path / "results"
    page.write_text(f"# Results\n\n{BEGIN.format('mnist-cnn3')}\nold\n{END}\n\nkept\n")
    for result in experiment():
        result.write(folder)
    a_result("ibp", "grad", 0, 50, name="x", experiment="another").write(folder)
    assert not update_page(page, folder, check=True)
    assert "old" in page.read_text(), "checking writes nothing"
    update_page(page, folder)
    text = page.read_text()
    assert "old" not in text and "\nkept\n" in text and "## another" in text and "+20.00" in text
    assert update_page(page, folder, check=True)
    page.write_text(text.replace("70.40 ± 0.55", "75.40 ± 0.55"))
    assert not update_page(page, folder, check=True)
    with pytest.raises(ConfigError, match="no results"):
        updated(f"{BEGIN.format('gone')}\n{END}", [])


def test_the_committed_page_is_what_the_committed_results_say() -> None:
    folder = ROOT / "benchmarks" / "results"
    assert update_page(ROOT / "benchmarks" / "RESULTS.md", folder, check=True), "run python benchmarks/tables.py"
    assert len({result.name for result in read_results(folder)}) == len(list(folder.glob("*.json")))

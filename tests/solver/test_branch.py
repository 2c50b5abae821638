from __future__ import annotations

import dataclasses
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from gls_lirpa.base.boxes import margin_spec
from gls_lirpa.certification.stage import Findings
from gls_lirpa.errors import ConfigError
from gls_lirpa.solver import SolverSettings, tree
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.builder import FormBuilder
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.envelopes import Envelopes, Slopes
from gls_lirpa.solver.exact import minimise
from gls_lirpa.solver.group_ascent import slopes_for
from gls_lirpa.solver.groups import Groups
from gls_lirpa.solver.queue import Queue
from gls_lirpa.solver.search import AIM
from tests.helpers.branch_problems import PLAIN, RENEWING, Property, bab, minimum, near_boundary, oracle, search_of
from tests.helpers.exact_nets import KINDS, margins, problem, random_input, random_net
from tests.helpers.oracle import exact_margins


def _check(prop: Property, found: Findings) -> str:
    """The verdict, after every claim of the stage is compared with the exact minima."""
    lower, counterexample = found.lower[0].double(), found.counterexamples[0]
    assert (lower <= prop.minima + 1e-5).all(), (lower, prop.minima)
    if counterexample is not None:
        box = prop.samples.box
        assert (counterexample >= box.lower[0]).all() and (counterexample <= box.upper[0]).all()
        replayed = float(margins(prop.subject.model, counterexample.unsqueeze(0), prop.samples.labels).min())
        assert replayed < 1e-6 and replayed >= float(prop.minima.min()) - 1e-5
        return "counterexample"
    return "verified" if float(lower.min()) > 0.5 * AIM else "unknown"


def _expected(prop: Property) -> str:
    scale = max(1.0, float(prop.subject.model(prop.samples.x).abs().max()))
    if abs(float(prop.minima.min())) < AIM * scale:
        return "either"
    return "verified" if float(prop.minima.min()) > 0 else "counterexample"


@pytest.mark.parametrize("kind", KINDS)
def test_branch_and_bound_equals_milp_equals_enumeration(kind: str) -> None:
    verdicts = []
    for seed in range(4):
        stages = bab(), bab(PLAIN), bab(RENEWING), oracle()
        for prop in near_boundary(kind, seed, 6):
            exhaustive = exact_margins(prop.subject.model, prop.samples.box, prop.samples.labels)
            assert torch.allclose(prop.minima, torch.from_numpy(exhaustive), atol=1e-5)
            expected = _expected(prop)
            for stage in stages:
                found = stage(prop.subject, prop.samples, timeout=60.0)
                assert found.exhausted == [False]
                assert expected in ("either", _check(prop, found))
            verdicts.append(expected)
    assert verdicts.count("verified") >= 2 and verdicts.count("counterexample") >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_branch_and_bound_equals_milp_on_wider_networks(kind: str) -> None:
    nodes = properties = 0
    for seed in range(100, 104):
        stages = bab(), bab(replace(PLAIN, batch_size=16)), bab(RENEWING)
        for prop in near_boundary(kind, seed, 20):
            expected = _expected(prop)
            for stage in stages:
                found = stage(prop.subject, prop.samples, timeout=60.0)
                assert found.exhausted == [False] and expected in ("either", _check(prop, found))
            nodes += search_of(stages[1].settings, prop).nodes
            properties += 1
    assert properties >= 4 and nodes > 3 * properties  # the trees were not trivial


def test_a_margin_at_the_threshold_gets_its_exact_minimum() -> None:
    """Between 0 and the margin that counts as proof, leaves decide: the bound is the LP's optimum."""
    checked = 0
    for seed in range(6):
        model, x = random_net("dense", seed, width=8), random_input(seed)
        builder, low, high = FormBuilder(model, x), 0.0, 0.7
        if minimum(builder, model, x, high) > 0:
            continue
        for _ in range(22):
            middle = (low + high) / 2
            low, high = (middle, high) if minimum(builder, model, x, middle) > 0 else (low, middle)
        subject, samples = problem(model, x, low)
        found = bab(PLAIN)(subject, samples, timeout=30.0)
        exact = minimum(builder, model, x, low)
        assert found.exhausted == [False] and 0 <= exact < 1e-4
        if found.counterexamples[0] is None:
            assert abs(float(found.lower.min()) - exact) < 1e-5
            checked += 1
    assert checked >= 2


# ---------------------------------------------------------------- limits


@pytest.fixture(scope="module")
def hard() -> Property:
    """Robust, but not provable without splits."""
    model, x = random_net("dense", 101, width=40), random_input(101)
    subject, samples = problem(model, x, 0.139)
    form = FormBuilder(model, x).form(samples.box, margin_spec(samples.labels, 3)[0])
    minima = torch.tensor([minimise(form, row).bound for row in range(2)], dtype=torch.float64)
    return Property(subject, samples, minima)


WEAK = replace(PLAIN, iterations=1, root_iterations=1, batch_size=8)


def test_the_node_limit_is_kept_and_gives_a_bound(hard: Property) -> None:
    full = search_of(WEAK, hard)
    assert full.nodes > 48 and not full.exhausted and float(full.lower.min()) > 0
    previous = -torch.inf
    for limit in (2, 3, 10, 33, 48):
        outcome = search_of(replace(WEAK, max_nodes=limit), hard)
        assert outcome.nodes <= limit and outcome.exhausted and outcome.counterexample is None
        assert (outcome.lower <= hard.minima + 1e-5).all()
        assert previous <= float(outcome.lower.min())
        previous = float(outcome.lower.min())


def test_known_bounds_are_kept(hard: Property) -> None:
    outcome = search_of(replace(WEAK, max_nodes=2), hard, known=-1e-3)
    assert float(outcome.lower.min()) >= -1e-3 - 1e-9


def test_a_timeout_is_a_value_in_time(hard: Property) -> None:
    stage = bab(replace(WEAK, batch_size=2))
    stage(hard.subject, hard.samples, timeout=0.0)  # builds the form's network once
    for limit in (0.0, 1e-4):
        started = time.monotonic()
        found = stage(hard.subject, hard.samples, timeout=limit)
        assert time.monotonic() - started < limit + 2.0
        assert found.exhausted == [True] and found.counterexamples == [None]
        assert torch.isfinite(found.lower).all() and (found.lower[0].double() <= hard.minima + 1e-5).all()


def test_the_same_seed_gives_the_same_search(hard: Property) -> None:
    first, second = (search_of(replace(WEAK, max_nodes=40), hard) for _ in range(2))
    assert torch.equal(first.lower, second.lower) and first.nodes == second.nodes


def test_a_small_queue_changes_the_order_not_the_verdict(hard: Property, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "Queue", lambda max_mib: Queue(max_mib=0.002))
    outcome = search_of(WEAK, hard)
    assert not outcome.exhausted and float(outcome.lower.min()) > 0


def test_a_radius_of_zero_is_the_network_itself() -> None:
    model, x = random_net("dense", 0, width=6), random_input(0)
    subject, samples = problem(model, x, 0.0)
    for stage in (bab(), oracle(decide=False)):
        found = stage(subject, samples, timeout=10.0)
        assert found.exhausted == [False] and found.counterexamples == [None]
        assert torch.allclose(found.lower, margins(model, x, samples.labels), atol=1e-5)


def test_only_open_classes_are_bounded(hard: Property) -> None:
    samples = replace(hard.samples, proven=torch.tensor([[False, True]]))
    found = bab()(hard.subject, samples, timeout=30.0)
    assert torch.isfinite(found.lower[0, 0]) and found.lower[0, 1] == -torch.inf


def test_the_model_is_left_as_it_was(hard: Property) -> None:
    model = hard.subject.model
    before = [(p.clone(), p.requires_grad, p.grad) for p in model.parameters()]
    bab()(hard.subject, hard.samples, timeout=30.0)
    for parameter, (value, wanted, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value) and parameter.requires_grad == wanted and parameter.grad is gradient


def test_the_second_tree_goes_on_where_the_first_stops(hard: Property) -> None:
    alone = search_of(replace(WEAK, first_nodes=10**6), hard)
    outcome = search_of(replace(WEAK, group_iterations=5, first_nodes=8), hard)
    assert alone.nodes > 8 and outcome.nodes > 8
    assert not outcome.exhausted and float(outcome.lower.min()) > 0
    assert (outcome.lower <= hard.minima + 1e-5).all()


def test_both_trees_share_the_node_limit(hard: Property) -> None:
    stopped = search_of(replace(WEAK, group_iterations=5, first_nodes=8, max_nodes=14), hard)
    first = search_of(replace(WEAK, group_iterations=5, first_nodes=8, max_nodes=8), hard)
    assert first.nodes <= 8 < stopped.nodes <= 14
    assert stopped.exhausted and (stopped.lower >= first.lower).all() and (stopped.lower <= hard.minima + 1e-5).all()


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_new_slopes_on_the_way_down_keep_the_limit_and_the_verdict(at_once: int, hard: Property) -> None:
    settings = replace(WEAK, group_iterations=20, first_nodes=8, slopes_at_once=at_once)
    outcome = search_of(settings, hard)
    assert not outcome.exhausted and float(outcome.lower.min()) > 0
    assert (outcome.lower <= hard.minima + 1e-5).all()
    proof = AIM * max(1.0, float(hard.subject.model(hard.samples.box.center).abs().max()))
    ended = 0
    for limit in range(10, 50, 3):
        stopped = search_of(replace(settings, max_nodes=limit), hard)
        assert stopped.nodes <= limit
        ended += stopped.exhausted
        assert stopped.exhausted == (float(stopped.lower.min()) <= proof)
    assert 2 <= ended < 14
    again = search_of(replace(settings, max_nodes=limit), hard)
    assert torch.equal(again.lower, stopped.lower) and again.nodes == stopped.nodes


@pytest.mark.parametrize("fitting", [0, 1])
def test_fewer_or_no_slopes_where_they_get_too_large(
    fitting: int, hard: Property, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After those of the root; the verdict is the same."""
    asked: list[int] = []

    def limited(
        bounds: SplitBounds, batch: Domains, groups: Groups, *start: Any, **options: Any
    ) -> tuple[Envelopes, list[Slopes], Domains] | None:
        asked.append(len(batch))
        fits = len(asked) == 1 or len(batch) <= fitting
        return slopes_for(bounds, batch, groups, *start, **options) if fits else None

    monkeypatch.setattr(tree, "slopes_for", limited)
    settings = replace(WEAK, group_iterations=1, renewal_iterations=1, first_nodes=8, slopes_at_once=4)
    outcome = search_of(settings, hard)
    refused = next((i for i, size in enumerate(asked) if i and size > fitting), len(asked))
    assert refused < len(asked) and max(asked[refused:]) > fitting >= max([*asked[refused + 2 :], 0])
    assert not outcome.exhausted and 0 < float(outcome.lower.min()) <= float(hard.minima.min()) + 1e-5


def test_settings_are_checked() -> None:
    numbers = ({"batch_size": 0}, {"iterations": 0}, {"max_nodes": 0}, {"slopes_at_once": 0}, {"attack_steps": -1})
    for wrong in (*numbers, {"input_batch": 1}, {"batch_size": 2.5}, {"batch_size": True}):
        with pytest.raises(ConfigError):
            SolverSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'iterations'"):
        SolverSettings.of({"iteration": 3})
    with pytest.raises(ConfigError, match="an integer for iterations, got 'many'"):
        SolverSettings.of({"iterations": "many"})
    assert len(dataclasses.fields(SolverSettings)) <= 25

"""Networks whose split form does not fit the memory: the tree over their own maps proves and refutes as well."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gls_lirpa.certification import certify
from gls_lirpa.models import build_model
from gls_lirpa.solver import SearchOutcome, SolverSettings
from gls_lirpa.solver.builder import FormBuilder, FormTooLargeError, Stability
from gls_lirpa.solver.form import SplitForm
from tests.helpers.branch_problems import PLAIN, Property, near_boundary, search_of
from tests.helpers.exact_nets import KINDS, margins

SETTINGS = replace(PLAIN, iterations=12, attack_starts=2, attack_steps=3, max_nodes=120)


def without_matrix(settings: SolverSettings, prop: Property) -> SearchOutcome:
    def refuse(self: FormBuilder, stable: Stability) -> SplitForm:
        raise FormTooLargeError("too large")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FormBuilder, "split", refuse)
        return search_of(settings, prop)


def test_bounds_are_sound_and_decide() -> None:
    """Never above the exact minimum; most properties near the boundary are decided, and rightly."""
    decided = properties = splits = 0
    for kind in KINDS:
        for prop in near_boundary(kind, 101, 12):
            outcome = without_matrix(SETTINGS, prop)
            assert (outcome.lower <= prop.minima + 1e-6).all()
            properties, splits = properties + 1, splits + (outcome.nodes > 2)
            if outcome.counterexample is not None:
                point = outcome.counterexample.unsqueeze(0)
                box = prop.samples.box
                assert (point >= box.lower).all() and (point <= box.upper).all()
                assert float(margins(prop.subject.model, point, prop.samples.labels).min()) < 0
                assert float(prop.minima.min()) < 0
                decided += 1
            elif not outcome.exhausted:
                assert float(outcome.lower.min()) > 0 and float(prop.minima.min()) > 0
                decided += 1
    assert properties >= 6 and splits >= 3 and decided >= 0.6 * properties, (properties, splits, decided)


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_limit_gives_a_bound(nodes: int) -> None:
    (prop, _) = near_boundary("dense", 101, 12)
    settings = replace(SETTINGS, max_nodes=nodes, attack_starts=0, iterations=1)
    outcome = without_matrix(settings, prop)
    assert outcome.nodes <= nodes and outcome.exhausted
    assert torch.isfinite(outcome.lower).all() and (outcome.lower <= prop.minima + 1e-6).all()


def test_a_large_network_has_a_complete_stage() -> None:
    """cnn5-l with a form of 1 MiB: a radius that crown leaves open is proven by splits. In float64, because these
    untrained weights let float32 round by more than the margin."""
    torch.manual_seed(1)
    model = build_model("cnn5-l", in_shape=(1, 8, 8), classes=4, init="kaiming-uniform", seed=1).double().eval()
    x = torch.rand(1, 1, 8, 8).double()
    with torch.no_grad():
        label = model(x).argmax(1)
    crown, tree = (
        certify(model, x, label, eps=0.0221, stages=stages, timeout=60.0, bab=SolverSettings(form_mib=1))[0]
        for stages in (["crown"], ["crown", "bab"])
    )
    assert crown.verdict == "unknown" and tree.verdict == "verified" and tree.stage == "bab"
    assert crown.bound is not None and tree.bound is not None and tree.bound > crown.bound

"""Properties near the decision boundary, and domains of them, with their exact minima."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.certification.complete import CompleteStage
from gls_lirpa.certification.stage import OpenSamples, Subject
from gls_lirpa.solver import Query, SearchOutcome, Solver, SolverSettings
from gls_lirpa.solver.ascent import optimise
from gls_lirpa.solver.bounds import SplitBounds
from gls_lirpa.solver.builder import FormBuilder
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.envelopes import Envelopes
from gls_lirpa.solver.exact import minimise
from gls_lirpa.solver.facets import Facets
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.group_ascent import slopes_for
from gls_lirpa.solver.groups import Groups
from tests.helpers.exact_nets import problem, random_input, random_net

PLAIN = SolverSettings(
    tightening_iterations=0,
    facet_iterations=0,
    group_iterations=0,
    attack_starts=0,
    attack_steps=0,
    root_iterations=2,
    iterations=2,
)
"""Weak bounds and no descent: the tree must do the work."""

RENEWING = replace(PLAIN, first_nodes=2, group_iterations=5, slopes_at_once=2)
"""The same with groups of neurons, few at a time."""


@dataclass(frozen=True)
class Property:
    """A sample, a radius and the exact minima of its margins."""

    subject: Subject
    samples: OpenSamples
    minima: Tensor


def minimum(builder: FormBuilder, model: nn.Module, x: Tensor, eps: float) -> float:
    spec = margin_spec(model(x).argmax(1), int(model(x).shape[1]))[0]
    form = builder.form(linf_box(x, eps), spec)
    return min(minimise(form, row).bound for row in range(len(spec)))


def near_boundary(kind: str, seed: int, width: int) -> list[Property]:
    """The same sample just inside and just outside its robust radius, found by bisection on the MILP."""
    model, x = random_net(kind, seed, width=width), random_input(seed)
    builder, low, high = FormBuilder(model, x), 0.0, 0.7
    if minimum(builder, model, x, high) > 0:
        return []
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if minimum(builder, model, x, middle) > 0 else (low, middle)
    subject = problem(model, x, low)[0]
    found = []
    for eps in (low, high):
        samples = problem(model, x, eps, engine=subject.engine)[1]
        spec = margin_spec(samples.labels, 3)[0]
        form = builder.form(samples.box, spec)
        minima = torch.tensor([minimise(form, row).bound for row in range(2)], dtype=torch.float64)
        found.append(Property(subject, samples, minima))
    return found


def bab(settings: SolverSettings | None = None) -> CompleteStage:
    return CompleteStage("bab", settings)


def oracle(*, decide: bool = True) -> CompleteStage:
    return CompleteStage("milp", search=partial(Solver.exact, decide=decide))


def search_of(settings: SolverSettings, prop: Property, known: float = -torch.inf) -> SearchOutcome:
    samples, subject = prop.samples, prop.subject
    solver = Solver(subject.model, subject.engine, settings)
    return solver.branch_and_bound(Query(samples.box, margin_spec(samples.labels, 3)[0], torch.full((2,), known)))


def random_domains(form: SplitForm, seed: int, count: int) -> Domains:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(count) % len(form.offset)
    start = Domains.roots(form, rows)
    signs = torch.randint(-1, 2, start.signs.shape, generator=generator).to(torch.int8)
    return replace(
        start,
        signs=signs,
        alpha=torch.rand(start.alpha.shape, generator=generator),
        beta=torch.rand(start.beta.shape, generator=generator) * 2,
        gamma=torch.rand(start.gamma.shape, generator=generator),
    )


def root_envelopes(form: SplitForm, facets: Facets | None, *, iterations: int) -> Envelopes | None:
    """Of every row's unsplit problem, groups joined for the first row; None without a neuron in the first layer."""
    bounds = SplitBounds(form, facets=facets, dtype=torch.float64)
    start = Domains.roots(form, torch.arange(len(form.offset)), torch.float64)
    root, _ = optimise(bounds, start, iterations=50, target=torch.inf)
    weight = bounds.over_first_layer(root).weight
    groups = Groups.of(form.layers[0], (-weight[0, form.inputs :]).clamp(min=0))
    settings = SolverSettings(group_iterations=iterations)
    found = None if groups is None else slopes_for(bounds, root, groups, settings=settings)
    return None if found is None else found[0]


def small_form(kind: str, seed: int, *, width: int, eps: float = 0.3) -> tuple[nn.Module, Tensor, SplitForm]:
    model, x = random_net(kind, seed, width=width), random_input(seed)
    return model, x, FormBuilder(model, x).form(linf_box(x, eps), margin_spec(model(x).argmax(1), 3)[0])

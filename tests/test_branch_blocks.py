"""Trees of blocks: the bound against exact minima, its derivatives, its limits, and what happens if it is broken."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.certification import branch_blocks
from gls_lirpa.certification.branch import BranchAndBound
from gls_lirpa.certification.branch_blocks import bound_in_blocks
from gls_lirpa.certification.branch_settings import Settings
from gls_lirpa.certification.exact_lp import minimise
from gls_lirpa.certification.stage import Subject
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.split import FormBuilder, SplitForm
from gls_lirpa.engine.split_blocks import Blocks
from gls_lirpa.engine.split_bounds import Pass, SplitBounds, Subproblems
from gls_lirpa.engine.split_leaves import LeafBounds, Leaves

SETTINGS = Settings(root_iterations=20, block_splits=8, block_iterations=5, block_warmup=20, candidates=4)


def places_net(layers: int, seed: int) -> nn.Module:
    """Two or three convolutions; the last one's places read different parts of the image."""
    torch.manual_seed(seed)
    last = [nn.Conv2d(2, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)]
    middle = [nn.Conv2d(2, 2, 1), nn.ReLU()] if layers == 3 else []
    model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ReLU(), *middle, *last).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter)
        else:
            nn.init.uniform_(parameter, -0.2, 0.2)
    return model.requires_grad_(False)


def places_problem(layers: int, seed: int, eps: float = 0.25) -> tuple[nn.Module, Tensor, Box, SplitForm]:
    model = places_net(layers, seed)
    x = torch.rand(1, 1, 6, 8, generator=torch.Generator().manual_seed(seed))
    box = linf_box(x, eps)
    return model, x, box, FormBuilder(model, x).form(box, margin_spec(model(x).argmax(1), 3)[0])


def exact_blocks(form: SplitForm) -> Blocks:
    blocks = Blocks.of(form, 0)
    assert blocks is not None
    return blocks


def root_pass(form: SplitForm) -> tuple[Subproblems, Pass]:
    whole = SplitBounds(form, dtype=torch.float64)
    return whole.optimise(whole.start(torch.zeros(1, dtype=torch.long)), iterations=20, target=math.inf)


def started(form: SplitForm, blocks: Blocks) -> tuple[LeafBounds, Leaves, float]:
    root, done = root_pass(form)
    lam = done.coefficient[0]
    slope = torch.where(lam < 0, form.upper / (form.upper - form.lower), root.alpha[0])
    bounds = LeafBounds(blocks, blocks.coefficients(slope, lam))
    return bounds, bounds.start(root.alpha[0]), float(done.value)


def random_leaves(blocks: Blocks, seed: int, count: int) -> tuple[LeafBounds, Leaves]:
    """Any coefficients, slopes, α and β will do."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    bounds = LeafBounds(blocks, (draw(*blocks.columns.shape) - 0.5) * blocks.real)
    first = blocks.parts[0].weight
    bounds.slopes = first * (1.5 * draw(*first.shape) - 0.2)
    block = torch.arange(len(blocks)).repeat_interleave(count)
    real = torch.cat([part.real for part in blocks.parts], 1)[block]
    signs = torch.randint(-3, 4, (len(block), blocks.neurons), generator=generator)
    signs = torch.where((signs.abs() == 3) & real, signs.sign(), 0).double()
    return bounds, Leaves(block, signs, draw(*signs.shape), draw(*signs.shape), ())


def copies_at(blocks: Blocks, t: Tensor) -> list[tuple[Tensor, Tensor]]:
    """All of [t; v] and z of every block at inputs t of the form (n, inputs): (n, columns + last), (n, neurons)."""
    found = []
    for i in range(len(blocks)):
        known, zs = t[:, blocks.columns[i, : blocks.inputs]] * blocks.real[i, : blocks.inputs], []
        for part in blocks.parts:
            zs.append(known @ part.weight[i].t() + part.offset[i])
            known = torch.cat([known, zs[-1].clamp(min=0)], 1)
        found.append((known, torch.cat(zs, 1)))
    return found


def sound(form: SplitForm, minimum: float, seed: int) -> bool:
    """Leaves lie below their block wherever their signs hold, sums below the row, and searches below its minimum."""
    blocks = exact_blocks(form)
    generator = torch.Generator().manual_seed(seed)
    t = torch.rand(400, form.inputs, generator=generator, dtype=torch.float64) * 2 - 1
    t = torch.cat([t, t.sign()])
    bounds, leaves = random_leaves(blocks, seed, 6)
    values = bounds.evaluate(leaves).value
    coefficients = torch.cat([bounds.c, blocks.last], 1)
    lowest = torch.zeros(len(t), dtype=torch.float64)
    for i, (known, z) in enumerate(copies_at(blocks, t)):
        at = known @ coefficients[i]
        lowest += at
        for j in (leaves.block == i).nonzero().flatten().tolist():
            inside = (leaves.signs[j] * z >= 0).all(1)
            if not (values[j] <= at[inside] + 1e-9).all():
                return False
    row = form.evaluate(t)[:, 0] + 1e-9
    if not (blocks.constant(bounds.c) + lowest <= row).all():
        return False
    # The same with nothing left of the inputs, so that what is left of the neurons shows.
    rest = (blocks.rest(bounds.c) / blocks.copies.clamp(min=1))[blocks.columns] * blocks.real
    rest[:, blocks.inputs :] = 0.0
    lowest += sum((rest[i] * known[:, : rest.shape[1]]).sum(1) for i, (known, _) in enumerate(copies_at(blocks, t)))
    if not (blocks.constant(bounds.c + rest) + lowest <= row).all():
        return False
    return bound_in_blocks(form, 0, SETTINGS, target=math.inf, max_nodes=200)[0] <= minimum + 1e-6


@pytest.fixture(scope="module")
def references() -> list[tuple[SplitForm, float]]:
    forms = [places_problem(layers, seed)[3] for layers in (2, 3) for seed in range(12)]
    found = [form for form in forms if Blocks.of(form, 0) is not None]
    assert {len(form.layers) for form in found} == {2, 3} and len(found) >= 8
    return [(form, minimise(form, 0).bound) for form in found]


def test_blocks_are_the_places(references: list[tuple[SplitForm, float]]) -> None:
    for form, _ in references:
        blocks = exact_blocks(form)
        assert 2 <= len(blocks) <= 6
        t = torch.rand(50, form.inputs, dtype=torch.float64) * 2 - 1
        c = blocks.shared(torch.zeros_like(blocks.columns, dtype=torch.float64))
        rest = blocks.rest(c)
        assert rest[form.inputs :].abs().max() < 1e-12
        row = torch.cat([c, blocks.last], 1)
        total = sum(known @ row[i] for i, (known, _) in enumerate(copies_at(blocks, t)))
        # With ρ = 0 on the neurons, the blocks and the inputs' rest are the row itself.
        assert torch.allclose(total + t @ rest[: form.inputs] + blocks.offset, form.evaluate(t)[:, 0], atol=1e-9)


def test_the_start_repeats_the_pass_over_the_whole_row(references: list[tuple[SplitForm, float]]) -> None:
    for form, _ in references:
        bounds, leaves, whole = started(form, exact_blocks(form))
        # Up to the widening of the first layer's bounds, which its own upper bound does not have.
        assert float(bounds.bound(leaves.block, bounds.evaluate(leaves).value)) == pytest.approx(whole, abs=1e-5)


def test_bounds_are_sound(references: list[tuple[SplitForm, float]]) -> None:
    for seed, (form, minimum) in enumerate(references):
        assert sound(form, minimum, seed)


def test_derivatives(references: list[tuple[SplitForm, float]]) -> None:
    for seed, (form, _) in enumerate(references):
        bounds, leaves = random_leaves(exact_blocks(form), seed, 3)
        done = bounds.evaluate(leaves)
        generator, step = torch.Generator().manual_seed(seed), 1e-6

        def change(given: Leaves, bounds: LeafBounds = bounds, before: Tensor = done.value) -> Tensor:
            return (bounds.evaluate(given).value - before) / 1e-6

        way = torch.rand(leaves.alpha.shape, generator=generator, dtype=torch.float64)
        rising = torch.where(leaves.signs == 0, done.lam.clamp(min=0) * done.z, 0.0)
        # α of later layers change λ before them; the first layer's alone is compared along any way.
        first = bounds.blocks.parts[0].index.shape[1]
        alone = torch.cat([way[:, :first], 0 * way[:, first:]], 1)
        moved = change(replace(leaves, alpha=leaves.alpha + step * alone))
        assert torch.allclose(moved, (rising * alone).sum(1), atol=1e-4)
        moved = change(replace(leaves, beta=leaves.beta + step * alone))
        assert torch.allclose(moved, (-leaves.signs * done.z * alone).sum(1), atol=1e-4)
        c = bounds.c
        way = torch.rand(c.shape, generator=generator, dtype=torch.float64) * bounds.blocks.real
        bounds.c = c + step * way
        expected = (done.known[:, : c.shape[1]] * way[leaves.block]).sum(1)
        assert torch.allclose(change(leaves), expected, atol=1e-4)


def test_the_bound_rises_with_the_leaves_and_ends_at_its_target(references: list[tuple[SplitForm, float]]) -> None:
    gained = 0
    for form, minimum in references:
        _, _, root = started(form, exact_blocks(form))
        few, first = bound_in_blocks(form, 0, SETTINGS, target=math.inf, max_nodes=8)
        many, nodes = bound_in_blocks(form, 0, SETTINGS, target=math.inf, max_nodes=600)
        assert first <= 8 and nodes <= 600
        assert root - 1e-5 <= few <= many + 1e-3 and many <= minimum + 1e-6
        gained += many > root + 0.5 * (minimum - root)
        again = bound_in_blocks(form, 0, SETTINGS, target=math.inf, max_nodes=600)
        assert again == (many, nodes)
        aim = root + 0.25 * (many - root)
        reached, needed = bound_in_blocks(replace(form, offset=form.offset - aim), 0, SETTINGS, target=1e-4)
        assert reached > 1e-4 and needed <= nodes
    assert gained >= len(references) // 2


def test_no_blocks(references: list[tuple[SplitForm, float]]) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    x = torch.rand(1, 1, 2, 2)
    form = FormBuilder(dense, x).form(linf_box(x, 0.3), torch.eye(3)[:1])
    assert Blocks.of(form, 0) is None
    assert bound_in_blocks(form, 0, SETTINGS, target=0.0) == (-math.inf, 0)
    # Too few nodes for one leaf per block.
    assert bound_in_blocks(references[0][0], 0, SETTINGS, target=0.0, max_nodes=1) == (-math.inf, 0)


def test_limits_of_time_and_memory_give_a_bound(
    references: list[tuple[SplitForm, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    form, minimum = references[0]
    late, nodes = bound_in_blocks(form, 0, SETTINGS, target=math.inf, deadline=time.monotonic())
    assert nodes == len(exact_blocks(form)) and -math.inf < late <= minimum
    monkeypatch.setattr(branch_blocks, "_BYTES", 2**30)
    small, nodes = bound_in_blocks(form, 0, SETTINGS, target=math.inf)
    assert nodes == len(exact_blocks(form)) and -math.inf < small <= minimum


@pytest.mark.parametrize("layers", [2, 3])
def test_branch_and_bound_with_blocks_decides_as_the_milp(layers: int) -> None:
    proven = 0
    for seed in range(4):
        for eps in (0.03, 0.1, 0.2):
            model, x, box, form = places_problem(layers, seed, eps)
            minima = torch.tensor([minimise(form, row).bound for row in range(2)])
            known = torch.full((2,), -torch.inf)
            spec = margin_spec(model(x).argmax(1), 3)[0]
            settings = replace(SETTINGS, first_nodes=1, group_iterations=1, rounds=0)
            outcome = BranchAndBound(settings).search(Subject(model, BoundEngine(model, x)), x[0], box, spec, known)
            assert not outcome.exhausted
            assert (outcome.counterexample is not None) == (float(minima.min()) < -1e-5)
            assert (outcome.lower <= minima + 1e-5).all()
            if float(minima.min()) > 1e-2:
                assert float(outcome.lower.min()) > 0
                proven += 1
    assert proven >= 3


_EVALUATE, _CHILDREN, _CONSTANT = LeafBounds.evaluate, branch_blocks._children, Blocks.constant


def _with_leaves(change: Callable[[Leaves], Leaves]) -> Callable[..., object]:
    return lambda self, leaves: _EVALUATE(self, change(leaves))


def _low_level(self: LeafBounds) -> Tensor:
    return self.slopes.abs().sum(2)


MUTATIONS: dict[str, tuple[object, str, object]] = {
    "β without the split's sign": (
        LeafBounds, "evaluate", _with_leaves(lambda a: replace(a, beta=a.beta * a.signs)),
    ),
    "signs swapped": (LeafBounds, "evaluate", _with_leaves(lambda a: replace(a, signs=-a.signs))),
    "α above 1": (LeafBounds, "evaluate", _with_leaves(lambda a: replace(a, alpha=a.alpha + 1))),
    "the envelope's level without the neuron itself": (LeafBounds, "_level", _low_level),
    "only one half is kept": (branch_blocks, "_children", lambda *given: [_CHILDREN(*given)[0]] * 2),
    "the rest of the inputs is free": (Blocks, "constant", lambda self, c: self.offset + 0 * _CONSTANT(self, c)),
    "the rest of the neurons is free": (
        Blocks, "constant", lambda self, c: self.offset - self.rest(c)[: self.starts[0]].abs().sum(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_soundness_check_notices(
    name: str, references: list[tuple[SplitForm, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, mutant = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    assert not all(sound(form, minimum, seed) for seed, (form, minimum) in enumerate(references))

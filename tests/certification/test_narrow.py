"""Rounding with ranges by CROWN, and boxes proven in parts."""

from __future__ import annotations

import copy
import itertools
import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box
from gls_lirpa.certification import StageOptions, certify
from gls_lirpa.certification.magnitudes import exact
from gls_lirpa.certification.narrow import Narrow, proven_by_parts
from gls_lirpa.certification.rounding import rounding
from gls_lirpa.certification.rounding_ranges import Ranges, narrowed
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.models import build_model
from tests.helpers.rounding import orders, points, run

FAST = StageOptions(attack_steps=5, attack_restarts=1, iterations=3)


def deep(seed: int, *, layers: int = 6, width: int = 20, inputs: int = 3) -> nn.Sequential:
    """As networks for control are: few inputs, many narrow layers."""
    torch.manual_seed(seed)
    sizes = [inputs, *[width] * layers]
    body = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*body, nn.Linear(width, 3))
    with torch.no_grad():
        for layer in body[::2]:
            layer.weight.mul_(2.5)
    return model.requires_grad_(False)


def narrow(model: nn.Module, x: Tensor) -> Narrow:
    return Narrow(model, BoundEngine(copy.deepcopy(model).double(), x.double()), folded=False)


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_summation_exceeds_the_narrow_bound(seed: int) -> None:
    model, x = deep(seed), torch.rand(1, 3)
    box, label = linf_box(x, 0.02), torch.tensor([0])
    wide = rounding(model, box, label, classes=3).forward
    found = narrow(model, x).rounding(box, label)
    assert found is not None
    lower, errors = found
    assert bool((errors.forward <= wide).all()) and float(errors.forward.max()) < 0.5 * float(wide.max())
    true = copy.deepcopy(model).double()
    for p in points(box, 30, seed):
        value = true(p.double().unsqueeze(0))[0]
        assert bool((value[0] - value[1:] >= lower[0] - 1e-9).all())
        for add in orders(seed):
            logits = torch.from_numpy(np.asarray(run(model, p.flatten().numpy(), add), dtype=np.float64))
            off = ((logits[0] - logits[1:]) - (value[0] - value[1:])).abs()
            assert bool((off <= errors.forward[0]).all())


def test_ranges_are_widened_by_what_they_may_be_off_by() -> None:
    value = exact(torch.tensor([0.0]))
    value = type(value)(
        torch.tensor([-4.0]), torch.tensor([4.0]), value.error, torch.tensor([4.0]), torch.tensor([0.5])
    )
    ends = torch.tensor([-1.0]), torch.tensor([2.0])
    found = narrowed(value, *ends, 0.5)
    assert (found.lower.item(), found.upper.item()) == (-1.25, 2.25)
    for low, high in ((torch.nan, 1.0), (3.0, 1.0)):  # no number; and crossed by more than rounding
        kept = narrowed(value, torch.tensor([low]), torch.tensor([high]), 0.5)
        assert kept.lower.item() == -4.0 and kept.upper.item() in (4.0, 1.25)


def test_ranges_of_other_relus_are_not_taken() -> None:
    class Mixed(nn.Module):
        """Calls its second layer's ReLU before that of the first: the order of calls is not that of the layers."""

        def __init__(self, leaky: bool) -> None:
            super().__init__()
            self.first, self.second, self.last, self.leaky = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3), leaky

        def forward(self, x: Tensor) -> Tensor:
            late = torch.relu(5.0 * self.second(x) + 3.0)
            first = self.first(x)
            y: Tensor = self.last(late + (nn.functional.leaky_relu(first) if self.leaky else torch.relu(first)))
            return y

    x, label = torch.rand(1, 3), torch.tensor([0])
    assert narrow(Mixed(leaky=True), x).rounding(linf_box(x, 0.1), label) is None
    model = Mixed(leaky=False).requires_grad_(False)
    own = narrow(model, x)
    swapped = own._bounds
    assert own.rounding(linf_box(x, 0.1), label) is not None
    other = narrow(model, x)
    other._bounds = lambda box, labels: (swapped(box, labels)[0], swapped(box, labels)[1][::-1])  # type: ignore[method-assign]
    assert other.rounding(linf_box(x, 0.1), label) is None


def test_too_few_or_too_many_ranges_are_no_bound() -> None:
    model, x = deep(0, layers=2), torch.rand(1, 3)
    one = (torch.zeros(1, 20, dtype=torch.float64), torch.ones(1, 20, dtype=torch.float64))
    for count in (1, 3):
        found = rounding(model, Box(x, x), torch.tensor([0]), classes=3, known=Ranges([one] * count, share=1.0))
        assert "ReLUs" in found.reason and bool(torch.isinf(found.forward).all())


@pytest.mark.parametrize("batchnorm", [False, True])
def test_images_and_folded_networks(batchnorm: bool) -> None:
    model = build_model("cnn3-tiny", in_shape=(1, 12, 12), mean=(0.13,), std=(0.31,)).eval().requires_grad_(False)
    if batchnorm:
        model = nn.Sequential(*list(model)[:2], nn.BatchNorm2d(2), *list(model)[2:]).eval().requires_grad_(False)
    x = torch.rand(2, 1, 12, 12)
    found = narrow(model, x).rounding(linf_box(x, 0.05), torch.tensor([0, 1]))
    assert found is not None and bool(torch.isfinite(found[1].forward).all())
    wide = rounding(model, linf_box(x, 0.05), torch.tensor([0, 1]), classes=found[1].forward.shape[1] + 1)
    assert bool((found[1].forward <= wide.forward).all())


def test_wide_boxes_of_deep_networks_are_verified_in_parts() -> None:
    """Rounding over the whole box, by intervals, is more than any margin: it would be unknown for ever."""
    verified = 0
    for seed in range(3):
        model, x = deep(seed, layers=9), torch.full((1, 3), 0.5)
        label = model(x).argmax(1)
        whole = rounding(model, linf_box(x, 0.1), label, classes=3).forward
        (record,) = certify(model, x, label, eps=0.1, stages=["input-split"], options=FAST, timeout=20)
        values = model(linf_box(x, 0.1).lower + 0.2 * torch.rand(2000, 3)).double()
        margins = values.gather(1, label.expand(2000, 1)) - values
        lowest = float(margins.masked_fill(margins == 0, torch.inf).min())
        if record.verdict == "verified":
            assert lowest > 0
            verified += lowest < float(whole.max())
    assert verified > 0


def test_what_is_not_robust_is_never_proven_in_parts() -> None:
    """A dent of width 2e-3 in a plane: f_0 − f_1 = 0.5 − 10³ max(0, 10⁻³ − |x − 0.3|)."""
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2)).requires_grad_(False)
    model[0].weight.copy_(torch.ones(3, 1))
    model[0].bias.copy_(torch.tensor([-0.299, -0.3, -0.301]))
    model[2].weight.copy_(torch.tensor([[-1e3, 2e3, -1e3], [0.0, 0.0, 0.0]]))
    box, label = Box(torch.zeros(1, 1), torch.ones(1, 1)), torch.tensor([0])
    for height, proven in ((1.5, True), (0.5, False)):
        model[2].bias.copy_(torch.tensor([height, 0.0]))
        deadline = time.monotonic() + 20
        found = proven_by_parts(narrow(model, box.lower), box, label, deadline=deadline, most=2000)
        assert found is proven
    assert not proven_by_parts(narrow(model, box.lower), box, label, deadline=time.monotonic() - 1)

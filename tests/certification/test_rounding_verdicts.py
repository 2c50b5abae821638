"""Rounding in verdicts: what is verified holds in every order of summation."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.certification import STAGES, StageOptions, certify
from gls_lirpa.certification.magnitudes import Arithmetic, Value, added, affine, exact, monotone, scaled
from gls_lirpa.certification.network import Network
from gls_lirpa.certification.rounding import rounding
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from gls_lirpa.doctor.operator_cases import CASES, Function, random_network
from gls_lirpa.doctor.selftest import lowest_points
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import EngineError, UnsupportedLayerError
from gls_lirpa.relaxations import RELAXATIONS
from tests.helpers.rounding import mlp, orders, points, run

FAST = StageOptions(attack_steps=5, attack_restarts=1, iterations=3)
STAGES_ALL = ("ibp", "hbox", "crown-ibp", "crown", "alpha-crown", "bab", "milp")


def cancelling(size: float, margin: float) -> nn.Sequential:
    """Margin ``margin`` everywhere in exact arithmetic; in float32 it depends on the order of two large terms.

    The third logit is so low that the engine does not take such errors for auto_LiRPA's.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, 0.3], [1.0, 0.3], [0.7, 0.1]]))
        model[1].bias.fill_(0.1)
        model[3].weight.copy_(torch.tensor([[size, -size, 0.1], [0.0, 0.0, 0.1], [0.0, 0.0, 0.0]]))
        model[3].bias.copy_(torch.tensor([margin, 0.0, -1e5]))
    return model


@pytest.mark.parametrize("stage", STAGES_ALL)
def test_weights_that_cancel_are_not_verified(stage: str) -> None:
    x, y = torch.tensor([[[[0.5, 0.5]]]]), torch.tensor([0])
    model = cancelling(1e8, 0.5)
    (record,) = certify(model, x, y, eps=0.001, stages=[stage], options=FAST, timeout=10)
    assert record.verdict != "verified"
    broken = [
        bool(np.diff(run(model, p.flatten().numpy(), add)[:2])[0] >= 0)
        for p in points(linf_box(x, 0.001), 10, 0)
        for add in orders(0)
    ]
    assert any(broken)  # as it runs, the network is wrong inside the box
    (small,) = certify(cancelling(10.0, 0.5), x, y, eps=0.001, stages=[stage], options=FAST, timeout=10)
    assert small.verdict == "verified" and small.covers == "float32, any summation order"


def test_what_is_verified_survives_every_order() -> None:
    verified = numerical = 0
    for seed in range(12):
        model = mlp(seed, cancel=(0.0, 1e2, 1e4, 1e6)[seed % 4], sizes=(4, 6, 3))
        x = torch.rand(6, 4, generator=torch.Generator().manual_seed(seed))
        labels = model(x).argmax(1)
        for record in certify(model, x, labels, eps=0.01, stages=["ibp", "crown", "bab"], options=FAST, timeout=2):
            numerical += record.reason == "numerical"
            if record.verdict != "verified":
                continue
            verified += 1
            label = int(labels[record.index])
            for point in points(linf_box(x[record.index : record.index + 1], 0.01), 4, seed).numpy():
                for add in orders(seed):
                    logits = run(model, point, add)
                    assert all(logits[label] > logits[j] for j in range(3) if j != label)
    assert verified >= 15 and numerical >= 1


@pytest.mark.parametrize("stage", STAGES_ALL)
def test_ties_are_never_verified(stage: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[3].weight[1] = model[3].weight[0]
        model[3].bias[1] = model[3].bias[0]
    x, y = torch.rand(1, 1, 1, 3), torch.tensor([0])
    for network, image in ((model.float(), x), (copy.deepcopy(model).double(), x.double())):
        (record,) = certify(network, image, y, eps=0.05, stages=[stage], options=FAST, timeout=5)
        assert record.verdict != "verified"
        with torch.no_grad():
            network[3].bias[0] = torch.nextafter(network[3].bias[1], network[3].bias[1] + 1)
        (record,) = certify(network, image, y, eps=0.05, stages=[stage], options=FAST, timeout=5)
        assert record.verdict != "verified"


def test_the_difference_that_folding_makes_is_covered() -> None:
    """A margin below what rounding folded weights to float32 changes, positive in the folded network alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[1].weight.abs_()
        model[2].running_mean.fill_(-1e4)
        model[2].running_var.fill_(3.0)
    x = torch.rand(1, 1, 1, 4)
    net = Network(model, x, seed=0)
    need = net.requirements(linf_box(x, 0.01), torch.tensor([0]), net.logits(x))
    with torch.no_grad():
        folded, exact = net._folded(x).double(), net._exact(x.double())
    change = ((folded - exact)[:, 0] - (folded - exact)[:, 1]).abs()
    assert 0 < float(change) <= float(need.solver.min()) and float(change) <= float(need.single.min())


def test_earlier_bounds_reach_branch_and_bound_less_their_slack() -> None:
    """A float32 bound between what float64 and float32 need must not come back as a proof."""
    model = mlp(3, sizes=(4, 6, 3))
    x = torch.rand(1, 4)
    label = model(x).argmax(1)
    network = Network(model, x, seed=0)
    need = network.requirements(linf_box(x, 0.0), label, network.logits(x))
    assert float(need.solver.max()) < float(need.single.min()) / 2
    between = 0.75 * float(need.single.min())

    class Claims:
        name, batch = "test-claims", 1

        def __init__(self, options: StageOptions) -> None:
            pass

        def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
            value = between if samples.x.dtype == torch.float32 else -torch.inf
            return Findings(torch.full_like(samples.lower, value), [None], [False])

    class Echo(Claims):
        name, exact = "test-echo", True

        def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
            return Findings(samples.lower, [None], [False])

    for kind in (Claims, Echo):
        STAGES.register(kind.name, kind)
    try:
        (record,) = certify(model, x, label, eps=0.0, stages=["test-claims", "test-echo"])
    finally:
        for kind in (Claims, Echo):
            del STAGES._items[kind.name]
    assert (record.verdict, record.reason) == ("unknown", "numerical")


@pytest.mark.parametrize("error", [EngineError("broken inside"), RuntimeError("broken inside"), MemoryError()])
def test_a_stage_that_fails_is_told(error: Exception) -> None:
    class Fails:
        name, batch = "test-fails", 8

        def __init__(self, options: StageOptions) -> None:
            pass

        def __call__(self, subject: Subject, samples: OpenSamples, *, timeout: float) -> Findings:
            if bool((samples.indices == 2).any()):
                raise error
            return Findings(torch.full_like(samples.lower, -1.0), [None] * len(samples), [False] * len(samples))

    model, x = mlp(1, sizes=(4, 6, 3)), torch.rand(4, 4)
    labels = model(x).argmax(1)
    STAGES.register("test-fails", Fails)
    try:
        alone = certify(model, x, labels, eps=0.0, stages=["test-fails"])
        after = certify(model, x, labels, eps=0.0, stages=["test-fails", "ibp"])
    finally:
        del STAGES._items["test-fails"]
    assert [record.reason for record in alone] == ["bound", "bound", "error", "bound"]
    assert alone[2].errors == {"test-fails": str(error) or "MemoryError"} and "test-fails" in alone[2].detail
    assert [record.verdict for record in after] == ["verified"] * 4  # the other stages still run
    assert [bool(record.errors) for record in after] == [False, False, True, False]


WITHOUT_RULE = ("upsample", "computed in the forward pass", "gelu", "silu", "elu", "softplus")
"""Interpolation weights, and what a forward pass computes from constants or weights, are rounded in unknown ways."""


@pytest.mark.parametrize("name", CASES)
def test_every_operation_of_the_table(name: str) -> None:
    """The network in float32 against float64, and a float32 bound against the same one in float64."""
    bounded = 0
    for seed in range(4):
        model, shape = random_network(CASES[name].layer, seed, image=CASES[name].image)
        with torch.no_grad():
            for parameter in model.parameters():  # so that there is something to round
                parameter.mul_(20.0)
        exact = copy.deepcopy(model).double()
        box = linf_box(torch.rand(2, *shape, generator=torch.Generator().manual_seed(seed)), 0.1)
        labels = torch.tensor([0, 1])
        need = rounding(model, box, labels, classes=3)
        if need.reason:
            assert any(word in need.reason for word in WITHOUT_RULE)
            continue
        bounded += 1
        spec = margin_spec(labels, 3)
        with torch.no_grad():
            inside = lowest_points(model, box, spec, samples=32, steps=2, seed=seed)
            computed, true = (
                (spec.to(x) @ network(x.flatten(0, 1)).unflatten(0, x.shape[:2]).unsqueeze(-1)).squeeze(-1).double()
                for network, x in ((model, inside), (exact, inside.double()))
            )
            assert bool(((computed - true).abs() <= need.forward).all())
            relaxation = RELAXATIONS.get("crown" if "crown" in CASES[name].bounded else "ibp")
            wide = Box(box.lower.double(), box.upper.double())
            try:
                single = BoundEngine(model, box.lower).bounds(box, spec, relaxation).lower.double()
                double = BoundEngine(exact, wide.lower).bounds(wide, spec.double(), relaxation).lower
            except UnsupportedLayerError:
                continue
        assert bool((single - double <= need.bound).all())
    assert bounded or name == "GELU, SiLU, ELU"


def test_windows_divided_by_a_negative_number() -> None:
    model = nn.Sequential(nn.AvgPool2d(2, divisor_override=-2), nn.Flatten(), nn.Linear(4, 2))
    found = rounding(model, linf_box(torch.rand(1, 1, 4, 4), 0.1), torch.tensor([0]), classes=2)
    assert float(found.forward.min()) > 0 and float(found.bound.min()) > 0


def test_a_number_computed_from_weights_in_float64_is_none_of_pythons() -> None:
    class Scaled(nn.Module):
        def __init__(self, factor: float | None) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(3, 2), factor

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (self.layer.weight.norm() if self.factor is None else self.factor)

    x = torch.rand(1, 3, dtype=torch.float64)
    found = [rounding(Scaled(factor).double(), Box(x, x), torch.tensor([0]), classes=2) for factor in (None, 3.0)]
    assert "computed in the forward pass" in found[0].reason and not found[1].reason


@pytest.mark.parametrize(
    "write", [nn.ReLU(inplace=True), Function(lambda x: x.mul_(0.5)), Function(lambda x: x[:, :1].neg_() + x)]
)
def test_a_network_that_writes_into_its_input_is_refused(write: nn.Module) -> None:
    x = torch.rand(2, 3)
    before = x.clone()
    model = nn.Sequential(write, nn.Linear(3, 2))
    for attempt in (lambda: certify(model, x, torch.tensor([0, 1]), eps=0.01), lambda: BoundEngine(model, x)):
        with pytest.raises(UnsupportedLayerError, match="writes into its own input"):
            attempt()
    assert torch.equal(x, before)


def test_writes_inside_the_network_are_fine() -> None:
    x = torch.rand(2, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), Function(lambda x: x.mul_(0.5)), nn.Linear(3, 2))
    records = certify(model, x, model(x).argmax(1), eps=0.0, options=FAST)
    assert [record.verdict for record in records] == ["verified"] * 2


def many_constants(size: int = 32, channels: int = 40, window: int = 4) -> tuple[nn.Sequential, Tensor]:
    """A margin of −6,000 units at a corner of the box, where a row has a large constant and 40,960 ones below half of
    its last digit; and that corner."""
    unit, parts = 2.0**-24, (size // window) ** 2
    low, high = 1 / 16, 15 / 16
    model = nn.Sequential(
        nn.Conv2d(2, channels, 1, bias=False), nn.ReLU(),
        nn.Conv2d(channels, 1, window, window), nn.ReLU(), nn.Flatten(), nn.Linear(parts, 2),
    )  # fmt: skip
    first, second, last = model[0], model[2], model[5]
    assert isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d) and isinstance(last, nn.Linear)
    with torch.no_grad():
        first.weight[:, 0], first.weight[:, 1] = low, -high
        second.weight.fill_(-0.95 * unit / (low * high))
        second.bias.fill_((1 + 2**-10) / parts)  # type: ignore[union-attr]
        last.weight.copy_(torch.tensor([[0.0], [1.0]]).expand(2, parts))
        last.bias.copy_(torch.tensor([1 + 2**-10 - 6000 * unit, 0.0]))
    corner = torch.zeros(1, 2, size, size)
    corner[:, 0] = 1
    return model.eval(), corner


@pytest.mark.parametrize("stage", ["crown-ibp", "crown"])
def test_constants_of_many_neurons_are_not_lost(stage: str) -> None:
    model, corner = many_constants()
    x, y = torch.full_like(corner, 0.5), torch.tensor([1])
    with torch.no_grad():
        logits = model(corner)[0]
    assert logits[1] < logits[0]
    (record,) = certify(model, x, y, eps=0.5, stages=[stage], timeout=20)
    assert record.verdict != "verified"
    box = linf_box(x, 0.5)
    bound = BoundEngine(model, x).margins(box, y, RELAXATIONS.get(stage))
    slack = rounding(model, box, y, classes=2).bound
    assert float(bound) - float(slack) <= float((logits[1] - logits[0]).double())


@pytest.mark.parametrize("kind", ["bias", "scaling", "constant", "activation"])
def test_the_constants_of_a_layer_may_be_summed_in_any_order(kind: str) -> None:
    """A 1 before 4,095 numbers below half of its last digit, summed in order: all of them are lost."""
    count, unit = 4096, 2.0**-24
    constants = np.full(count, 0.95 * unit, dtype=np.float32)
    constants[0] = 1
    lost = constants.astype(np.float64).sum() - float(np.add.accumulate(constants)[-1])
    size = torch.from_numpy(constants).double().view(1, 1, 64, 64)
    arithmetic, zero = Arithmetic.of(torch.float32, extra=16), torch.zeros_like(size)
    nothing = Value(zero, zero, zero, zero, zero)
    found = {
        "bias": lambda: affine(arithmetic, nothing, lambda z, _: z, terms=1, rows=1, offset=size),
        "scaling": lambda: scaled(arithmetic, nothing, zero + 1, size, size, roundings=2),
        "constant": lambda: added(arithmetic, nothing, exact(size), 1),
        "activation": lambda: monotone(arithmetic, replace(nothing, magnitude=size), torch.relu),
    }[kind]()
    assert float(found.slack.sum()) > lost > 1e-4


def test_intervals_too_wide_for_their_type_prove_nothing() -> None:
    """The width of [−2.2e38, 2.2e38] overflows in float32: a slope of 0 would make the neuron a dead one."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 2))
    first, last = model[1], model[3]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[2.2e38, -2.2e38]]))
        first.bias.zero_()
        last.weight.copy_(torch.tensor([[1e-38], [0.0]]))
        last.bias.copy_(torch.tensor([0.0, 0.1]))
    x, y = torch.full((1, 1, 1, 2), 0.5), torch.tensor([1])
    box = linf_box(x, 0.5)
    for name in ("crown-ibp", "crown", "crown-plain", "alpha-crown", "alpha-crown-step"):
        for route in ("auto", "lirpa"):
            margins = BoundEngine(model, x, route=route).margins(box, y, RELAXATIONS.get(name))
            assert not (margins > -2.0).any()
    assert certify(model, x, y, eps=0.5, timeout=10)[0].verdict == "falsified"

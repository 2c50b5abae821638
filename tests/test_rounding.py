"""Rounding: what is verified holds for the network as it runs, in whatever order its sums are taken.

The reference is the network in exact rational arithmetic where it is small and in float64 elsewhere; float32 runs are
made here by hand, with sums in many orders, with and without fused multiply-add, and with subnormals flushed.
Mutations that made a test of this file fail: no forward error, no error of earlier layers carried on, γ without the
length of the sum, no offset in γ, the centre of the box instead of its magnitude, BatchNorm without its mean, no
flushing, a stage's float32 bound accepted without its slack, earlier float32 bounds handed to branch and bound as they
are, overflow ignored.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, linf_box, margin_spec
from gls_lirpa.certification import STAGES, StageOptions, certify
from gls_lirpa.certification.network import Network
from gls_lirpa.certification.rounding import rounding
from gls_lirpa.certification.stage import Findings, OpenSamples, Subject
from gls_lirpa.doctor.operator_cases import CASES, Function, random_network
from gls_lirpa.doctor.selftest import lowest_points
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import EngineError, UnsupportedLayerError
from gls_lirpa.models import build_model
from gls_lirpa.relaxations import RELAXATIONS

FAST = StageOptions(attack_steps=5, attack_restarts=1, iterations=3)
STAGES_ALL = ("ibp", "hbox", "crown-ibp", "crown", "alpha-crown", "bab", "milp")
Sum = Callable[[np.ndarray], np.float32]
f32 = np.float32


# -- float32 by hand -----------------------------------------------------------------------------------------


def in_turn(terms: np.ndarray) -> np.float32:
    total = f32(0)
    for term in terms:
        total = f32(total + f32(term))
    return total


def pairwise(terms: np.ndarray) -> np.float32:
    if len(terms) <= 2:
        return in_turn(terms)
    return f32(pairwise(terms[: len(terms) // 2]) + pairwise(terms[len(terms) // 2 :]))


def blocked(terms: np.ndarray) -> np.float32:
    return in_turn(np.array([in_turn(terms[i::4]) for i in range(4)]))


def fused(terms: np.ndarray) -> np.float32:
    """Terms are float64 products of float32 numbers, exact; each is added before it is rounded."""
    total = f32(0)
    for term in terms:
        total = f32(np.float64(total) + term)
    return total


def flushing(terms: np.ndarray) -> np.float32:
    tiny = np.finfo(f32).tiny
    total = f32(0)
    for term in terms:
        term = f32(term)
        total = f32(total + (f32(0) if abs(term) < tiny else term))
        total = f32(0) if abs(total) < tiny else total
    return total


def orders(seed: int) -> list[Sum]:
    generator = np.random.default_rng(seed)
    return [
        in_turn,
        lambda terms: in_turn(terms[::-1]),
        lambda terms: in_turn(generator.permutation(terms)),
        lambda terms: in_turn(terms[np.argsort(-np.abs(terms))]),
        lambda terms: in_turn(terms[np.argsort(terms)]),
        pairwise,
        blocked,
        fused,
        lambda terms: fused(terms[::-1]),
        flushing,
    ]


def run(model: nn.Sequential, x: np.ndarray, add: Sum) -> np.ndarray:
    """A network of Linear and ReLU layers, with every sum taken by ``add``; the bias is one of its terms."""
    values = x.astype(f32)
    for layer in model:
        if isinstance(layer, nn.Linear):
            weight, bias = (p.detach().numpy().astype(np.float64) for p in (layer.weight, layer.bias))
            with np.errstate(all="ignore"):
                terms = np.concatenate([weight * values.astype(np.float64), bias[:, None]], 1)
                values = np.array([add(row) for row in terms], dtype=f32)
        elif isinstance(layer, nn.ReLU):
            values = np.maximum(values, f32(0))
    return values


def exactly(model: nn.Sequential, x: np.ndarray) -> list[Fraction]:
    values = [Fraction(float(v)) for v in x]
    for layer in model:
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.tolist(), layer.bias.tolist()
            rows = [[Fraction(w) for w in row] for row in weight]
            values = [
                sum((w * v for w, v in zip(row, values, strict=True)), Fraction(b))
                for row, b in zip(rows, bias, strict=True)
            ]
        elif isinstance(layer, nn.ReLU):
            values = [max(v, Fraction(0)) for v in values]
    return values


def mlp(
    seed: int, *, scale: float = 1.0, cancel: float = 0.0, bias: float = 0.1, sizes: tuple = (6, 8, 8, 3)
) -> nn.Sequential:
    """``cancel``: pairs of weights ±cancel on equal units, which drop out exactly."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0, scale / layer.in_features**0.5, generator=generator)
                layer.bias.normal_(0, bias, generator=generator)
        if cancel:
            linears = [layer for layer in model if isinstance(layer, nn.Linear)]
            for first, second in itertools.pairwise(linears):
                first.weight[1] = first.weight[0] = first.weight[0].abs()
                first.bias[1] = first.bias[0] = first.bias[0].abs()
                second.weight[:, 0] += cancel
                second.weight[:, 1] = -second.weight[:, 0] + second.weight[:, 2]
    return model


def points(box: Box, number: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(number, *box.lower.shape[1:], generator=generator)
    share = torch.where(torch.rand(share.shape, generator=generator) < 0.5, share.round(), share)
    return torch.minimum(torch.maximum(box.lower + share * (box.upper - box.lower), box.lower), box.upper)


KINDS = {
    "plain": {},
    **{f"cancelling {c:g}": {"cancel": c} for c in (1e3, 1e5, 1e8, 1e10)},
    "huge biases": {"bias": 1e6},
    "tiny": {"scale": 1e-13, "bias": 1e-39},
    "subnormal": {"scale": 1e-20, "bias": 1e-42},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_order_of_summation_exceeds_the_bound(kind: str) -> None:
    for seed in range(4):
        model = mlp(seed, **KINDS[kind])
        box = linf_box(torch.rand(1, 6, generator=torch.Generator().manual_seed(seed)), 0.1)
        label = torch.tensor([seed % 3])
        bound = rounding(model, box, label, classes=3).forward[0]
        assert bool(torch.isfinite(bound).all())
        others = [j for j in range(3) if j != int(label)]
        for x in points(box, 4, seed).numpy():
            true = exactly(model, x)
            for add in orders(seed):
                logits = [Fraction(float(v)) for v in run(model, x, add)]
                for j, limit in zip(others, bound.tolist(), strict=True):
                    error = (logits[int(label)] - logits[j]) - (true[int(label)] - true[j])
                    assert abs(error) <= Fraction(limit)


def equal_terms(*, bias: float = 0.0, after: float | None = None) -> nn.Sequential:
    """Two thousand equal terms, which added in turn lose much, and a second layer that has little to round."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2000, 2))
    with torch.no_grad():
        model[1].weight.fill_(0.1)
        model[1].weight[1] = 0.0
        model[1].bias.copy_(torch.tensor([bias, 0.0]))
        if after is not None:
            model.append(nn.ReLU()).append(nn.Linear(2, 2))
            model[3].weight.copy_(torch.tensor([[after, 0.0], [0.0, 0.0]]))
            model[3].bias.zero_()
    return model


@pytest.mark.parametrize(
    ("model", "signs"),
    [
        (equal_terms(), (1, 1)),
        (equal_terms(), (-1, 1)),  # a box around zero
        (equal_terms(after=1000.0), (1, 1)),
        (equal_terms(bias=1e6), (1, 1)),
    ],
    ids=["equal", "around zero", "carried on", "large bias"],
)
def test_the_bound_is_reached_within_a_factor(model: nn.Sequential, signs: tuple[int, int]) -> None:
    """What is lost by adding in turn is below the bound, and not so far that it would be of no use."""
    x = torch.full((1, 2000), 0.1)
    bound = float(rounding(model, Box(signs[0] * x, signs[1] * x), torch.tensor([0]), classes=2).forward[0, 0])
    true = exactly(model, x[0].numpy())[0]
    lost = max(abs(float(Fraction(float(run(model, x[0].numpy(), add)[0])) - true)) for add in orders(0))
    assert lost <= bound <= 60 * lost


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "convolutions": lambda: [
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, dilation=1),
    ],
    "batchnorm": lambda: [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)],
    "pooling": lambda: [nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)],
    "activations": lambda: [nn.Conv2d(2, 4, 3), nn.LeakyReLU(0.1), nn.Sigmoid(), nn.Tanh(), nn.ReLU(inplace=True)],
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(128, 3)
        self.register_buffer("mean", torch.tensor([0.3, 0.7]).view(1, 2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / 0.3
        x = torch.relu(self.conv(x)) - 0.7 * x + x
        return self.out(x.reshape(len(x), -1))


def _network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "residual":
        return Residual().eval()
    if name == "cnn3":
        return build_model("cnn3", in_shape=(2, 8, 8), mean=(0.3, 0.4), std=(0.2, 0.1)).eval()
    body = nn.Sequential(*LAYERS[name](), nn.Flatten())
    for layer in body:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, 500.0, 50.0)
            nn.init.uniform_(layer.running_var, 1e-4, 2.0)
            nn.init.normal_(layer.weight)
            with torch.no_grad():  # mean and bias cancel
                layer.bias.copy_(layer.weight * layer.running_mean / torch.sqrt(layer.running_var + layer.eps))
    return nn.Sequential(*body, nn.Linear(body.eval()(torch.zeros(1, 2, 8, 8)).shape[1], 3)).eval()


@pytest.mark.parametrize("name", [*LAYERS, "residual", "cnn3"])
def test_layers_against_float64(name: str) -> None:
    """torch's own float32, its inputs in two memory layouts, and with weights in float64 throughout."""
    model = _network(name)
    exact = copy.deepcopy(model).double()
    x = torch.rand(1, 2, 8, 8)
    box = linf_box(x, 0.05)
    classes = model(x).shape[1]
    bound = rounding(model, box, torch.tensor([0]), classes=classes)
    assert bool(torch.isfinite(bound.forward).all()) and not bound.reason
    seen = 0.0
    with torch.no_grad():
        inside = points(box, 64, 0)
        true = exact(inside.double())
        for logits in (model(inside), model(inside.to(memory_format=torch.channels_last)), model(inside[:1])):
            margins = logits.double()[:, :1] - logits.double()[:, 1:]
            error = (margins - (true[:, :1] - true[:, 1:])[: len(logits)]).abs().amax(0)
            assert bool((error <= bound.forward[0]).all())
            seen = max(seen, float((error / bound.forward[0]).max()))
    assert seen > 1e-6  # the bound says something
    assert bool((bound.forward <= bound.bound).all())


def test_trained_like_networks_lose_little() -> None:
    """Rounding of an ordinary network is far below its margins."""
    model = build_model("cnn3", in_shape=(1, 28, 28), mean=(0.13,), std=(0.31,)).eval()
    x = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        size = float(model(x).abs().max())
    bound = rounding(model, linf_box(x, 0.1), torch.zeros(4).long(), classes=10)
    assert float(bound.forward.max()) < 1e-3 * max(1.0, size) and float(bound.bound.max()) < 0.1 * max(1.0, size)


def test_unknown_operations_have_no_bound() -> None:
    class Odd(nn.Module):
        def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
            super().__init__()
            self.layer, self.function = nn.Linear(3, 2), function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.layer, x)

    x = torch.rand(1, 3)
    for function, reason in (
        (lambda layer, x: torch.exp(layer(x)), "exp"),
        (lambda layer, x: layer(x) * layer(x), "depend on the input"),
        (lambda layer, x: nn.functional.linear(x, layer.weight / layer.weight.norm()), "computed in the forward pass"),
        (lambda layer, x: layer(x) * layer.weight.norm(), "computed in the forward pass"),
        (lambda layer, x: torch.zeros(1, 2), "does not depend"),
        (lambda layer, x: (z := layer(x)).view(-1).relu_().view(1, 2) + z, "share"),
    ):
        found = rounding(Odd(function), Box(x, x), torch.tensor([0]), classes=2)
        assert reason in found.reason and bool(torch.isinf(found.forward).all())


def test_overflow_has_no_bound() -> None:
    model = mlp(0)
    with torch.no_grad():
        model[1].weight.fill_(1e30)
        model[3].weight.fill_(1e10)
    x = torch.rand(1, 6)
    assert bool(torch.isinf(rounding(model, Box(x, x), torch.tensor([0]), classes=3).forward).all())


# -- verdicts --------------------------------------------------------------------------------------------------


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


# -- stages that fail ----------------------------------------------------------------------------------------


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


# -- every operation that is bounded ---------------------------------------------------------------------------

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

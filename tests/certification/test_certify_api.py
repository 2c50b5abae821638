"""``certify`` as a function: radii per sample, domains, flat inputs, what can be done with its result; radii."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gls_lirpa import Certification, GLSError, certified_radius, certify
from gls_lirpa.certification.regions import ball
from gls_lirpa.certification.stage import StageOptions

FAST = StageOptions(attack_steps=10, attack_restarts=2)
CHEAP = ("ibp", "pgd", "crown")


def small_net(inputs: int = 4, *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(False)


def images(number: int) -> Tensor:
    return torch.rand(number, 1, 2, 2)


def plane() -> nn.Module:
    """f_0 − f_1 = 2(x_0 + x_1 + 1): the ℓ∞ distance of a point to the border is |x_0 + x_1 + 1| / 2."""
    model = nn.Linear(2, 2)
    model.load_state_dict({"weight": torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), "bias": torch.tensor([1.0, -1.0])})
    return model.requires_grad_(False)


def test_result_is_the_list_of_records_with_accuracies() -> None:
    model, x = small_net(), images(6)
    labels = model(x).argmax(1)
    labels[0] = (labels[0] + 1) % 3
    result = certify(model, x, labels, eps=0.02, stages=CHEAP, options=FAST)
    assert isinstance(result, list) and len(result) == 6
    assert [record.index for record in result] == list(range(6))
    assert result[0].verdict == "misclassified" and result[-1].index == 5
    assert result.natural == pytest.approx(5 / 6)
    assert result.certified == sum(r.verdict == "verified" for r in result) / 6
    assert result.natural >= result.adversarial >= result.certified
    assert result.verdicts("misclassified").tolist() == [True] + [False] * 5
    with pytest.raises(GLSError, match="unknown verdict 'proven': expected one of verified"):
        result.verdicts("proven")


def test_one_radius_per_sample_equals_each_sample_alone() -> None:
    model, x = small_net(), images(8)
    labels = model(x).argmax(1)
    radii = torch.linspace(0.0, 0.7, 8)
    together = certify(model, x, labels, eps=radii, stages=CHEAP, options=FAST, batch_size=3)
    assert len({record.verdict for record in together}) > 1
    for i, record in enumerate(together):
        alone = certify(model, x[i : i + 1], labels[i : i + 1], eps=float(radii[i]), stages=CHEAP, options=FAST)[0]
        assert (record.verdict, record.stage) == (alone.verdict, alone.stage)
        if record.bound is not None and alone.bound is not None:
            assert record.bound == pytest.approx(alone.bound, abs=1e-5)
        if record.adversarial is not None:
            assert float((record.adversarial - x[i]).abs().max()) <= float(radii[i]) + 1e-7
    same = certify(model, x, labels, eps=torch.tensor(0.05), stages=CHEAP, options=FAST)
    assert [r.verdict for r in same] == [
        r.verdict for r in certify(model, x, labels, eps=0.05, stages=CHEAP, options=FAST)
    ]


@pytest.mark.parametrize("domain", [None, (-20.0, 20.0), (torch.full((4,), -30.0), torch.tensor([9.0, 30, 30, 30]))])
def test_flat_inputs_in_any_domain(domain: tuple[float, float] | None) -> None:
    model = small_net(seed=3)
    generator = torch.Generator().manual_seed(5)
    x = 8 * torch.randn(40, 4, generator=generator).clamp(-1, 1)
    labels = model(x).argmax(1)
    result = certify(model, x, labels, eps=1.5, domain=domain, stages=CHEAP, options=FAST)
    box = ball(x, 1.5, domain)
    points = box.lower + (box.upper - box.lower) * torch.rand(500, 40, 4, generator=generator)
    safe = (model(points.flatten(0, 1)).argmax(1).unflatten(0, (500, 40)) == labels).all(0)
    verified, falsified = result.verdicts("verified"), result.verdicts("falsified")
    assert verified.any() and falsified.any()
    assert bool(safe[verified].all())
    for record in result:
        if record.adversarial is not None:
            assert bool((record.adversarial >= box.lower[record.index]).all())
            assert bool((record.adversarial <= box.upper[record.index]).all())
            assert int(model(record.adversarial[None]).argmax(1)) != record.label


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": torch.tensor([0.1, 0.1, 0.1])}, r"expected one eps per sample, \(2,\), got a tensor of shape \(3,\)"),
        ({"eps": torch.tensor([0.1, -0.1])}, "expected every eps finite and >= 0 and <= 1, got -0.1"),
        ({"eps": torch.tensor([0.1, torch.nan])}, "got nan"),
        ({"eps": float("inf"), "domain": None}, "expected a finite eps >= 0, got inf"),
        ({"eps": 2.0}, r"eps must be a number in \[0, 1\]"),
        ({"eps": 0.1, "domain": (0.0, 0.01)}, r"expected inputs in the domain \[0, 0.01\], .* in sample 0"),
        ({"eps": 0.1, "domain": (1.0, 0.5)}, r"expected domain=\(low, high\) with low <= high"),
        ({"eps": 0.1, "domain": (0.0, 0.5, 1.0)}, "expected domain=.* got 3 values"),
        ({"eps": 0.1, "domain": (torch.zeros(3), 1.0)}, r"expected domain limits that fit inputs \(1, 2, 2\)"),
    ],
)
def test_wrong_radii_and_domains_are_refused_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(GLSError, match=message) as caught:
        certify(small_net(), images(2), torch.tensor([0, 1]), stages=["ibp"], **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_saving_loading_and_tables(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, x = small_net(), images(5)
    result = certify(model, x, model(x).argmax(1), eps=torch.full((5,), 0.3), stages=CHEAP, options=FAST)
    folder = result.save(tmp_path / "kept")
    names = {file.name for file in folder.iterdir()}
    assert names == {"settings.json", "records.jsonl", "records.csv", "summary.json", "summary.csv", "counterexamples"}
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["eps"] == pytest.approx([0.3] * 5) and settings["stages"] == list(CHEAP)
    again = Certification.load(folder)
    assert [(r.index, r.verdict, r.bound) for r in again] == [(r.index, r.verdict, r.bound) for r in result]
    assert again.certified == result.certified
    with pytest.raises(GLSError, match="holds records already"):
        result.save(folder)
    with pytest.raises(GLSError, match=r"it has no settings.json"):
        Certification.load(tmp_path)
    pandas = pytest.importorskip("pandas")
    frame = result.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and list(frame["verdict"]) == [r.verdict for r in result]
    assert frame["bound"].tolist() == [r.bound for r in result]


def test_progress_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    model, x = small_net(), images(3)
    certify(model, x, model(x).argmax(1), eps=0.01, stages=["ibp"], progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "3/3" in err
    certify(model, x, model(x).argmax(1), eps=0.01, stages=["ibp"])
    assert capfd.readouterr() == ("", "")


def test_radius_of_a_plane_is_its_distance() -> None:
    x = torch.tensor([[0.2, 0.3], [3.0, -1.0], [-4.0, 1.0], [5.0, 9.0]])
    labels = torch.tensor([0, 0, 0, 0])  # the third is misclassified
    radii = certified_radius(plane(), x, labels, largest=4.0, tolerance=1e-3, domain=None, options=FAST)
    distance = (x.sum(1) + 1).abs().double() / 2
    for i in (0, 1):
        assert 0 <= distance[i] - radii.verified[i] <= 1.1e-3
        assert -1e-6 <= radii.attacked[i] - distance[i] <= 1.1e-3
    assert radii.verified[2] == radii.attacked[2] == 0
    assert radii.verified[3] == 4.0 and radii.attacked[3] == torch.inf  # farther than the largest asked


def test_radii_are_sound_and_ordered() -> None:
    model, x = small_net(seed=1), images(12)
    labels = model(x).argmax(1)
    radii = certified_radius(model, x, labels, tolerance=0.01, options=FAST)
    assert bool((radii.verified < radii.attacked).all()) and bool((radii.verified > 0).all())
    generator = torch.Generator().manual_seed(0)
    box = ball(x, radii.verified.float())
    points = box.lower + (box.upper - box.lower) * torch.rand(1000, *x.shape, generator=generator)
    assert bool((model(points.flatten(0, 1)).argmax(1).unflatten(0, (1000, 12)) == labels).all())
    again = certify(model, x, labels, eps=radii.verified.float(), options=FAST, stages=(*CHEAP, "alpha-crown"))
    assert again.certified == 1.0
    found = radii.attacked.isfinite()
    beyond = certify(model, x[found], labels[found], eps=radii.attacked[found].float() + 1e-6, options=FAST)
    assert all(record.verdict != "verified" for record in beyond)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"largest": 2.0}, "expected largest > 0 and <= 1"),
        ({"largest": 0.0, "domain": None}, "expected largest > 0, got 0"),
        ({"tolerance": 0.0}, "expected tolerance > 0"),
    ],
)
def test_radius_refuses_in_one_line(options: dict[str, float], message: str) -> None:
    with pytest.raises(GLSError, match=message):
        certified_radius(small_net(), images(1), torch.tensor([0]), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("domain", [None, (-2.0, 2.0)])
def test_a_ball_holds_every_number_within_its_radius(domain: tuple[float, float] | None) -> None:
    """0.7 in float32 is less than 0.7, and x − 0.7 has digits enough to show it where they cancel."""
    x = torch.tensor([[0.7]]).nextafter(torch.ones(()))
    for eps in (0.7, torch.tensor([0.7], dtype=torch.float64)):
        inside = torch.tensor(float(x) - 0.7, dtype=torch.float64).float()
        inside = inside if float(inside) >= float(x) - 0.7 else inside.nextafter(torch.ones(()))
        assert float(ball(x, eps, domain).lower) <= float(inside)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_labels_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(GLSError, match="expected one integer label per sample"):
        certify(small_net(), images(2), torch.tensor([0, 1]).to(dtype), eps=0.1, stages=CHEAP)


def test_a_weight_that_is_not_finite_is_told_even_where_no_logit_shows_it() -> None:
    model, x = small_net(), images(2)
    model[1].weight[0] = -torch.inf
    result = certify(model, x, model(x).argmax(1), eps=0.1, stages=CHEAP)
    assert {(r.verdict, r.reason) for r in result} == {("unknown", "numerical")}
    assert "not finite" in result[0].detail


def test_networks_that_cannot_be_copied_or_run_in_float64_are_refused_in_one_line() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x.half().float())
            return y

    x, y = torch.rand(2, 4), torch.tensor([0, 1])
    with pytest.raises(GLSError, match="cannot be computed in float64") as caught:
        certify(Cast(), x, y, eps=0.1, stages=CHEAP)
    assert "\n" not in str(caught.value)
    derived = nn.Linear(4, 3)
    derived.cached = derived.weight * 2  # type: ignore[assignment]
    with pytest.raises(GLSError, match="cannot be copied"):
        certify(derived, x, y, eps=0.1, stages=CHEAP)


def test_arrays_are_refused_with_what_to_do() -> None:
    with pytest.raises(GLSError, match="expected inputs as a tensor, got ndarray"):
        certify(nn.Linear(4, 2), np.zeros((1, 4), np.float32), torch.tensor([0]), eps=0.1)  # type: ignore[arg-type]

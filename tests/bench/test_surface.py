"""The surface that PGPE sees, against the loss itself and against the size of its sampling noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gls_lirpa.analysis import Surface, loss_landscape, sampled_surface
from gls_lirpa.errors import ConfigError
from tests.helpers.baseline_reference import batch_of, mlp

EPS, POINTS = 0.1, 11


def test_without_noise_it_is_the_loss_along_the_line() -> None:
    model, (x, y) = mlp(4, 6, 5, 3), batch_of(4, 3)
    before = [p.detach().clone() for p in model.parameters()]
    found = sampled_surface(model, x, y, eps=EPS, sigma=0.0, populations=(2, 8), points=POINTS, lr=0.1)
    exact = loss_landscape(
        model, x, y, eps=EPS, relaxations=("crown",), sigmas=(0.0,), steps=(POINTS - 1) // 2, lr=0.1
    ).curve("crown", 0.0)
    for curve in found.values.values():
        assert np.allclose(curve, exact.losses, atol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert Surface.from_dict(found.to_dict()) == found


def test_noise_falls_with_the_population() -> None:
    """Standard errors fall like 1/√n: from 4 to 64 members by 4, here over 11 independent points."""
    model, (x, y) = mlp(4, 6, 5, 3), batch_of(4, 3)
    sizes = (4, 64, 160)
    rough = sampled_surface(model, x, y, eps=EPS, sigma=0.3, populations=sizes, points=POINTS).roughness
    assert rough[160] == 0.0
    assert 2.0 < rough[4] / rough[64] < 8.0


def test_impossible_populations() -> None:
    model, (x, y) = mlp(4, 3), batch_of(4, 3)
    with pytest.raises(ConfigError, match="even populations"):
        sampled_surface(model, x, y, eps=EPS, sigma=0.1, populations=(3,))

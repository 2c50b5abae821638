"""Smoothing around a certified loss that is written with auto_LiRPA's own BoundedModule."""

import argparse

import torch
from torch import Tensor, nn

from gls_lirpa import PGPE, RGS, linf_box
from gls_lirpa.data import batches, load_dataset
from gls_lirpa.engine.compat import load_lirpa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--estimator", choices=["rgs", "pgpe"], default="rgs")
options = parser.parse_args()

EPS = 0.03
lirpa = load_lirpa()  # auto_LiRPA, repaired where its age makes that necessary
digits = load_dataset("digits")
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
bounded = lirpa.bounded_module(model, torch.zeros(64, 1, 8, 8), device="cpu")


def crown_ibp_loss(x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over lower bounds of the margins f_y − f_j, straight from auto_LiRPA."""
    box = linf_box(x, EPS)
    ball = lirpa.perturbation(norm=float("inf"), x_L=box.lower, x_U=box.upper)
    rows = torch.eye(10)[y].unsqueeze(1) - torch.eye(10).unsqueeze(0)  # one row per class; that of y itself is zero
    lower, _ = bounded.compute_bounds(x=(lirpa.bounded_tensor(x, ball),), C=rows, method="CROWN-IBP", bound_upper=False)
    return nn.functional.cross_entropy(-lower, y)


if options.estimator == "rgs":
    criterion = RGS(crown_ibp_loss, model, sigma=1e-3, samples=2)
else:
    criterion = PGPE(crown_ibp_loss, model, sigma=1e-2, population=16)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
step, first, last = 0, 0.0, 0.0
while step < options.steps:
    for x, y, _ in batches(digits.train, batch_size=64, epoch=step, drop_last=True):
        optimizer.zero_grad()
        loss = criterion(x, y)
        loss.backward()
        optimizer.step()
        last = loss.item()
        first = first or last
        step += 1
        if step == options.steps:
            break
print(f"certified loss {first:.3f} -> {last:.3f} in {step} steps")

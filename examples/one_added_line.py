"""Gaussian Loss Smoothing in a plain training loop: one added line."""

import argparse

import torch

from gls_lirpa import RGS, CertifiedLoss, build_model, certify
from gls_lirpa.data import batches, load_dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--samples", type=int, default=200, help="test images to certify")
options = parser.parse_args()

EPS = 0.05
digits = load_dataset("digits")
model = build_model("cnn3", in_shape=digits.in_shape)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

criterion = CertifiedLoss(model, relaxation="crown", eps=EPS)
criterion = RGS(criterion, model, sigma=1e-3, samples=2)  # the one added line

for epoch in range(options.epochs):
    radius = EPS * min(1.0, (epoch + 1) / max(options.epochs // 2, 1))  # ε grows over the first half
    for x, y, _ in batches(digits.train, batch_size=64, epoch=epoch):
        optimizer.zero_grad()
        loss = criterion(x, y, eps=radius)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

x, y = digits.test.batch(range(options.samples))
print(certify(model.eval(), x, y, eps=EPS, timeout=2))

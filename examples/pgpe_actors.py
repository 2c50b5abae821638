"""PGPE trains with a bound that has no gradient, its population spread over Ray actors."""

import argparse

import torch

from gls_lirpa import PGPE, CertifiedLoss, zoo
from gls_lirpa.data import batches, load_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=2, help="0: everything in this process")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--population", type=int, default=32)
    options = parser.parse_args()

    digits = load_dataset("digits")
    model = zoo.load("digits-cnn3-crown-rgs").train()  # PGPE moves slowly: start from a trained network
    criterion = CertifiedLoss(model, relaxation="alpha-crown-step", eps=0.1)  # has no gradient in the weights
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with PGPE(criterion, model, sigma=1e-3, population=options.population, actors=options.actors) as smoothed:
        for step, (x, y, _) in enumerate(batches(digits.train, batch_size=64)):
            if step == options.steps:
                break
            optimizer.zero_grad()
            smoothed(x, y).backward()
            optimizer.step()
            stats = smoothed.stats
            print(f"step {step + 1}: loss {stats['loss']:.4f} ± {stats['spread']:.4f}, σ {stats['sigma']:.2e}")


if __name__ == "__main__":  # actors import this file
    main()

"""Counterexamples from domains: the input at which a bound is attained, and a few steps down from it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gls_lirpa.attacks import input_gradient, project
from gls_lirpa.base.boxes import Box
from gls_lirpa.solver.exchange import exchange_attack


class Descent:
    """Signed gradient descent of the specification rows ``spec`` of one sample inside its box."""

    def __init__(self, model: nn.Module, box: Box, spec: Tensor) -> None:
        self._model = model
        self._box = box
        self._spec = spec
        self._radius = (box.upper - box.lower) / 2

    def of_rows(self, rows: Tensor) -> Descent:
        """The same for some of the margins."""
        return Descent(self._model, self._box, self._spec[rows])

    def inside(self, x: Tensor) -> Tensor:
        return project(x.to(self._box.lower), self._box)

    def margins(self, x: Tensor) -> Tensor:
        """The sample's margins at inputs (n, …): (n, rows)."""
        values: Tensor = self._model(x) @ self._spec.t()
        return values

    def search(self, x: Tensor, rows: Tensor, *, starts: int, steps: int) -> Tensor | None:
        """An input with a negative margin, from the ``starts`` lowest of the candidates ``x``, or None."""
        x = self.inside(x)
        with torch.no_grad():
            margins = self.margins(x)
        found = _violation(x, margins)
        if found is not None:
            return found
        chosen = _of_rows(margins, rows).argsort(stable=True)[:starts]
        x, rows = x[chosen], rows[chosen]
        for step in range(steps):
            _, gradient = input_gradient(self.margins, x, rows, _of_rows)
            rate = 0.5 * (1 - step / steps)
            x = self.inside(x - rate * self._radius * gradient.sign())
            with torch.no_grad():
                found = _violation(x, self.margins(x))
            if found is not None:
                return found
        return None

    def exchange(self, *, population: int, rounds: int, seed: int, deadline: float) -> Tensor | None:
        """An input with a negative margin from many points that exchange windows (``exchange``), or None."""
        generator = torch.Generator().manual_seed(seed)
        return exchange_attack(
            self.margins, self._box, population=population, rounds=rounds, generator=generator, deadline=deadline
        )


def _of_rows(margins: Tensor, rows: Tensor) -> Tensor:
    return margins.gather(1, rows[:, None])[:, 0]


def _violation(x: Tensor, margins: Tensor) -> Tensor | None:
    worst = margins.amin(1)
    lowest = int(worst.argmin())
    return x[lowest].clone() if float(worst[lowest]) < 0 else None

"""Counterexamples from domains: the input at which a bound is attained, and a few steps down from it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gls_lirpa.attacks import ascend, project
from gls_lirpa.base.boxes import Box


class Descent:
    """Signed gradient descent of the specification rows ``spec`` of one sample inside its box."""

    def __init__(self, model: nn.Module, box: Box, spec: Tensor) -> None:
        self._model = model
        self._box = box
        self._spec = spec

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
        """An input with a negative margin, from the ``starts`` lowest of the candidates ``x``, or None.

        ``rows`` (n,): the margin that each of ``x`` is to lower; a negative one of any row counts.
        """
        x = self.inside(x)
        with torch.no_grad():
            margins = self.margins(x)
        found = _violation(x, margins)
        chosen = _of_rows(margins, rows).argsort(stable=True)[:starts]
        if found is not None or not steps or not len(chosen):
            return found

        def watched(points: Tensor) -> Tensor:
            nonlocal margins
            margins = self.margins(points)
            return margins

        def watch(points: Tensor, _: Tensor) -> Tensor:
            nonlocal found
            found = _violation(points, margins.detach())
            return torch.full((len(points),), found is None, device=points.device)

        sizes = [0.5 * (1 - step / steps) for step in range(steps)]
        box = self._box[torch.zeros(len(chosen), dtype=torch.long)]
        last = ascend(watched, x[chosen], rows[chosen], box, sizes=sizes, objective=_lowering, watch=watch)
        if found is None:
            with torch.no_grad():
                found = _violation(last, self.margins(last))
        return found


def _lowering(margins: Tensor, rows: Tensor) -> Tensor:
    return -_of_rows(margins, rows)


def _of_rows(margins: Tensor, rows: Tensor) -> Tensor:
    return margins.gather(1, rows[:, None])[:, 0]


def _violation(x: Tensor, margins: Tensor) -> Tensor | None:
    worst = margins.amin(1)
    lowest = int(worst.argmin())
    return x[lowest].clone() if float(worst[lowest]) < 0 else None

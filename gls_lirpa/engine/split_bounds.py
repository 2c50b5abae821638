"""Lower bounds of many subproblems at once: backward CROWN with slopes α and multipliers β.

A subproblem fixes signs of some unstable neurons. For every row c·[t; v] the pass goes backward
through the layers, replacing v by linear functions of z. With λ the coefficient of a neuron's v:

- not split: v ≥ α z (0 ≤ α ≤ 1) where λ ≥ 0, and v ≤ u (z − l) / (u − l) where λ < 0;
- split s = +1: v = z, and z ≥ 0 adds −β z;   split s = −1: v = 0, and z ≤ 0 adds +β z   (β ≥ 0).

Both β terms are ≤ 0 on the subproblem, so the minimum over the box stays a lower bound for every
admissible α and β. The gradient needs no second graph: if t minimises the final linear function over
the box and z, v are its images under the same linear pieces, then ∂/∂α = max(λ, 0) z and
∂/∂β = −s z.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gls_lirpa.engine.split import SplitForm

ALPHA_RATE = 0.25
BETA_RATE = 0.5
DECAY = 0.95
_MOMENTS = (0.9, 0.999)
_TIGHTENING_BATCH = 512


@dataclass(frozen=True)
class Subproblems:
    """A batch: the row that is bounded, ``signs`` (b, n) in {−1, 0, +1}, α, β, and the best bound known."""

    rows: Tensor
    signs: Tensor
    alpha: Tensor
    beta: Tensor
    bound: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice) -> Subproblems:
        return Subproblems(
            self.rows[index], self.signs[index], self.alpha[index], self.beta[index], self.bound[index]
        )


@dataclass(frozen=True)
class Pass:
    """One evaluation: bounds (b,), the minimising position t, and z, v, λ of every neuron there."""

    value: Tensor
    t: Tensor
    z: Tensor
    v: Tensor
    coefficient: Tensor


class SplitBounds:
    """The backward pass over one split form, in the given precision."""

    def __init__(self, form: SplitForm, *, dtype: torch.dtype = torch.float32) -> None:
        self.form = form
        self.dtype = dtype
        self._weights = [layer.weight.to(dtype) for layer in form.layers]
        self._offsets = [layer.offset.to(dtype) for layer in form.layers]
        self._weight, self._offset = form.weight.to(dtype), form.offset.to(dtype)
        lower, upper = form.lower, form.upper
        self._upper_slope = (upper / (upper - lower)).to(dtype)
        self._intercept = (-lower * upper / (upper - lower)).to(dtype)
        ends = [sum(len(layer) for layer in form.layers[: k + 1]) for k in range(len(form.layers))]
        self._spans = [slice(end - len(layer), end) for end, layer in zip(ends, form.layers, strict=True)]

    def start(self, rows: Tensor) -> Subproblems:
        """Unsplit subproblems with CROWN's slopes: α = 1 where u > −l, else 0."""
        n = len(rows)
        alpha = (self.form.upper > -self.form.lower).to(self.dtype).expand(n, -1).clone()
        return Subproblems(
            rows,
            torch.zeros(n, self.form.neurons, dtype=torch.int8, device=rows.device),
            alpha,
            torch.zeros_like(alpha),
            torch.full((n,), -torch.inf, dtype=torch.float64, device=rows.device),
        )

    def evaluate(self, batch: Subproblems, *, primal: bool = True) -> Pass:
        """The bound for the batch's α and β; ``primal`` False leaves z and v empty, at half the cost."""
        signs = batch.signs.to(self.dtype)
        unsplit = batch.signs == 0
        alpha, beta = batch.alpha.to(self.dtype), batch.beta.to(self.dtype)
        inputs = self.form.inputs
        coefficients = self._weight[batch.rows]
        value = self._offset[batch.rows]
        slopes = torch.empty_like(alpha)
        for number in reversed(range(len(self._spans))):
            span, weight = self._spans[number], self._weights[number]
            lam = coefficients[:, inputs + span.start : inputs + span.stop]
            above = unsplit[:, span] & (lam < 0)
            slope = torch.where(above, self._upper_slope[span], alpha[:, span])
            slope = torch.where(unsplit[:, span], slope, signs[:, span].clamp(min=0))
            slopes[:, span] = slope
            value = value + torch.where(above, lam, 0.0) @ self._intercept[span]
            mu = slope * lam - signs[:, span] * beta[:, span]
            value = value + mu @ self._offsets[number]
            coefficients[:, : inputs + span.start].addmm_(mu, weight)
        head, lam = coefficients[:, :inputs], coefficients[:, inputs:]
        value = value - head.abs().sum(1)
        t = -head.sign()
        if not primal:
            return Pass(value, t, alpha[:, :0], alpha[:, :0], lam)
        z, v = torch.empty_like(alpha), torch.empty_like(alpha)
        shift = torch.where(unsplit & (lam < 0), self._intercept, 0.0)
        known = torch.cat([t, v], 1)
        for number, span in enumerate(self._spans):
            z[:, span] = torch.addmm(self._offsets[number], known[:, : inputs + span.start], self._weights[number].t())
            v[:, span] = slopes[:, span] * z[:, span] + shift[:, span]
            known[:, inputs + span.start : inputs + span.stop] = v[:, span]
        return Pass(value, t, z, v, lam)

    def optimise(
        self,
        batch: Subproblems,
        *,
        iterations: int,
        target: float,
        alpha_rate: float = ALPHA_RATE,
        beta_rate: float = BETA_RATE,
        deadline: float = math.inf,
    ) -> tuple[Subproblems, Pass]:
        """The batch with the best α, β found and the pass at those; its ``bound`` is left to the caller.

        ``iterations`` evaluations of projected Adam, each row on its own; rows above ``target`` are left
        alone. After ``deadline`` (of ``time.monotonic``) the best so far is returned.
        """
        live = torch.arange(len(batch), device=batch.rows.device)
        alpha, beta = batch.alpha.clone(), batch.beta.clone()
        best = torch.full((len(batch),), -torch.inf, dtype=self.dtype, device=batch.rows.device)
        current = batch
        moments = [torch.zeros_like(alpha) for _ in range(4)]
        for step in range(iterations):
            last = step + 1 == iterations or time.monotonic() > deadline
            done = self.evaluate(current, primal=not last)
            better = done.value > best[live]
            kept = live[better]
            best[kept], alpha[kept], beta[kept] = done.value[better], current.alpha[better], current.beta[better]
            open_rows = best[live] <= target
            if last or not open_rows.any():
                break
            current = self._step(current, done, moments, step, alpha_rate, beta_rate)
            if int(open_rows.sum()) * 2 < len(live):
                live, current = live[open_rows], current[open_rows]
                moments = [moment[open_rows] for moment in moments]
        result = replace(batch, alpha=alpha, beta=beta)
        return result, self.evaluate(result)

    def _step(
        self, batch: Subproblems, done: Pass, moments: list[Tensor], step: int, alpha_rate: float, beta_rate: float
    ) -> Subproblems:
        decay = DECAY**step
        alpha_grad = torch.where(batch.signs == 0, done.coefficient.clamp(min=0) * done.z, 0.0)
        beta_grad = -batch.signs.to(self.dtype) * done.z
        alpha = batch.alpha + alpha_rate * decay * _adam(alpha_grad, moments[0], moments[1], step)
        beta = batch.beta + beta_rate * decay * _adam(beta_grad, moments[2], moments[3], step)
        return replace(batch, alpha=alpha.clamp(0.0, 1.0), beta=beta.clamp(min=0.0))


def _adam(gradient: Tensor, first: Tensor, second: Tensor, step: int) -> Tensor:
    """Adam's direction; the moments are updated in place."""
    first.mul_(_MOMENTS[0]).add_(gradient, alpha=1 - _MOMENTS[0])
    second.mul_(_MOMENTS[1]).addcmul_(gradient, gradient, value=1 - _MOMENTS[1])
    mean = first / (1 - _MOMENTS[0] ** (step + 1))
    scale = (second / (1 - _MOMENTS[1] ** (step + 1))).sqrt_()
    return mean / (scale + 1e-8)


def tightened(form: SplitForm, *, iterations: int, deadline: float = math.inf) -> SplitForm:
    """The form with α-optimised bounds of its pre-activations, each neuron's side with its own slopes."""
    for number in range(1, len(form.layers)):
        layer = form.layers[number]
        if not len(layer) or not any(len(before) for before in form.layers[:number]):
            continue
        below = replace(
            form,
            layers=form.layers[:number],
            weight=torch.cat([layer.weight, -layer.weight]),
            offset=torch.cat([layer.offset, -layer.offset]),
        )
        bounds = SplitBounds(below, dtype=torch.float64)
        rows = torch.arange(2 * len(layer), device=layer.index.device)
        values = [
            bounds.optimise(bounds.start(part), iterations=iterations, target=0.0, deadline=deadline)[1].value
            for part in rows.split(_TIGHTENING_BATCH)
        ]
        lower, upper = torch.cat(values).chunk(2)
        form = form.with_layer(number, lower, -upper)
    return form

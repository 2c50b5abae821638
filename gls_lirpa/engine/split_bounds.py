"""Lower bounds of many subproblems at once: backward CROWN with slopes α and multipliers β.

A subproblem fixes signs of some unstable neurons. For every row c·[t; v] the pass goes backward
through the layers, replacing v by linear functions of z. With λ the coefficient of a neuron's v:

- not split: v ≥ α z (0 ≤ α ≤ 1) where λ ≥ 0, and v ≤ u (z − l) / (u − l) where λ < 0;
- split s = +1: v = z, and z ≥ 0 adds −β z;   split s = −1: v = 0, and z ≤ 0 adds +β z   (β ≥ 0).

With a hull (``split_hull``), which gives each neuron another upper bound v ≤ q, the mixture
(1 − γ) u (z − l) / (u − l) + γ q with 0 ≤ γ ≤ 1 takes the triangle's place where λ < 0. With envelopes
(``split_groups``) the first layer's neurons with λ < 0 are bounded in groups instead, with ω = −λ.

The terms of β are ≤ 0 on the subproblem, so the minimum over the box stays a lower bound for every
admissible α, β, γ. The gradient needs no second graph: if t minimises the final linear function over
the box and z, v, q are its images under the same linear pieces, then ∂/∂α = max(λ, 0) z,
∂/∂β = −s z and ∂/∂γ = min(λ, 0) (q − u (z − l) / (u − l)).
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gls_lirpa.engine.ascent import adam
from gls_lirpa.engine.split import SplitForm
from gls_lirpa.engine.split_envelopes import Envelopes, GroupTerms
from gls_lirpa.engine.split_hull import Hull
from gls_lirpa.engine.split_subsets import Bucket

ALPHA_RATE = 0.25
BETA_RATE = 0.5
GAMMA_RATE = 0.25
DECAY = 0.95


@dataclass(frozen=True)
class Subproblems:
    """A batch: the row that is bounded, the ``family`` whose slopes are used, ``signs`` (b, n) in {−1, 0, +1},
    α, β, γ (b, n), and the best bound known."""

    rows: Tensor
    family: Tensor
    signs: Tensor
    alpha: Tensor
    beta: Tensor
    gamma: Tensor
    bound: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice) -> Subproblems:
        return Subproblems(
            self.rows[index],
            self.family[index],
            self.signs[index],
            self.alpha[index],
            self.beta[index],
            self.gamma[index],
            self.bound[index],
        )


@dataclass(frozen=True)
class Pass:
    """One evaluation: bounds (b,), the minimising position t, and z, v, λ of every neuron there.

    ``saving``: how far the hull's upper bound lies below the triangle's (negative where it is worse).
    """

    value: Tensor
    t: Tensor
    z: Tensor
    v: Tensor
    coefficient: Tensor
    saving: Tensor
    terms: GroupTerms | None = None

    def put(self, rows: Tensor, other: Pass, chosen: Tensor) -> None:
        """Overwrite ``rows`` with the ``chosen`` rows of another pass; the groups' terms stay as they are."""
        for name in ("value", "t", "z", "v", "coefficient", "saving"):
            getattr(self, name)[rows] = getattr(other, name)[chosen]


@dataclass(frozen=True)
class _Parts:
    """A batch in the precision of a pass, and the linear pieces the pass chooses."""

    rows: Tensor
    groups: list[tuple[int, Tensor | slice]]
    unsplit: Tensor
    signs: Tensor
    alpha: Tensor
    beta: Tensor
    gamma: Tensor
    slopes: Tensor
    shifts: Tensor
    shares: Tensor

    @classmethod
    def of(cls, batch: Subproblems, dtype: torch.dtype) -> _Parts:
        signs, alpha, beta, gamma = (part.to(dtype) for part in (batch.signs, batch.alpha, batch.beta, batch.gamma))
        chosen = (torch.empty_like(alpha) for _ in range(3))
        return cls(batch.rows, _groups(batch.rows), batch.signs == 0, signs, alpha, beta, gamma, *chosen)


class SplitBounds:
    """The backward pass over one split form, in the given precision."""

    def __init__(
        self,
        form: SplitForm,
        *,
        hull: Hull | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.form = form
        self.dtype = dtype
        self._weights = [layer.weight.to(dtype) for layer in form.layers]
        self._offsets = [layer.offset.to(dtype) for layer in form.layers]
        self._weight, self._offset = form.weight.to(dtype), form.offset.to(dtype)
        self._hull = None if hull is None else [weight.to(dtype) for weight in hull.weights]
        self._hull_offsets = [] if hull is None else [offset.to(dtype) for offset in hull.offsets]
        self._envelopes: Envelopes | None = None
        lower, upper = form.lower, form.upper
        self._upper_slope = (upper / (upper - lower)).to(dtype)
        self._intercept = (-lower * upper / (upper - lower)).to(dtype)
        ends = [sum(len(layer) for layer in form.layers[: k + 1]) for k in range(len(form.layers))]
        self._spans = [slice(end - len(layer), end) for end, layer in zip(ends, form.layers, strict=True)]

    def with_envelopes(self, envelopes: Envelopes | None) -> SplitBounds:
        """The same pass with these envelopes in place of its own."""
        other = copy.copy(self)
        other._envelopes = None if envelopes is None else envelopes.to(self.dtype)
        return other

    def start(self, rows: Tensor) -> Subproblems:
        """Unsplit subproblems with CROWN's slopes: α = 1 where u > −l, else 0; γ = 1 with a hull.

        Every row is the family of its own number.
        """
        n = len(rows)
        alpha = (self.form.upper > -self.form.lower).to(self.dtype).expand(n, -1).clone()
        return Subproblems(
            rows,
            rows,
            torch.zeros(n, self.form.neurons, dtype=torch.int8, device=rows.device),
            alpha,
            torch.zeros_like(alpha),
            torch.full_like(alpha, 0.0 if self._hull is None else 1.0),
            torch.full((n,), -torch.inf, dtype=torch.float64, device=rows.device),
        )

    def evaluate(
        self,
        batch: Subproblems,
        *,
        primal: bool = True,
        buckets: list[Bucket] | None = None,
        like: tuple[GroupTerms, Tensor] | None = None,
    ) -> Pass:
        """The bound for the batch's α, β, γ; ``primal`` False leaves z and v empty, at half the cost.

        ``buckets`` of an earlier pass over the batch save making them. ``like`` gives the groups' terms of other
        subproblems and which of those each of the batch resembles: where their weights agree up to rounding
        they are taken over, which is not exact and serves to compare.
        """
        parts = _Parts.of(batch, self.dtype)
        inputs = self.form.inputs
        coefficients = self._weight[batch.rows]
        value = self._offset[batch.rows]
        terms = None
        for number in reversed(range(len(self._spans))):
            if number == 0 and self._envelopes is not None:
                lam = coefficients[:, inputs : inputs + self._spans[0].stop]
                omega = torch.where(parts.unsplit[:, self._spans[0]], -lam, 0.0).clamp(min=0)
                terms = self._envelopes.terms(omega, batch.family, buckets=buckets, like=like)
            value = self._fold(number, parts, coefficients, value, terms)
        head, lam = coefficients[:, :inputs], coefficients[:, inputs:]
        value = value - head.abs().sum(1)
        t = -head.sign()
        if not primal:
            empty = parts.alpha[:, :0]
            return Pass(value, t, empty, empty, lam, empty, terms)
        z, saving = torch.empty_like(lam), torch.zeros_like(lam)
        known = torch.cat([t, z], 1)
        for number, span in enumerate(self._spans):
            before = inputs + span.start
            z[:, span] = torch.addmm(self._offsets[number], known[:, :before], self._weights[number].t())
            v = parts.slopes[:, span] * z[:, span] + parts.shifts[:, span]
            if number == 0 and self._envelopes is not None and terms is not None:
                self._envelopes.put_values(v, t, terms)
            elif self._hull is not None:
                q = self._hull_offsets[number][batch.rows]
                for row, members in parts.groups:
                    q[members] += known[members, :before] @ self._hull[number][row].t()
                v += parts.shares[:, span] * q
                saving[:, span] = self._upper_slope[span] * z[:, span] + self._intercept[span] - q
            known[:, before : inputs + span.stop] = v
        return Pass(value, t, z, known[:, inputs:], lam, saving, terms)

    def _fold(
        self, number: int, parts: _Parts, coefficients: Tensor, value: Tensor, terms: GroupTerms | None = None
    ) -> Tensor:
        """Replace a layer's v by linear functions of what comes before, in ``coefficients``; the new constants.

        ``terms``: those of its groups, for the first layer.
        """
        span = self._spans[number]
        before, end = self.form.inputs + span.start, self.form.inputs + span.stop
        lam, unsplit = coefficients[:, before:end], parts.unsplit[:, span]
        above = unsplit & (lam < 0)
        hulled = self._hull is not None and terms is None
        share = torch.where(above, parts.gamma[:, span], 0.0) if hulled else torch.zeros_like(lam)
        rest = torch.where(above, 1 - share, 0.0)
        slope = torch.where(above, rest * self._upper_slope[span], parts.alpha[:, span])
        slope = torch.where(unsplit, slope, parts.signs[:, span].clamp(min=0))
        shift = rest * self._intercept[span]
        if terms is not None and self._envelopes is not None:
            bounded = terms.omega > 0
            slope, shift = slope.masked_fill(bounded, 0.0), shift.masked_fill(bounded, 0.0)
            value = value - terms.level.sum(1)
            self._envelopes.subtract_slopes(coefficients[:, :before], terms)
        parts.slopes[:, span], parts.shifts[:, span], parts.shares[:, span] = slope, shift, share
        through = slope * lam - parts.signs[:, span] * parts.beta[:, span]
        value = value + (shift * lam).sum(1) + through @ self._offsets[number]
        if self._hull is not None and hulled:
            part = share * lam
            value = value + (part * self._hull_offsets[number][parts.rows]).sum(1)
            for row, members in parts.groups:
                coefficients[members, :before] += part[members] @ self._hull[number][row]
        coefficients[:, :before].addmm_(through, self._weights[number])
        return value

    def over_first_layer(self, batch: Subproblems) -> tuple[Tensor, Tensor]:
        """The batch as linear functions of [t; v₁]: weights (b, inputs + first layer) and constants.

        Neurons of the first layer that are split have become linear functions of t, with their β.
        """
        parts = _Parts.of(batch, self.dtype)
        coefficients, value = self._weight[batch.rows], self._offset[batch.rows]
        for number in reversed(range(1, len(self._spans))):
            value = self._fold(number, parts, coefficients, value)
        inputs, span = self.form.inputs, self._spans[0]
        lam, signs = coefficients[:, inputs : inputs + span.stop], parts.signs[:, span]
        through = signs.clamp(min=0) * lam - signs * parts.beta[:, span]
        head = torch.addmm(coefficients[:, :inputs], through, self._weights[0])
        return torch.cat([head, lam * parts.unsplit[:, span]], 1), value + through @ self._offsets[0]

    def optimise(
        self,
        batch: Subproblems,
        *,
        iterations: int,
        target: float,
        deadline: float = math.inf,
    ) -> tuple[Subproblems, Pass]:
        """The batch with the best α, β found and the pass at those; its ``bound`` is left to the caller.

        ``iterations`` evaluations of projected Adam, each row on its own; rows above ``target`` are left
        alone. After ``deadline`` (of ``time.monotonic``) the best so far is returned.
        """
        live = torch.arange(len(batch), device=batch.rows.device)
        alpha, beta, gamma = (part.clone() for part in (batch.alpha, batch.beta, batch.gamma))
        current = batch
        moments = [torch.zeros_like(part) for part in (alpha, beta, gamma) for _ in range(2)]
        done = self.evaluate(current)
        best = replace(done, terms=None)
        for step in range(1, iterations):
            open_rows = best.value[live] <= target
            if time.monotonic() > deadline or not open_rows.any():
                break
            current = self._step(current, done, moments, step - 1)
            buckets = None if done.terms is None else done.terms.buckets
            if int(open_rows.sum()) * 2 < len(live):
                live, current, buckets = live[open_rows], current[open_rows], None
                moments = [moment[open_rows] for moment in moments]
            done = self.evaluate(current, buckets=buckets)
            better = done.value > best.value[live]
            kept = live[better]
            best.put(kept, done, better)
            alpha[kept], beta[kept], gamma[kept] = (
                part[better] for part in (current.alpha, current.beta, current.gamma)
            )
        return replace(batch, alpha=alpha, beta=beta, gamma=gamma), best

    def _step(self, batch: Subproblems, done: Pass, moments: list[Tensor], step: int) -> Subproblems:
        decay = DECAY**step
        unsplit = batch.signs == 0
        alpha_grad = torch.where(unsplit, done.coefficient.clamp(min=0) * done.z, 0.0)
        beta_grad = -batch.signs.to(self.dtype) * done.z
        alpha = batch.alpha + ALPHA_RATE * decay * adam(alpha_grad, moments[0], moments[1], step)
        beta = batch.beta + BETA_RATE * decay * adam(beta_grad, moments[2], moments[3], step)
        batch = replace(batch, alpha=alpha.clamp_(0.0, 1.0), beta=beta.clamp_(min=0.0))
        if self._hull is None:
            return batch
        gamma_grad = torch.where(unsplit, -done.coefficient.clamp(max=0) * done.saving, 0.0)
        gamma = batch.gamma + GAMMA_RATE * decay * adam(gamma_grad, moments[4], moments[5], step)
        return replace(batch, gamma=gamma.clamp_(0.0, 1.0))


def _groups(rows: Tensor) -> list[tuple[int, Tensor | slice]]:
    """Which members of a batch belong to which row."""
    found = rows.unique().tolist()
    if len(found) == 1:
        return [(found[0], slice(None))]
    return [(row, (rows == row).nonzero().flatten()) for row in found]

"""Lower bounds of many domains at once: backward CROWN with slopes α and multipliers β over a split form.

For every specification row c·[t; v] the pass goes backward through the layers, replacing v by linear functions of z.
With λ the coefficient of a neuron's v:

- not split: v ≥ α z (0 ≤ α ≤ 1) where λ ≥ 0, and v ≤ u (z − l) / (u − l), the triangle, where λ < 0;
- split s = +1: v = z, and z ≥ 0 adds −β z;   split s = −1: v = 0, and z ≤ 0 adds +β z   (β ≥ 0).

With facets (``facets``), which give each neuron another upper bound v ≤ q, the mixture
(1 − γ) u (z − l) / (u − l) + γ q with 0 ≤ γ ≤ 1 takes the triangle's place where λ < 0. With a multi-neuron relaxation
(``groups``) the first layer's neurons with λ < 0 are bounded together instead, with weights ω = −λ.

The terms of β are ≤ 0 on the domain, so the minimum over the box is a lower bound for every admissible α, β, γ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gls_lirpa.solver.domains import Domains, Pass
from gls_lirpa.solver.envelopes import Envelopes, GroupTerms
from gls_lirpa.solver.facets import Facets
from gls_lirpa.solver.form import SplitForm
from gls_lirpa.solver.subsets import Bucket


@dataclass(frozen=True)
class _Lines:
    """A batch in the precision of a pass, and the functions v = slope · z + shift + share · q that it chooses.

    ``by_row``: which members of the batch belong to which specification row, since facets differ between rows.
    """

    rows: Tensor
    by_row: list[tuple[int, Tensor | slice]]
    unsplit: Tensor
    signs: Tensor
    alpha: Tensor
    beta: Tensor
    gamma: Tensor
    slope: Tensor
    shift: Tensor
    share: Tensor

    @classmethod
    def of(cls, batch: Domains, dtype: torch.dtype) -> _Lines:
        parts = [part.to(dtype) for part in (batch.signs, batch.alpha, batch.beta, batch.gamma)]
        chosen = [torch.empty_like(parts[1]) for _ in range(3)]
        found = batch.rows.unique().tolist()
        whole: list[tuple[int, Tensor | slice]] = [(row, slice(None)) for row in found]
        by_row = whole if len(found) == 1 else [(row, (batch.rows == row).nonzero().flatten()) for row in found]
        return cls(batch.rows, by_row, batch.unsplit, *parts, *chosen)


class SplitBounds:
    """The backward pass over one split form, in the given precision, with ``facets`` besides the triangles."""

    def __init__(self, form: SplitForm, *, facets: Facets | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.form = form
        self.dtype = dtype
        self._weights = [layer.weight.to(dtype) for layer in form.layers]
        self._offsets = [layer.offset.to(dtype) for layer in form.layers]
        self._weight, self._offset = form.weight.to(dtype), form.offset.to(dtype)
        self._upper_slope, self._intercept = form.upper_slope.to(dtype), form.intercept.to(dtype)
        self._facets = None if facets is None else facets.to(dtype)
        self._relaxation: Envelopes | None = None

    def with_relaxation(self, relaxation: Envelopes | None) -> SplitBounds:
        """The same pass with this relaxation in place of its own."""
        other = copy.copy(self)
        other._relaxation = None if relaxation is None else relaxation.to(self.dtype)
        return other

    def evaluate(self, batch: Domains, *, primal: bool = True) -> Pass:
        """Proven bounds for the batch's α, β, γ; ``primal`` False leaves z and v empty, at half the cost."""
        return self.with_terms(batch, primal=primal)[0]

    def evaluator(self) -> Callable[[Domains], Pass]:
        """``evaluate`` for a series of passes over one batch, which share their buckets."""
        buckets: list[Bucket] | None = None

        def evaluate(batch: Domains) -> Pass:
            nonlocal buckets
            done, terms = self.with_terms(batch, buckets=buckets)
            buckets = None if terms is None else terms.buckets
            return done

        return evaluate

    def with_terms(
        self, batch: Domains, *, primal: bool = True, buckets: list[Bucket] | None = None
    ) -> tuple[Pass, GroupTerms | None]:
        """The same, and what the groups add; ``buckets`` of another pass over the batch save making them."""
        lines, inputs, spans = _Lines.of(batch, self.dtype), self.form.inputs, self.form.spans
        coefficients, value = self._weight[batch.rows], self._offset[batch.rows]
        terms = None
        for number in reversed(range(len(spans))):
            if number == 0 and self._relaxation is not None:
                lam = coefficients[:, inputs : inputs + spans[0].stop]
                omega = torch.where(lines.unsplit[:, spans[0]], -lam, 0.0).clamp(min=0)
                terms = self._relaxation.terms(omega, batch.slopes, buckets=buckets)
            value = self._fold(number, lines, coefficients, value, terms)
        head, lam = coefficients[:, :inputs], coefficients[:, inputs:]
        value, t = value - head.abs().sum(1), -head.sign()
        if not primal:
            return Pass(value, t, lam[:, :0], lam[:, :0], lam, lam[:, :0]), terms
        z, saving = torch.empty_like(lam), torch.zeros_like(lam)
        known = torch.cat([t, z], 1)
        for number, span in enumerate(spans):
            before = inputs + span.start
            z[:, span] = torch.addmm(self._offsets[number], known[:, :before], self._weights[number].t())
            v = lines.slope[:, span] * z[:, span] + lines.shift[:, span]
            if number == 0 and self._relaxation is not None and terms is not None:
                self._relaxation.put_values(v, t, terms)
            elif self._facets is not None:
                q = self._facets.offsets[number][batch.rows]
                for row, members in lines.by_row:
                    q[members] += known[members, :before] @ self._facets.weights[number][row].t()
                v += lines.share[:, span] * q
                saving[:, span] = self._upper_slope[span] * z[:, span] + self._intercept[span] - q
            known[:, before : inputs + span.stop] = v
        return Pass(value, t, z, known[:, inputs:], lam, saving), terms

    def _fold(
        self, number: int, lines: _Lines, coefficients: Tensor, value: Tensor, terms: GroupTerms | None = None
    ) -> Tensor:
        """Replace a layer's v by linear functions of what comes before, in ``coefficients``; the new constants.

        ``terms``: those of its groups, for the first layer.
        """
        span = self.form.spans[number]
        before, end = self.form.inputs + span.start, self.form.inputs + span.stop
        lam, unsplit = coefficients[:, before:end], lines.unsplit[:, span]
        above = unsplit & (lam < 0)
        facets = self._facets if terms is None else None
        share = torch.zeros_like(lam) if facets is None else torch.where(above, lines.gamma[:, span], 0.0)
        rest = torch.where(above, 1 - share, 0.0)
        slope = torch.where(above, rest * self._upper_slope[span], lines.alpha[:, span])
        slope = torch.where(unsplit, slope, lines.signs[:, span].clamp(min=0))
        shift = rest * self._intercept[span]
        if terms is not None and self._relaxation is not None:
            bounded = terms.omega > 0
            slope, shift = slope.masked_fill(bounded, 0.0), shift.masked_fill(bounded, 0.0)
            value = value - terms.level.sum(1)
            self._relaxation.subtract_slopes(coefficients[:, :before], terms)
        lines.slope[:, span], lines.shift[:, span], lines.share[:, span] = slope, shift, share
        through = slope * lam - lines.signs[:, span] * lines.beta[:, span]
        value = value + (shift * lam).sum(1) + through @ self._offsets[number]
        if facets is not None:
            part = share * lam
            value = value + (part * facets.offsets[number][lines.rows]).sum(1)
            for row, members in lines.by_row:
                coefficients[members, :before] += part[members] @ facets.weights[number][row]
        coefficients[:, :before].addmm_(through, self._weights[number])
        return value

    def over_first_layer(self, batch: Domains) -> SplitForm:
        """The batch as linear functions of [t; v₁], the rows of a form of the first layer alone.

        Neurons of the first layer that are split have become linear functions of t, with their β.
        """
        lines = _Lines.of(batch, self.dtype)
        coefficients, value = self._weight[batch.rows], self._offset[batch.rows]
        for number in reversed(range(1, len(self.form.spans))):
            value = self._fold(number, lines, coefficients, value)
        inputs, span = self.form.inputs, self.form.spans[0]
        lam, signs = coefficients[:, inputs : inputs + span.stop], lines.signs[:, span]
        through = signs.clamp(min=0) * lam - signs * lines.beta[:, span]
        head = torch.addmm(coefficients[:, :inputs], through, self._weights[0])
        rows, offset = torch.cat([head, lam * lines.unsplit[:, span]], 1), value + through @ self._offsets[0]
        return replace(self.form, layers=self.form.layers[:1], weight=rows, offset=offset)

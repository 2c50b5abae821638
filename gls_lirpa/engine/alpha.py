"""α-CROWN: lower slopes of unstable ReLUs chosen per sample and specification row.

Both forms keep CROWN's intermediate bounds and optimise the slopes used for the specification rows,
and return the better of the result and the CROWN bound; each is sound, so their maximum is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Bounds
from gls_lirpa.engine.compat import load_lirpa


def optimised(bounded: Any, inputs: Any, spec: Tensor, crown: Bounds, *, iterations: int) -> Bounds:
    """auto_LiRPA's own optimisation, ``iterations`` steps of it."""
    lirpa = load_lirpa()
    # auto_LiRPA counts evaluations: k of them contain k − 1 steps. Its early stop looks at the whole
    # batch, so that a bound would depend on the other samples, and prints.
    options = {"iteration": iterations + 1, "early_stop_patience": iterations + 1}
    bounded.set_bound_opts({"optimize_bound_args": options})
    with torch.enable_grad():
        lower = bounded.compute_bounds(
            x=(inputs,),
            C=spec,
            method="CROWN-Optimized",
            bound_upper=False,
            **{lirpa.interm_key: dict(crown.intermediate)},
        )[0]
    return Bounds(torch.maximum(lower.detach(), crown.lower), crown.intermediate)


def one_step(bounded: Any, inputs: Any, spec: Tensor, crown: Bounds) -> Bounds:
    """Every slope starts at 0.5 and takes one sign step of 0.5, so that it ends at 0 or 1.

    A slope whose gradient is zero does not matter and stays at 0.5.
    """
    lirpa = load_lirpa()
    intermediate = {lirpa.interm_key: dict(crown.intermediate)}
    with torch.enable_grad():
        getattr(bounded, lirpa.init_alpha)((inputs,), c=spec, bound_upper=False, **intermediate)
        slopes = [alpha for node in bounded.relus for alpha in node.alpha.values()]
        if not slopes:
            return crown
        for slope in slopes:
            slope.data.fill_(0.5)

        def lower() -> Tensor:
            bound: Tensor = bounded.compute_bounds(
                x=(inputs,), C=spec, method="CROWN", bound_upper=False, reuse_alpha=True, **intermediate
            )[0]
            return bound

        value = lower()
        if value.requires_grad:
            directions = torch.autograd.grad(value.sum(), slopes, allow_unused=True)
            for slope, direction in zip(slopes, directions, strict=True):
                if direction is not None:
                    slope.data.add_(direction.sign(), alpha=0.5).clamp_(0.0, 1.0)
    with torch.no_grad():
        stepped = lower()
    return Bounds(torch.maximum(stepped, crown.lower), crown.intermediate)

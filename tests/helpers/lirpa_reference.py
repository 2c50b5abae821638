"""Bounds of domains computed by auto_LiRPA's own α and β: the reference that the solver's are tested against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gls_lirpa.base.boxes import Box
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.engine.graph import relu_inputs
from gls_lirpa.engine.wrap import bounded_input
from gls_lirpa.relaxations import RELAXATIONS
from gls_lirpa.solver.domains import Domains
from gls_lirpa.solver.form import SplitForm, UnstableLayer


def lirpa_split_bounds(engine: BoundEngine, form: SplitForm, box: Box, spec: Tensor, batch: Domains) -> Tensor:
    """Lower bounds (b,) of the batch for its α and β, by one CROWN call of auto_LiRPA.

    ``form`` must be the untightened form of the rows ``spec`` (rows, classes) over the one-sample ``box``.
    Splits become clamped pre-activation bounds, α the slopes of the final bound, β the multipliers that
    auto_LiRPA keeps on ReLUs (0.3) or on the nodes that feed them (later versions).
    """
    count = len(batch)
    dtype = box.lower.dtype
    crown = engine.bounds(box, spec.unsqueeze(0), RELAXATIONS.get("crown"))
    layers = {layer.name: (layer, span) for layer, span in zip(form.layers, form.spans, strict=True)}
    intermediate: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (lower, upper) in crown.intermediate.items():
        layer, span = layers[name]
        low, high = (side.expand(count, *side.shape[1:]).flatten(1).clone() for side in (lower, upper))
        signs = batch.signs[:, span]
        low[:, layer.index] = torch.where(signs > 0, 0.0, layer.lower.to(dtype))
        high[:, layer.index] = torch.where(signs < 0, 0.0, layer.upper.to(dtype))
        shape = (count, *lower.shape[1:])
        intermediate[name] = (low.reshape(shape), high.reshape(shape))
    lirpa = load_lirpa()
    normalized = engine.normalized_box(Box(*(side.expand(count, *side.shape[1:]) for side in (box.lower, box.upper))))
    rows = spec[batch.rows].unsqueeze(1)
    # A module of its own: multipliers left behind would alter other bounds.
    with engine._module("split", count, {}) as bounded, torch.enable_grad():
        inputs = bounded_input(normalized)
        bounded.set_bound_opts({"optimize_bound_args": {"enable_beta_crown": True, "single_node_split": True}})
        known = {lirpa.interm_key: intermediate}
        getattr(bounded, lirpa.init_alpha)((inputs,), c=rows, bound_upper=False, **known)
        for relu, feeding in relu_inputs(bounded):
            layer, part = layers[feeding.name]
            for slopes in relu.alpha.values():
                slopes.data.flatten(3)[:, :, :, layer.index] = batch.alpha[:, part].to(dtype)
            _set_multipliers(bounded, relu, feeding, layer, batch.beta[:, part], batch.signs[:, part])
        result: Tensor = bounded.compute_bounds(
            x=(inputs,), C=rows, method="CROWN", bound_upper=False, reuse_alpha=True, **known
        )[0]
    return result.detach()[:, 0]


def _set_multipliers(bounded: Any, relu: Any, feeding: Any, layer: UnstableLayer, beta: Tensor, signs: Tensor) -> None:
    places = layer.index.expand(len(beta), -1).contiguous()
    if load_lirpa().split_nodes:
        bounded.reset_beta(feeding, beta.shape, betas=None)
        held = feeding.sparse_betas[0]
        held.val, held.loc, held.sign = beta.float(), places, signs.float()
    else:
        relu.sparse_beta, relu.sparse_beta_loc, relu.sparse_beta_sign = beta.float(), places, signs.float()

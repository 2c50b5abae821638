"""CROWN in auto_LiRPA with every intermediate bound intersected with interval arithmetic.

Plain CROWN may be looser than IBP at a neuron. Here each node's CROWN bounds are cut to the intervals that follow
from the bounds, cut likewise, of the nodes before it; gradients flow through whichever is tighter. The input of a
ReLU that its interval shows to be stable keeps the interval: the ReLU is exact, and tighter bounds would be used for
nothing but the next intervals. That is what the row route computes, so both give the same bounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gls_lirpa.engine.compat import forget


@contextlib.contextmanager
def intersected(bounded: Any) -> Iterator[None]:
    """Meanwhile ``compute_bounds`` of this BoundedModule intersects intermediate bounds."""
    original = bounded.compute_intermediate_bounds

    def compute(node: Any, prior_checked: bool = False) -> None:
        known = getattr(node, "lower", None) is not None
        original(node, prior_checked=prior_checked)
        if known or not node.perturbed or not node.inputs:
            return
        lower, upper = node.lower, node.upper
        forget(node)
        intervals = bounded.IBP_general(node=node, delete_bounds_after_use=True)
        forget(node)
        lower, upper = torch.maximum(lower, intervals[0]), torch.minimum(upper, intervals[1])
        if all(type(bounded[name]).__name__ == "BoundRelu" for name in node.output_name):
            stable = (intervals[0] >= 0) | (intervals[1] <= 0)
            lower, upper = torch.where(stable, intervals[0], lower), torch.where(stable, intervals[1], upper)
        node.lower, node.upper = lower, upper
        node.interval = node.lower, node.upper

    bounded.compute_intermediate_bounds = compute
    try:
        yield
    finally:
        del bounded.compute_intermediate_bounds

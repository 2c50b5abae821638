"""What rounding requires of the samples of a batch, found out as far as it matters.

First for any image at once, then for a sample's own box by intervals, then by CROWN, and last for the parts of its box.
"""

from __future__ import annotations

import time

from torch import Tensor

from gls_lirpa.certification.batch import Batch
from gls_lirpa.certification.narrow import proven_by_parts
from gls_lirpa.certification.network import Network


def refine(network: Network, batch: Batch, part: Tensor) -> None:
    """Replace what is required of some samples by what their own boxes require."""
    if len(part):
        logits = network.logits(batch.x[part])
        batch.required.put(part, network.requirements(batch.box[part], batch.labels[part], logits))
        batch.refined[part] = True


def narrow(network: Network, batch: Batch, part: Tensor) -> None:
    """Let CROWN say how far the values inside the network go, for samples of which intervals require too much."""
    for one in part.unsqueeze(1):
        logits = network.logits(batch.x[one])
        found = network.narrow_requirements(batch.box[one], batch.labels[one], logits)
        batch.narrowed[one] = True
        if found is not None:
            batch.required.put(one, found)
    if len(part):
        batch.proven[part] |= batch.lower[part] > batch.required.single[part]


def prove_parts(network: Network, batch: Batch, part: Tensor, limit: float) -> None:
    """Where few inputs vary, prove the parts of a box that is too wide to know its rounding as a whole.

    Only where the bounds of a whole box are positive: the search that found them has seen that this can be done.
    """
    deadline = time.monotonic() + limit
    for i, one in zip(part.tolist(), part.unsqueeze(1), strict=True):
        if not batch.verified(i) and bool((batch.proven[i] | (batch.lower[i] > 0)).all()):
            batch.proven[i] |= proven_by_parts(network.narrow, batch.box[one], batch.labels[one], deadline=deadline)

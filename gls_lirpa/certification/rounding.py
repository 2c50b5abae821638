"""How much rounding a network and its bounds see, so that a proof holds for the network as it runs.

A bound is a statement about exact arithmetic, computed in floating point, of a network that runs in floating point. It
proves f̂_y > f̂_j for the computed logits if it exceeds

    forward (|f̂ − f| of both logits)  +  bound (its own rounding error)

Covered: any order of summing the products of each sum, with or without fused multiply-add, flushing of subnormal
numbers, BatchNorm merged into its neighbours or not. Not covered: algorithms that do not add up these products
(Winograd and FFT convolutions) and arithmetic in fewer bits than the dtype has (TF32, bfloat16). Assumed: sigmoid and
tanh are right within 4 units in the last place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gls_lirpa.base.boxes import Box, other_classes
from gls_lirpa.certification.magnitudes import Arithmetic, NoRuleError, Spread, Value
from gls_lirpa.certification.rounding_ranges import Ranges
from gls_lirpa.certification.rounding_rules import network_rules

SINGLE_TO_DOUBLE = 2.0**-29
"""Every error here is a sum of products of γₙ(u), convex in u and 0 at 0: for u/2²⁹ it is at most that share."""

BATCH = 64


@dataclass(frozen=True)
class Rounding:
    """Errors of every f_y − f_j, ascending: (batch, classes − 1) in float64; infinite where nothing is known.

    ``forward``: of the network's own logits; ``bound``: of a bound computed in the network's dtype. ``reason``:
    why there are none, or empty.
    """

    forward: Tensor
    bound: Tensor
    reason: str = ""


def covered(dtype: torch.dtype) -> str:
    """What a verdict covers.

    >>> covered(torch.float32)
    'float32, any summation order'
    """
    return f"{str(dtype).removeprefix('torch.')}, any summation order"


def rounding(model: nn.Module, box: Box, labels: Tensor, *, classes: int, known: Ranges | None = None) -> Rounding:
    """The errors of a network in eval mode over boxes of its dtype, one for each label or one for all.

    ``known``: narrower ranges of the ReLUs' inputs than intervals give; see :class:`Ranges`.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x = torch.rand(2, 1, 2, 2)
    >>> found = rounding(model, Box(x, x), torch.tensor([0, 2]), classes=3)
    >>> found.forward.shape, bool((found.forward < 1e-5).all())
    (torch.Size([2, 2]), True)
    """
    try:
        starts = range(0, len(box), BATCH)
        parts = [_outputs(model, box[start : start + BATCH], known and known.part(start, BATCH)) for start in starts]
    except (NoRuleError, RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        # Whatever a forward pass does to a tensor that none of the rules foresees.
        reason = str(error) if isinstance(error, NoRuleError) else " ".join(str(error).split())[:200]
        unknown = torch.full((len(labels), classes - 1), torch.inf, dtype=torch.float64, device=labels.device)
        return Rounding(unknown, unknown, f"no rounding bound for {reason}")
    others = other_classes(labels, classes)

    def margins(errors: list[Tensor]) -> Tensor:
        rows = torch.cat(errors).expand(len(labels), -1)
        total = rows.gather(1, labels.unsqueeze(1)) + rows.gather(1, others)
        return torch.where(torch.isfinite(total), total * (1 + 2.0**-50), torch.inf)

    return Rounding(margins([part.error for part in parts]), margins([part.slack for part in parts]))


@torch.no_grad()
def _outputs(model: nn.Module, box: Box, known: Ranges | None) -> Value:
    lower, upper = box.lower.double(), box.upper.double()
    # Roundings of a bound per layer besides its products: slopes, offsets, and sums over the layers.
    arithmetic = Arithmetic.of(box.lower.dtype, extra=16 + 4 * sum(1 for _ in model.modules()))
    magnitude = torch.maximum(lower.abs(), upper.abs())
    # The last step of a bound is a sum over all inputs.
    slack = arithmetic.gamma(box.lower[0].numel() + arithmetic.extra) * magnitude
    value = Value(lower, upper, torch.zeros_like(lower), magnitude, slack)
    rules = network_rules(model)
    if known is not None:
        rules.update(known.rules())
    output = model(Spread(value, arithmetic, rules, box.lower.dtype))
    if known is not None:
        known.check()
    if not isinstance(output, Spread):
        raise NoRuleError("a network whose output does not depend on its input")
    return output.value

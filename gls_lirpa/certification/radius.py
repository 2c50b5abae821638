"""How large a ball is safe: verified and attacked radii by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gls_lirpa.base.checks import require
from gls_lirpa.certification.cascade import BATCH_SIZE, Cascade
from gls_lirpa.certification.records import Record
from gls_lirpa.certification.regions import PIXELS, Domain, ball, is_pixels
from gls_lirpa.certification.settings import DEFAULT_STAGES, Settings
from gls_lirpa.certification.stage import StageOptions, has_flag
from gls_lirpa.errors import ContradictionError

RADIUS_STAGES = tuple(name for name in DEFAULT_STAGES if not has_flag(name, "complete"))


@dataclass(frozen=True)
class Radii:
    """Per sample, float64 (n,): no counterexample within ``verified``, one at distance ``attacked``.

    Both are 0 for a sample that is misclassified as it is; ``attacked`` is infinite where none was found.
    """

    verified: Tensor
    attacked: Tensor

    def __len__(self) -> int:
        return len(self.verified)


def certified_radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    largest: float = 1.0,
    tolerance: float = 1e-3,
    domain: Domain = PIXELS,
    stages: Sequence[str] = RADIUS_STAGES,
    timeout: float = 60.0,
    seed: int = 0,
    options: StageOptions | None = None,
) -> Radii:
    """The largest ℓ∞ radius found to be safe for each sample, and the smallest found not to be.

    A bisection over [0, ``largest``] down to ``tolerance`` asks the cascade for each radius; a second one lets the
    attack alone look below the smallest counterexample. The verified radius is a proof for every smaller one too;
    it is not the largest possible unless the stages are complete (add ``bab``).

    Args:
        model, x, y, domain, seed, options: as in :func:`gls_lirpa.certify`.
        largest: radius at which the search begins, in the units of ``x``; at most 1 where these are pixels.
        tolerance: difference of radii at which a bisection ends.
        stages: of the cascade at each radius.
        timeout: seconds per sample and radius.

    Raises:
        ConfigError: a radius, tolerance, stage or limit that cannot be used.
        DataError: inputs outside the domain, or labels that do not fit.
        ContradictionError: a counterexample within a verified radius.

    >>> model = nn.Linear(2, 2)
    >>> _ = model.load_state_dict({"weight": torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), "bias": torch.zeros(2)})
    >>> radii = certified_radius(model, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), domain=None)  # truly 0.5
    >>> [round(float(value), 2) for value in (radii.verified[0], radii.attacked[0])]
    [0.5, 0.5]
    """
    limit = " and <= 1 (pixels are scaled to [0, 1])" if is_pixels(domain) else ""
    require(0 < largest < math.inf and (not limit or largest <= 1), f"largest > 0{limit}", largest)
    require(0 < tolerance < math.inf, "tolerance > 0", tolerance)
    chosen = options or StageOptions()
    cascade = Cascade(model, x, Settings(0.0, tuple(stages), timeout, seed, options=chosen))
    attack = Cascade(model, x, Settings(0.0, ("pgd",), timeout, seed, options=chosen))
    verified = torch.zeros(len(x), dtype=torch.float64)
    attacked = torch.full((len(x),), torch.inf, dtype=torch.float64)

    def ask(judge: Cascade, radii: Tensor, samples: Tensor) -> list[Record]:
        records: list[Record] = []
        for part in samples.split(BATCH_SIZE):
            box = ball(x[part], radii[part].to(x), domain)
            records += judge.run(x[part], y[part], part, box=box)
        for record in records:
            if record.verdict == "misclassified":
                attacked[record.index] = 0.0
            elif record.adversarial is not None:
                distance = float((record.adversarial.double() - x[record.index].double()).abs().max())
                attacked[record.index] = min(float(attacked[record.index]), distance)
        return records

    def proves(radii: Tensor, samples: Tensor) -> Tensor:
        safe = [record.index for record in ask(cascade, radii, samples) if record.verdict == "verified"]
        # What was asked is the radius in the dtype of the inputs.
        verified[safe] = torch.maximum(verified[safe], radii[safe].to(x.dtype).double())
        return torch.tensor(safe, dtype=torch.int64)

    def resists(radii: Tensor, samples: Tensor) -> Tensor:
        held = [record.index for record in ask(attack, radii, samples) if record.verdict == "unknown"]
        return torch.tensor(held, dtype=torch.int64)

    top = torch.full((len(x),), largest, dtype=torch.float64)
    rest = proves(top, torch.arange(len(x)))
    unproven = torch.ones(len(x), dtype=torch.bool)
    unproven[rest] = False
    _bisect(proves, verified.clone(), torch.where(unproven, top, verified), attacked, tolerance)
    _bisect(resists, verified.clone(), torch.where(attacked.isfinite(), attacked, verified), attacked, tolerance)
    if bool(((attacked <= verified) & (verified > 0)).any()):
        sample = int(((attacked <= verified) & (verified > 0)).nonzero()[0])
        raise ContradictionError(
            f"sample {sample}: verified within {float(verified[sample])}, but a point at {float(attacked[sample])} is "
            "misclassified; either the bound or the network's arithmetic is wrong"
        )
    return Radii(verified, attacked)


def _bisect(
    holds: Callable[[Tensor, Tensor], Tensor], low: Tensor, high: Tensor, attacked: Tensor, tolerance: float
) -> None:
    """Ask at the middle of [low, high] of every sample until none is wider than the tolerance.

    ``holds(radii, samples)`` says for which samples the answer is yes; those go on above. A counterexample
    found on the way is at most as far as the radius asked, so it bounds ``high`` as well.
    """
    high = torch.minimum(high, attacked)
    while len(open_ := (high - low > tolerance).nonzero().squeeze(1)):
        middle = (low + high) / 2
        yes = torch.zeros(len(low), dtype=torch.bool)
        yes[holds(middle, open_)] = True
        asked = torch.zeros_like(yes)
        asked[open_] = True
        low = torch.where(asked & yes, middle, low)
        high = torch.minimum(torch.where(asked & ~yes, middle, high), attacked)

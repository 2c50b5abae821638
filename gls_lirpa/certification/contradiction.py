"""When a bound and a point of the box cannot both be right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from torch import Tensor

from gls_lirpa.base.seeds import sample_generators
from gls_lirpa.certification.attack import pgd
from gls_lirpa.certification.stage import OpenSamples, StageOptions, Subject
from gls_lirpa.errors import ContradictionError

EXTRA_RESTARTS = 2


@dataclass(frozen=True)
class Suspect:
    """A sample with lower bounds of its margins (ascending classes) and a point that refutes them."""

    index: int
    label: int
    x: Tensor
    eps: float
    bounds: Tensor
    counterexample: Tensor


def cross_check_attack(subject: Subject, samples: OpenSamples, options: StageOptions) -> Tensor:
    """The worst points of a second attack, with other random starts and aimed at one class each.

    Where the cascade attacked these samples already, repeating the same attack would show nothing.
    """
    if len(samples) == 0:
        return samples.x
    return pgd(
        subject.model,
        samples.x,
        samples.labels,
        samples.box,
        steps=options.attack_steps,
        restarts=EXTRA_RESTARTS + options.attack_restarts,
        generator=sample_generators(subject.seed + 1, samples.indices),
        targeted=True,
    ).points


def raise_contradiction(suspect: Suspect, stage: str, folder: Path) -> NoReturn:
    """Save the evidence and give up: nothing that was decided so can be trusted.

    >>> import tempfile, torch
    >>> suspect = Suspect(3, 1, torch.zeros(2), 0.1, torch.tensor([0.5]), torch.ones(2))
    >>> raise_contradiction(suspect, "ibp", Path(tempfile.mkdtemp()))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    gls_lirpa.errors.ContradictionError: sample 3: stage ibp ...
    """
    file = folder / f"contradiction-{suspect.index}.npz"
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        file,
        index=suspect.index,
        label=suspect.label,
        x=suspect.x.cpu().numpy(),
        eps=suspect.eps,
        bounds=suspect.bounds.cpu().numpy(),
        counterexample=suspect.counterexample.cpu().numpy(),
    )
    raise ContradictionError(
        f"sample {suspect.index}: stage {stage} contradicts a bound, a point of the box has a smaller margin than was "
        f"proven; either the bound or the network's arithmetic is wrong; both are saved in {str(file)!r}"
    )

"""Certification in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gls_lirpa.certification.cascade import BATCH_SIZE, Cascade
from gls_lirpa.certification.records import Record
from gls_lirpa.certification.settings import DEFAULT_STAGES, Settings
from gls_lirpa.certification.stage import StageOptions
from gls_lirpa.errors import ConfigError
from gls_lirpa.solver import SolverSettings


def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    stages: Sequence[str] | None = None,
    timeout: float = 60.0,
    seed: int = 0,
    cross_check: bool = False,
    batch_size: int = BATCH_SIZE,
    options: StageOptions | None = None,
    bab: SolverSettings | Mapping[str, int] | None = None,
) -> list[Record]:
    """Certify samples in the ℓ∞ ball of radius ``eps`` in pixel space: one record each, in order.

    ``model`` takes pixels in [0, 1], normalising inside; it is copied and never modified. ``timeout``
    is the limit in seconds per sample. ``bab``: settings of the complete searches, or some of them by name; they
    replace those of ``options``.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x = torch.rand(2, 1, 2, 2)
    >>> [record.verdict for record in certify(model, x, model(x).argmax(1), eps=0.01)]
    ['verified', 'verified']
    """
    if batch_size < 1:
        raise ConfigError(f"expected batch_size >= 1, got {batch_size}")
    chosen = DEFAULT_STAGES if stages is None else tuple(stages)
    options = StageOptions() if options is None else options
    if bab is not None:
        options = replace(options, bab=bab if isinstance(bab, SolverSettings) else SolverSettings.of(bab))
    settings = Settings(eps, chosen, timeout, seed, cross_check, options)
    if len(x) == 0:
        return []
    cascade = Cascade(model, x, settings)
    records: list[Record] = []
    for start in range(0, len(x), batch_size):
        part = slice(start, start + batch_size)
        records += cascade.run(x[part], y[part], torch.arange(len(x))[part])
    return sorted(records, key=lambda record: record.index)

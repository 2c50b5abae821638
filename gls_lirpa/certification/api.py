"""Certification in one call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gls_lirpa.base.balls import check_norm
from gls_lirpa.base.checks import require
from gls_lirpa.certification.cascade import BATCH_SIZE, Cascade
from gls_lirpa.certification.records import Record
from gls_lirpa.certification.regions import PIXELS, Domain, ball, is_pixels, l2_region
from gls_lirpa.certification.result import Certification
from gls_lirpa.certification.settings import Settings, default_stages
from gls_lirpa.certification.stage import StageOptions
from gls_lirpa.solver import SolverSettings


def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float | Tensor,
    norm: str | float = "linf",
    domain: Domain = PIXELS,
    stages: Sequence[str] | None = None,
    timeout: float = 60.0,
    seed: int = 0,
    cross_check: bool = False,
    batch_size: int = BATCH_SIZE,
    options: StageOptions | None = None,
    bab: SolverSettings | Mapping[str, int] | None = None,
    progress: bool = False,
) -> Certification:
    """Certify samples in balls: one record each, in order, in a list with accuracies.

    Args:
        model: takes ``x`` and returns logits (n, classes); normalisation is inside it. Copied, never modified.
        x: inputs (n, …) in the dtype of the weights: images, or anything else such as (n, features).
        y: int64 labels (n,).
        eps: the radius, or a tensor (n,) with one per sample, in the units of ``x``.
        norm: ``linf``, or ``l2`` for one radius and the stages ibp, crown-ibp and crown alone.
        domain: (low, high) that inputs keep to, numbers or tensors that broadcast to a sample; None: no limits.
            Balls are cut at it. The default is that of pixels, [0, 1].
        stages: by name, in order; by default ``DEFAULT_STAGES``, or those that know the norm.
        timeout: seconds per sample over all stages.
        seed: of the attack and of branch and bound.
        cross_check: attack what was verified and bound what was attacked; a contradiction raises.
        batch_size: samples that go through the cascade together.
        options: steps of the attack and limits of the search.
        bab: settings of the complete searches, or some of them by name; they replace those of ``options``.
        progress: show a progress bar on standard error.

    Raises:
        ConfigError: a radius, domain, stage or limit that cannot be used.
        DataError: inputs outside the domain, or labels that do not fit.
        ContradictionError: with ``cross_check``, a bound and a point that cannot both be right.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x = torch.rand(2, 1, 2, 2)
    >>> result = certify(model, x, model(x).argmax(1), eps=0.01)
    >>> [record.verdict for record in result], result.certified
    (['verified', 'verified'], 1.0)
    >>> features = torch.tensor([[3.0, -40.0, 0.5, 7.0]])
    >>> result = certify(model, features, model(features).argmax(1), eps=torch.tensor([0.1]), domain=None)
    >>> print(result)
    1 samples: natural 100.00 %, adversarial 100.00 %, certified 100.00 %, 0 unknown
    """
    require(batch_size >= 1, "batch_size >= 1", batch_size)
    plain = isinstance(eps, (int, float)) and is_pixels(domain)
    chosen = default_stages(norm) if stages is None else tuple(stages)
    radius = float(eps) if plain else 0.0
    options = StageOptions() if options is None else options
    if bab is not None:
        options = dataclasses.replace(options, bab=bab if isinstance(bab, SolverSettings) else SolverSettings.of(bab))
    settings = Settings(radius, chosen, timeout, seed, cross_check, options, check_norm(norm))
    told = {**settings.told(), "eps": _told(eps), "domain": _told(domain), "samples": len(x)}
    if len(x) == 0:
        return Certification(settings=told)
    # Balls of one radius in pixel space are made by the cascade, which knows what any image requires.
    box = None if plain else ball(x, eps, domain) if settings.norm == "linf" else l2_region(x, eps, domain)
    cascade = Cascade(model, x, settings)
    records: list[Record] = []
    with _reported(len(x)) if progress else contextlib.nullcontext(lambda record: None) as report:
        for start in range(0, len(x), batch_size):
            part = slice(start, start + batch_size)
            indices = torch.arange(len(x))[part]
            for record in cascade.run(x[part], y[part], indices, box=None if box is None else box[part]):
                records.append(record)
                report(record)
    ordered = sorted(records, key=lambda record: record.index)
    return Certification(ordered, settings=told, unusable=cascade.unusable)


def _told(value: object) -> object:
    """A setting as plain values that JSON can hold."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [_told(item) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def _reported(total: int) -> Iterator[Callable[[Record], None]]:
    from rich.console import Console

    from gls_lirpa.certification.report import ProgressReporter

    with ProgressReporter(Console(stderr=True, force_jupyter=False), [], total=total) as reporter:
        yield reporter.decided

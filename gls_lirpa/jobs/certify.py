"""A certification as the command line asks for it: a run folder to records, summary and table."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from gls_lirpa.base.balls import check_norm
from gls_lirpa.base.checks import require
from gls_lirpa.base.figures import can_draw
from gls_lirpa.base.interruption import Interrupted
from gls_lirpa.certification import SolverSettings
from gls_lirpa.certification.cascade import BATCH_SIZE, Cascade
from gls_lirpa.certification.picture import draw_cactus
from gls_lirpa.certification.records import Record, RecordFolder, Summary
from gls_lirpa.certification.report import ProgressReporter, result_table, write_table
from gls_lirpa.certification.settings import Settings, default_stages
from gls_lirpa.certification.stage import StageOptions
from gls_lirpa.certification.workers import CascadePool
from gls_lirpa.data import Split
from gls_lirpa.errors import ConfigError
from gls_lirpa.jobs.targets import load_target
from gls_lirpa.training.config import check_device


def weights_hash(model: nn.Module) -> str:
    """A fingerprint of all weights and buffers, with their names and shapes.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> weights_hash(a) == weights_hash(a), weights_hash(a) == weights_hash(b)
    (True, False)
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def certify_split(
    cascade: Cascade | CascadePool,
    split: Split,
    folder: RecordFolder,
    *,
    samples: int,
    batch_size: int = BATCH_SIZE,
) -> Iterator[Record]:
    """Certify the first ``samples`` of a split that ``folder`` lacks; each record is written, then given."""
    due = [i for i in range(samples) if i not in folder.done]
    if isinstance(cascade, CascadePool):
        yield from map(folder.add, cascade.run(split, due))
        return
    for start in range(0, len(due), batch_size):
        indices = torch.tensor(due[start : start + batch_size])
        x, labels = split.batch(indices, cascade.network.device)
        for record in cascade.run(x, labels, indices):
            yield folder.add(record)


def certify_job(
    path: Path,
    *,
    dataset: str | None = None,
    eps: float | None = None,
    norm: str | None = None,
    samples: int | None = None,
    split: str = "test",
    stages: str | None = None,
    timeout: float = 60.0,
    max_nodes: int | None = None,
    bab: Sequence[tuple[str, float]] = (),
    workers: int = 1,
    seed: int = 0,
    cross_check: bool = False,
    out: Path | None = None,
    device: str | None = None,
    data_root: str | None = None,
    net: str | None = None,
    command: str = "",
    quiet: bool = False,
) -> Summary:
    """Certify the network of a run or a file, or go on with it, and close with a table and a picture.

    ``dataset``: for a network file, see :func:`gls_lirpa.jobs.targets.load_target`. ``bab``: settings of
    :class:`~gls_lirpa.certification.SolverSettings`, by name. ``command`` is what the user is told to repeat
    after an interruption.
    """
    console = Console(stderr=True, quiet=quiet)
    require(workers >= 1, "workers >= 1", workers)
    target = load_target(path, dataset=dataset, data_root=data_root, net=net)
    radius = target.eps if eps is None else eps
    if radius is None:
        raise ConfigError(f"{str(path)!r} does not say for which radius: add --eps")
    if path.is_dir() and not (path / "summary.json").exists():
        console.print(f"note: {path} was interrupted; this is the network of its last epoch", highlight=False)
    options = StageOptions(max_nodes=max_nodes, bab=SolverSettings.of(dict(bab)))
    chosen_norm = norm or target.norm
    settings = Settings(
        radius, stage_names(stages, chosen_norm), timeout, seed, cross_check, options, check_norm(chosen_norm)
    )
    chosen = target.dataset.split(split)
    number = _sample_count(samples, len(chosen))
    folder_path = out or target.folder(settings.eps, split, settings.norm)
    model = target.model.to(check_device(device or target.device))
    if workers > 1 and next((p.device.type for p in model.parameters()), "cpu") != "cpu":
        raise ConfigError(f"--workers is for the CPU, got --device {device or target.device}")
    header = {
        **settings.told(),
        "dataset": target.dataset.name,
        "split": split,
        "samples": number,
        "weights": weights_hash(target.model),
        "covers": "the network's dtype, any summation order",
    }
    with RecordFolder(folder_path, header) as folder:
        resumed = len(folder.done)
        if resumed:
            console.print(f"{resumed} of {number} samples are in {folder_path} already", highlight=False)
        cascade: Cascade | CascadePool
        if workers > 1:
            cascade = CascadePool(model, settings, workers=workers, folder=folder_path)
        else:
            cascade = Cascade(model, chosen.batch([0])[0], settings, folder=folder_path)
        try:
            with ProgressReporter(console, folder.done.values(), total=number) as progress:
                for record in certify_split(cascade, chosen, folder, samples=number):
                    progress.decided(record)
        except KeyboardInterrupt:
            done = f"interrupted: {len(folder.done)} of {number} samples are kept in {str(folder_path)!r}"
            raise Interrupted(f"{done}; continue with `{command}`" if command else done) from None
        records = [folder.done[i] for i in sorted(folder.done)]
    for name, why in cascade.unusable.items():
        console.print(f"stage {name} was left out: {why}", highlight=False)
    summary = Summary.of(records)
    summary.write(folder_path)
    write_table(records, folder_path / "records.csv")
    shown = f"{split} · eps={settings.eps:.4g}" + ("" if settings.norm == "linf" else f" ({settings.norm})")
    if can_draw():
        draw_cactus(records, folder_path / "cactus.png", title=f"{path.name} · {shown}")
    Console(quiet=quiet).print(result_table(summary, title=f"{path} · {shown}"))
    console.print(f"records, summary and picture: {folder_path}", highlight=False)
    return summary


def stage_names(stages: str | None, norm: str = "linf") -> tuple[str, ...]:
    """Comma-separated names of stages; None: the default ones for a norm.

    >>> stage_names("ibp, crown")
    ('ibp', 'crown')
    """
    return default_stages(norm) if stages is None else tuple(name.strip() for name in stages.split(",") if name.strip())


def _sample_count(samples: int | None, available: int) -> int:
    if samples is None:
        return available
    require(samples >= 1, "samples >= 1", samples)
    return min(samples, available)


def shell_command(arguments: list[str]) -> str:
    """The command line that a user can paste.

    >>> shell_command(["glscert", "certify", "my run"])
    "glscert certify 'my run'"
    """
    return shlex.join(arguments)

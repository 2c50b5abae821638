"""Training and its results from Python: what ``glscert train`` does, returned as an object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gls_lirpa.base.checks import require
from gls_lirpa.certification import Certification, certify
from gls_lirpa.data import Dataset
from gls_lirpa.errors import ConfigError, DataError
from gls_lirpa.models import build_model
from gls_lirpa.training import loop
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.console import ConsoleReporter
from gls_lirpa.training.custom import CUSTOM, DataRecord
from gls_lirpa.training.job import make_config
from gls_lirpa.training.logs import loggers
from gls_lirpa.training.own_data import Data, own_dataset
from gls_lirpa.training.reporters import Several, Silent
from gls_lirpa.training.runs import RunFolder, dataset_of, load_weights, make_network, state_of
from gls_lirpa.training.summary import write_summary


@dataclass(frozen=True)
class TrainedRun:
    """The run folder ``path`` with its ``config`` and its network.

    ``model``: in eval mode, with the run's final weights (of the last checkpoint, if it was interrupted).
    ``dataset``: None where it was passed as an object and not passed again.
    """

    path: Path
    config: TrainConfig
    model: nn.Module
    dataset: Dataset | None

    def __repr__(self) -> str:
        """One line: a notebook shows it."""
        config, rows = self.config, self.metrics
        end = f", natural {rows[-1]['natural']:.1f} %, certified {rows[-1]['certified']:.1f} %" if rows else ""
        return (
            f"<TrainedRun {str(self.path)!r}: {config.method}, {config.net}, {config.dataset}, eps={config.eps:.4g}, "
            f"{len(rows)} of {config.epochs} epochs{end}>"
        )

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per epoch: eps, lr, loss, natural, certified, unstable, seconds, …"""
        return RunFolder(self.path).metrics()

    def certify(
        self,
        x: Tensor | None = None,
        y: Tensor | None = None,
        *,
        split: str = "test",
        samples: int | None = None,
        eps: float | Tensor | None = None,
        **options: Any,
    ) -> Certification:
        """Certify the first ``samples`` of a split of the run's data, or inputs of one's own.

        Args:
            x, y: inputs (n, …) in [0, 1] and labels (n,), instead of a split.
            split: train, val or test.
            samples: how many; None: all.
            eps: by default the radius the run was trained for.
            **options: of :func:`gls_lirpa.certify`.

        Raises:
            DataError: the run's data is not at hand, or the split is empty.
        """
        if (x is None) != (y is None):
            raise ConfigError("expected both x and y, or neither")
        if x is None or y is None:
            x, y = self._first(split, samples)
        elif samples is not None:
            x, y = x[:samples], y[:samples]
        radius = self.config.eps if eps is None else eps
        return certify(self.model, x, y, eps=radius, **{"norm": self.config.norm, **options})

    def _first(self, split: str, samples: int | None) -> tuple[Tensor, Tensor]:
        if self.dataset is None:
            raise DataError("this run's data was passed as an object: pass x and y, or dataset= to load_run")
        require(samples is None or samples >= 1, "samples >= 1", samples)
        chosen = self.dataset.split(split)
        return chosen.batch(range(min(len(chosen), samples or len(chosen))))


def train(
    *,
    dataset: str | Dataset | Data = "digits",
    val: Data | None = None,
    test: Data | None = None,
    net: str | nn.Module = "cnn3",
    eps: float | None = None,
    loss: str | None = None,
    relaxation: str | None = None,
    estimator: str | None = None,
    preset: str | None = None,
    config_file: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    log: Sequence[str] = (),
    reporters: Sequence[loop.Reporter] = (),
    **options: Any,
) -> TrainedRun:
    """Train a network with loss × relaxation × estimator into a run folder.

    The configuration is made as on the command line: preset (by default the dataset's tuned one), then
    ``config_file``, then what is named here; later ones win.

    Args:
        dataset: a name (digits, mnist, …), a pair (x, y) of tensors, a torch Dataset, a DataLoader or a
            :class:`~gls_lirpa.data.Dataset`. Inputs are uint8 or in [0, 1]; they are read once into memory.
        val, test: held-out and test data of one's own, like ``dataset``; without ``val`` a stratified
            ``val_fraction`` of the training data is held out.
        net: a name (cnn3, …), ``path/to/file.py:factory``, or a module, which is trained as it is, in place.
        eps: radius in pixel space, in ℓ∞, or in ℓ2 with ``norm="l2"``.
        loss, relaxation, estimator, preset: by name, as on the command line.
        config_file: JSON or TOML.
        out: the run folder; by default ``runs/<date-time>``.
        resume: continue the run in ``out``, with the same data and network where these are objects.
        progress: show a progress bar, or a line per epoch where there is no terminal, on standard error.
        log: services that are told as well: tensorboard, wandb, mlflow, each an extra.
        reporters: others who are told how training goes.
        **options: any other field of :class:`~gls_lirpa.training.TrainConfig` (epochs, batch_size, lr, seed, …)
            and the estimator's own (sigma, samples, split, population, rho).

    Raises:
        ConfigError: an option that cannot be used, or a folder that holds another run.
        DataError: data that cannot be used.
        NumericalError: a loss or gradient that is not finite.
        Interrupted: Ctrl-C; ``resume=True`` goes on.

    >>> import tempfile, torch
    >>> x, y = torch.rand(32, 1, 8, 8), torch.arange(32) % 2
    >>> run = train(dataset=(x, y), net="cnn3-tiny", eps=0.01, relaxation="ibp", estimator="grad", epochs=1,
    ...             out=tempfile.mkdtemp(), progress=False)
    >>> len(run.metrics), run.certify(x[:4], y[:4], stages=["ibp"]).natural <= 1.0
    (1, True)
    """
    named = isinstance(dataset, str)
    given = {
        **options,
        "dataset": dataset if named else CUSTOM,
        "net": CUSTOM if isinstance(net, nn.Module) else net,
        **{"eps": eps, "loss": loss, "relaxation": relaxation, "estimator": estimator, "preset": preset},
    }
    if named and (val is not None or test is not None):
        raise ConfigError(f"dataset {dataset!r} has its own splits: remove val and test")
    config = make_config(given, None if config_file is None else Path(config_file))
    folder = Path(out) if out is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    data = None
    if not named:
        data = _own(dataset, val, test, config)
    listeners = [_console() if progress else Silent(), *loggers(log), *reporters]
    module = net if isinstance(net, nn.Module) else None
    trainer = loop.train(config, folder, reporter=Several(listeners), resume=resume, dataset=data, model=module)
    write_summary(trainer, folder)
    return TrainedRun(folder, config, trainer.model.eval(), trainer.dataset)


def load_run(
    path: str | Path,
    *,
    dataset: Dataset | Data | None = None,
    test: Data | None = None,
    model: nn.Module | None = None,
    data_root: str | None = None,
    net: str | None = None,
) -> TrainedRun:
    """The network and results of a run folder, finished or interrupted.

    Args:
        path: the run folder.
        dataset, test: the run's data, where it was passed as an object; without it the network is loaded alone.
        model: a network of the same layers, where the run's was passed as an object; it gets the run's weights.
        data_root: where a named dataset's files lie now.
        net: allows the run's own ``file.py:factory`` to be executed.

    Raises:
        CheckpointError: the folder is no run, or damaged, or its weights are another network's.
        ConfigError: something that must be passed is missing.

    >>> import tempfile
    >>> run = train(net="cnn3-tiny", relaxation="ibp", estimator="grad", epochs=1, limit=64,
    ...             out=tempfile.mkdtemp(), progress=False)
    >>> load_run(run.path).config == run.config
    True
    """
    folder = Path(path)
    config = RunFolder(folder).config()
    if net is not None:
        config = config.replaced({"net": net})
    elif ".py:" in config.net and model is None:
        raise ConfigError(f"run {str(folder)!r} uses {config.net!r}: pass net={config.net!r} to let it be executed")
    data: Dataset | None
    if dataset is not None:
        data = _own(dataset, None, test, config)
    else:
        data = None if config.dataset == CUSTOM else dataset_of(config, root=data_root)
    network = _network(config, data, folder) if model is None else model
    load_weights(network, state_of(folder), f"run {str(folder)!r}")
    return TrainedRun(folder, config, network.eval(), data)


def _own(dataset: Dataset | Data, val: Data | None, test: Data | None, config: TrainConfig) -> Dataset:
    if isinstance(dataset, Dataset):
        return dataset
    return own_dataset(dataset, val=val, test=test, val_fraction=config.val_fraction, seed=config.seed)


def _network(config: TrainConfig, data: Dataset | None, folder: Path) -> nn.Module:
    if data is not None:
        return make_network(config, data)
    if config.net == CUSTOM or ".py:" in config.net:
        raise ConfigError(f"run {str(folder)!r} has a network and data of its own: pass model= to load_run")
    known = DataRecord.read(folder)
    return build_model(config.net, in_shape=known.in_shape, classes=known.classes, init=config.init, seed=config.seed)


def _console() -> ConsoleReporter:
    from rich.console import Console

    # A notebook shows lines of plain text at once, and a live display only with further packages.
    return ConsoleReporter(Console(stderr=True, force_jupyter=False))

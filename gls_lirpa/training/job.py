"""A training run as the command line asks for it: options to configuration, run, closing lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gls_lirpa.data import DATASETS
from gls_lirpa.errors import ConfigError
from gls_lirpa.estimators import ESTIMATORS
from gls_lirpa.losses import LOSSES, Loss
from gls_lirpa.losses.published import at
from gls_lirpa.relaxations import RELAXATIONS, Relaxation
from gls_lirpa.training.config import TrainConfig, checked_fields, read_config_file
from gls_lirpa.training.console import ConsoleReporter
from gls_lirpa.training.custom import CUSTOM
from gls_lirpa.training.dry_run import describe, probe
from gls_lirpa.training.logs import loggers
from gls_lirpa.training.loop import train
from gls_lirpa.training.presets import PRESETS, RECIPES, chosen_preset, estimator_defaults, get_preset
from gls_lirpa.training.reporters import Several
from gls_lirpa.training.runs import RunFolder
from gls_lirpa.training.summary import write_summary

DEFAULT_ESTIMATOR = "rgs"


def make_config(options: dict[str, Any], config_file: Path | None = None) -> TrainConfig:
    """Preset, then configuration file, then options; later ones win.

    ``paper``, ``literature`` and ``tuned`` stand for the dataset's preset of that kind with the nearest ε;
    without a preset named, the tuned one applies.

    >>> make_config({"dataset": "mnist", "eps": 0.1, "estimator": "rgs"}).preset
    'mnist-0.1'
    """
    given = {key: value for key, value in options.items() if value is not None and value != ()}
    own = set(estimator_options())
    fields = {key: value for key, value in given.items() if key != "assignments" and key not in own}
    fields = {**(read_config_file(config_file) if config_file else {}), **fields}
    estimator = ESTIMATORS.canonical(fields.get("estimator", DEFAULT_ESTIMATOR))
    dataset = fields.get("dataset", _dataset_of(fields.get("preset")))
    dataset = dataset if dataset == CUSTOM else DATASETS.canonical(dataset)
    preset = chosen_preset(fields.get("preset"), dataset, fields.get("eps"))
    base = get_preset(preset, estimator, fields.get("net", "cnn3")) if preset else estimator_defaults(estimator)
    base = {**base, **_of_loss(fields, dataset, float(fields.get("eps") or base.get("eps") or 0.0), preset)}
    assigned = _assigned(given.get("assignments", ()), LOSSES.get(base["loss"]), RELAXATIONS.get(base["relaxation"]))
    config = TrainConfig(**checked_fields({**base, "dataset": dataset, "estimator": estimator}))
    chosen = {**fields, "dataset": dataset, "estimator": estimator, "preset": preset}
    return config.replaced(chosen).replaced({**assigned, "estimator_options": _estimator_options(estimator, given)})


def _of_loss(fields: dict[str, Any], dataset: str, eps: float, preset: str | None) -> dict[str, Any]:
    """A loss brings the relaxation it was published with and its published options; in a literature recipe also
    its published training."""
    loss = LOSSES.get(fields.get("loss", "robust"))
    relaxation = RELAXATIONS.canonical(fields.get("relaxation", loss.relaxation))
    own: dict[str, Any] = {"loss": loss.name, "relaxation": relaxation, "teacher": fields.get("teacher")}
    options = loss.published_options(dataset, eps, relaxation=relaxation)
    training = at(loss.training, dataset, eps)
    if training is None or preset is None or PRESETS.get(preset).recipe != "literature":
        return {**own, "loss_options": options}
    beside = training.fields(net=fields.get("net", "cnn3"))
    return {**own, **beside, "loss_options": {**options, **beside["loss_options"]}}


def _dataset_of(preset: str | None) -> str:
    if preset is None or preset in RECIPES:
        return "digits"
    return str(get_preset(preset, DEFAULT_ESTIMATOR)["dataset"])


def estimator_options() -> dict[str, list[str]]:
    """Every option of an estimator, and the estimators that have it.

    >>> estimator_options()["sigma"]
    ['pgpe', 'rgs']
    """
    found: dict[str, list[str]] = {}
    for name in ESTIMATORS:
        for option in ESTIMATORS.get(name).options:
            found.setdefault(option, []).append(name)
    return found


def _assigned(assignments: Sequence[tuple[str, str]], loss: Loss, relaxation: Relaxation) -> dict[str, Any]:
    """``--set name=value`` as options of the loss, or of the relaxation where only that has them."""
    tables: dict[str, Any] = {"loss_options": {}, "relaxation_options": {}}
    for name, text in assignments:
        if name in relaxation.options and name not in loss.options:
            tables["relaxation_options"][name] = relaxation.options[name].parsed(text)
        else:
            tables["loss_options"][name] = loss.options.of(f"loss {loss.name!r}", name).parsed(text)
    return tables


def _estimator_options(estimator: str, given: dict[str, Any]) -> dict[str, Any]:
    users = estimator_options()
    named = {key: given[key] for key in users if key in given}
    for key in named:
        if estimator not in users[key]:
            flag = key.replace("_", "-")
            raise ConfigError(f"--{flag} is an option of {', '.join(users[key])}, not of estimator {estimator!r}")
    return named


def train_job(
    *,
    config_file: Path | None,
    out: Path | None,
    resume: bool,
    options: dict[str, Any],
    dry_run: bool = False,
    log: Sequence[str] = (),
) -> None:
    """Train and close with where the results are and what to do next; or say what would be trained.

    ``log``: services that are told as well, see :data:`gls_lirpa.training.logs.LOGS`.
    """
    console = Console(stderr=True)
    config = _resumed_config(out, options, config_file) if resume else make_config(options, config_file)
    if dry_run:
        Console(soft_wrap=True, highlight=False, markup=False).print(describe(config, probe(config, warm=True)))
        return
    listeners = [ConsoleReporter(console), *loggers(log)]
    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    note = config.estimator_method.cold_start
    if note and config.init_from is None and not resume:
        console.print(f"note: {note}")
    trainer = train(config, folder, reporter=Several(listeners), resume=resume)
    summary = write_summary(trainer, folder)
    if summary["natural"] is not None:
        console.print(
            f"trained {summary['epochs']} epochs in {summary['seconds']:.0f} s: natural {summary['natural']:.1f} %, "
            f"certified {summary['certified']:.1f} % on {summary['held_out']}\nnext: glscert certify {folder}",
            highlight=False,
            soft_wrap=True,
        )


def _resumed_config(out: Path | None, options: dict[str, Any], config_file: Path | None) -> TrainConfig:
    if out is None:
        raise ConfigError("--resume needs --out RUN, the folder of the run to continue")
    stored = RunFolder(out).config()
    given = {key for key, value in options.items() if value is not None and value != ()}
    if config_file is not None:
        raise ConfigError("--resume takes the configuration of the run: remove --config")
    if ".py:" in stored.net and options.get("net") != stored.net:
        raise ConfigError(
            f"run {str(out)!r} uses the network file {stored.net!r}: add --net {stored.net} to let it be executed"
        )
    if given - {"net"} and make_config(options).to_dict() != stored.to_dict():
        raise ConfigError(f"run {str(out)!r} has another configuration: resume it with --out and --resume alone")
    return stored

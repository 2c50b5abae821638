"""All of a training run's configuration as one typed, serialisable object."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gls_lirpa.base.balls import check_norm
from gls_lirpa.base.boxes import check_eps
from gls_lirpa.base.checks import require
from gls_lirpa.base.options import Value
from gls_lirpa.base.registry import Registry, nearest
from gls_lirpa.errors import ConfigError, UnknownNameError
from gls_lirpa.estimators import ESTIMATORS, EstimatorMethod
from gls_lirpa.losses import LOSSES
from gls_lirpa.losses.terms import check_l2_training
from gls_lirpa.models import MODELS
from gls_lirpa.models.initialization import INITIALIZERS
from gls_lirpa.relaxations import RELAXATIONS, Relaxation
from gls_lirpa.training.custom import CUSTOM
from gls_lirpa.training.schedules import EpsSchedule, StepDecay

PADDINGS = ("edge", "zero")


@dataclass(frozen=True)
class TrainConfig:
    """loss × relaxation × estimator, on a network and a dataset, under schedules.

    ``dataset``: its name; ``data_root``: where its files lie; ``val_fraction``: share of the training files held out;
    ``limit``: use only the first samples of the files; ``padding``: of augmented images, edge or zero.
    ``net``: a name, or ``file.py:factory``; ``init``: initialisation of one by name; ``init_from``: a run folder,
    weight file or ``zoo:NAME`` with weights to begin with; ``teacher``: one with the network that the loss learns from.

    ``loss``, ``relaxation``, ``estimator``: by name, each with ``…_options`` of its own (``loss_options``,
    ``relaxation_options``, ``estimator_options``). ``eps``: the radius to certify, in the ``norm`` linf or l2; training
    ends with ``eps_factor`` times it. ``natural_weight``: share of the natural loss; ``l1``: weight of the L1 norm;
    ``warmup``: weight of the penalty while ε grows. ``sigma_factor``: decay of RGS's σ at each milestone;
    ``sigma_per_lr``: that σ is this times the learning rate instead. ``actors``: Ray processes that share the perturbed
    networks, 0 for none; ``ray_address``: a cluster that runs already; ``gpus_per_actor``: GPUs each of them is given.

    ``lr``: of Adam, over ``epochs`` of batches of ``batch_size``, times ``lr_factor`` after each of the ``milestones``
    (epochs). ε is 0 for ``eps_warmup_epochs``, then grows over ``eps_anneal_epochs`` in the ``eps_shape`` smooth,
    linear or none. ``grad_clip``: the largest norm of a gradient; ``average_from``: the epoch from which on weights are
    averaged, None for the last ones. ``seed``: of all that is random; ``device``: torch's; ``eval_samples``: held-out
    samples evaluated after each epoch; ``preset``: where values came from, a note.

    >>> TrainConfig(relaxation="deeppoly").relaxation
    'crown'
    """

    dataset: str = "digits"
    data_root: str = "data"
    val_fraction: float = 0.1
    limit: int | None = None
    padding: str = "edge"
    net: str = "cnn3"
    init: str = "ibp"
    init_from: str | None = None
    teacher: str | None = None

    loss: str = "robust"
    relaxation: str = "crown"
    estimator: str = "grad"
    eps: float = 0.1
    norm: str = "linf"
    eps_factor: float = 1.0
    natural_weight: float = 0.0
    l1: float = 0.0
    warmup: float = 0.0
    loss_options: dict[str, Value] = field(default_factory=dict)
    relaxation_options: dict[str, Value] = field(default_factory=dict)
    estimator_options: dict[str, Value] = field(default_factory=dict)
    sigma_factor: float = 0.4
    sigma_per_lr: float | None = None
    actors: int = 0
    ray_address: str | None = None
    gpus_per_actor: float = 0.0

    epochs: int = 30
    batch_size: int = 128
    lr: float = 1e-2
    lr_factor: float = 0.2
    milestones: tuple[float, ...] = ()
    eps_warmup_epochs: float = 0.0
    eps_anneal_epochs: float = 0.0
    eps_shape: str = "smooth"
    grad_clip: float = 10.0
    average_from: float | None = None

    seed: int = 0
    device: str = "cpu"
    eval_samples: int = 512
    preset: str | None = None

    def __post_init__(self) -> None:
        registries: dict[str, Registry[Any]] = {
            "loss": LOSSES,
            "relaxation": RELAXATIONS,
            "estimator": ESTIMATORS,
            "init": INITIALIZERS,
        }
        for name, registry in registries.items():
            object.__setattr__(self, name, registry.canonical(getattr(self, name)))
        if ".py:" not in self.net and self.net != CUSTOM:
            try:
                object.__setattr__(self, "net", MODELS.canonical(self.net))
            except UnknownNameError as error:
                raise UnknownNameError(f"{error}; a network of your own is path/to/file.py:factory") from error
        object.__setattr__(self, "milestones", tuple(float(m) for m in self.milestones))
        object.__setattr__(self, "norm", check_norm(self.norm))
        object.__setattr__(self, "eps", check_eps(self.eps, self.norm))
        wide = "eps_factor > 0 and eps * eps_factor <= 1"
        within = self.norm == "l2" or self.trained_eps <= 1
        require(0 < self.eps_factor < math.inf and within, wide, self.eps_factor)
        if self.padding not in PADDINGS:
            raise ConfigError(f"unknown padding {self.padding!r}: expected one of {', '.join(PADDINGS)}")
        for name, least in (("epochs", 1), ("batch_size", 1), ("actors", 0), ("eval_samples", 1), ("lr", 0)):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= least, f"{name} >= {least}", value)
        require(0 <= self.seed < 2**61 - 1, "0 <= seed < 2**61 - 1", self.seed)
        require(self.grad_clip > 0, "grad_clip > 0", self.grad_clip)
        if self.sigma_per_lr is not None:
            expected = f"a finite sigma_per_lr >= 0 with an estimator whose sigma decays, not with {self.estimator!r}"
            usable = self.estimator_method.decays is not None and 0 <= self.sigma_per_lr < math.inf
            require(usable, expected, self.sigma_per_lr)
        self.eps_schedule()
        self.lr_schedule()
        loss, relaxation, estimator = LOSSES.get(self.loss), RELAXATIONS.get(self.relaxation), self.estimator_method
        object.__setattr__(self, "loss_options", loss.options.checked(f"loss {self.loss!r}", self.loss_options))
        object.__setattr__(self, "estimator_options", estimator.checked(self.estimator_options))
        relaxation.configured(self.relaxation_options)
        check_l2_training(self.norm, loss, relaxation, self.warmup)
        if loss.teacher != (self.teacher is not None):
            raise ConfigError(
                f"loss {self.loss!r} needs --teacher RUN, the run folder of a trained network"
                if self.teacher is None
                else f"loss {self.loss!r} learns from no teacher: remove --teacher, or use --loss distill"
            )
        if loss.bounds and estimator.needs_gradient and not relaxation.differentiable:
            others = " or ".join(name for name in ESTIMATORS if not ESTIMATORS.get(name).needs_gradient)
            raise ConfigError(
                f"relaxation {self.relaxation!r} has no gradient in the weights, which estimator {self.estimator!r} "
                f"needs: use --estimator {others}, or a differentiable relaxation such as crown"
            )

    @property
    def trained_eps(self) -> float:
        """The radius that training ends with; ``eps`` is the one to certify."""
        return self.eps_factor * self.eps

    @property
    def estimator_method(self) -> EstimatorMethod:
        return ESTIMATORS.get(self.estimator)

    def chosen_relaxation(self) -> Relaxation:
        """The relaxation with its options."""
        return RELAXATIONS.get(self.relaxation).configured(self.relaxation_options)

    def eps_schedule(self) -> EpsSchedule:
        most = 1.0 if self.norm == "linf" else math.inf
        return EpsSchedule(self.trained_eps, self.eps_warmup_epochs, self.eps_anneal_epochs, self.eps_shape, most)

    def lr_schedule(self) -> StepDecay:
        return StepDecay(self.lr, factor=self.lr_factor, milestones=self.milestones)

    def sigma_schedule(self) -> StepDecay | None:
        """Where σ decays when the learning rate does, or is a multiple of it (RGS; PGPE's is learned)."""
        if self.sigma_per_lr is not None:
            return StepDecay(self.sigma_per_lr * self.lr, factor=self.lr_factor, milestones=self.milestones)
        sigma = self.estimator_options.get(self.estimator_method.decays or "")
        if sigma is None:
            return None
        return StepDecay(float(sigma), factor=self.sigma_factor, milestones=self.milestones)

    @property
    def method(self) -> str:
        """A short name of the method, e.g. ``robust·crown·rgs``."""
        relaxation = [self.relaxation] if LOSSES.get(self.loss).bounds else []
        return "·".join([self.loss, *relaxation, self.estimator])

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def replaced(self, values: dict[str, Any]) -> TrainConfig:
        """A copy with the fields in ``values`` changed; the option tables are merged, not replaced."""
        tables = {
            name: {**getattr(self, name), **values[name]}
            for name in ("loss_options", "relaxation_options", "estimator_options")
            if values.get(name) is not None
        }
        return dataclasses.replace(self, **{**checked_fields(values), **tables})


def check_device(name: str) -> str:
    """``name``, if this torch can compute there."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"device {name!r} cannot be used here ({reason}): expected cpu or an available cuda"
        ) from error
    return name


def checked_fields(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with every key a field of TrainConfig and every value of that field's type."""
    hints = typing.get_type_hints(TrainConfig)
    result = {}
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"unknown configuration key {key!r}{nearest(key, list(hints))}")
        result[key] = _coerced(key, value, hints[key])
    return result


def _coerced(key: str, value: Any, hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    origin = typing.get_origin(hint)
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and numeric:
        return float(value)
    if hint is int and numeric and float(value).is_integer():
        return int(value)
    if hint is str and isinstance(value, str):
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_coerced(key, item, float) for item in value)
    if origin is dict and isinstance(value, dict):
        return {str(k): _number(key, k, v) for k, v in value.items()}
    expected = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"configuration key {key!r} must be of type {expected}, got {value!r}")


def _number(key: str, option: str, value: Any) -> Value:
    if isinstance(value, (bool, int, float)):
        return value
    raise ConfigError(f"{key}[{option!r}] must be a number, got {value!r}")


def read_config_file(path: Path) -> dict[str, Any]:
    """The fields in a JSON or .toml configuration file; unknown keys and code to be executed are refused."""
    kind = "TOML" if path.suffix.lower() == ".toml" else "JSON"
    try:
        values = _toml(path.read_text()) if kind == "TOML" else json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"configuration file {str(path)!r} is not valid {kind}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {str(path)!r} must hold one JSON object")
    fields = checked_fields(values)
    if ".py:" in str(fields.get("net", "")):
        raise ConfigError(
            f"configuration file {str(path)!r} asks for code to be executed (net = {fields['net']!r}): "
            "remove that key and name the network on the command line with --net"
        )
    return fields


def _toml(text: str) -> dict[str, Any]:
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    values: dict[str, Any] = parser.loads(text)
    return values

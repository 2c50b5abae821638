"""A run in memory: network, loss, estimator, optimizer and position, one step or the end of an epoch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from gls_lirpa.base.seeds import derived_seed
from gls_lirpa.data import Augmentation, Dataset, batches
from gls_lirpa.engine.batchnorm import batchnorms
from gls_lirpa.errors import CheckpointError, NumericalError
from gls_lirpa.estimators import Estimator, reset_batchnorm
from gls_lirpa.losses import LOSSES, CertifiedLoss
from gls_lirpa.relaxations import RELAXATIONS, Relaxation
from gls_lirpa.training.config import TrainConfig, check_device
from gls_lirpa.training.evaluation import held_out_accuracy
from gls_lirpa.training.runs import load_weights, make_network, make_teacher, state_of


@dataclass
class Position:
    """How far a run has come, and the running sums of the epoch it is in."""

    epoch: int = 0
    batch: int = 0
    loss: float = 0.0
    samples: int = 0
    evaluations: float = 0.0
    spread: float = 0.0
    sigma: float = 0.0
    seconds: float = 0.0


class Trainer:
    """A run in memory: network, loss, estimator, optimizer and position.

    ``model``: a network of the user's own, trained as it is, instead of the one the configuration names.
    """

    def __init__(self, config: TrainConfig, dataset: Dataset, model: nn.Module | None = None) -> None:
        self.config = config
        self.dataset = dataset
        self.model = (make_network(config, dataset) if model is None else model).to(check_device(config.device))
        if config.init_from is not None:
            load_weights(self.model, state_of(Path(config.init_from)), f"--init-from {config.init_from!r}")
        options: dict[str, Any] = dict(config.loss_options)
        teacher = make_teacher(config, dataset)
        self.criterion = CertifiedLoss(
            self.model,
            config.chosen_relaxation(),
            eps=config.trained_eps,
            norm=config.norm,
            loss=config.loss,
            natural_weight=config.natural_weight,
            l1=config.l1,
            warmup=config.warmup,
            teacher=None if teacher is None else teacher.to(config.device),
            **options,
        )
        self.estimator = make_estimator(config, self.criterion, self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        self.position = Position()
        self.average: dict[str, Tensor] = {}
        self.eps_schedule, self._lr = config.eps_schedule(), config.lr_schedule()
        self._sigma = config.sigma_schedule()
        # BatchNorm cannot normalise a last batch of a single sample.
        self.drop_last = bool(batchnorms(self.model)) and len(dataset.train) % config.batch_size == 1

    @property
    def augmentation(self) -> Augmentation | None:
        """The dataset's, padded as configured."""
        own = self.dataset.augmentation
        return own and replace(own, edge=self.config.padding == "edge")

    @property
    def steps_per_epoch(self) -> int:
        size = len(self.dataset.train) / self.config.batch_size
        return max(1, math.floor(size) if self.drop_last else math.ceil(size))

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "estimator": self.estimator.state_dict(),
            "average": self.average,
            "position": asdict(self.position),
        }

    def restore(self, state: dict[str, Any], source: str) -> None:
        missing = {"model", "optimizer", "estimator", "average", "position"} - set(state)
        if missing:
            raise CheckpointError(f"{source} is not a training checkpoint: it has no {sorted(missing)[0]!r}")
        try:
            load_weights(self.model, state["model"], source)
            self.optimizer.load_state_dict(state["optimizer"])
            self.estimator.load_state_dict(state["estimator"])
            self.average = {name: value.to(self.config.device) for name, value in state["average"].items()}
            self.position = Position(**state["position"])
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{source} does not fit this run: {reason}") from error

    def step(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """One optimizer step at the current position."""
        config, position = self.config, self.position
        time_ = position.epoch + position.batch / self.steps_per_epoch
        eps, lr = self.eps_schedule.at(time_), self._lr.at(time_)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._sigma is not None:
            self.estimator.set_sigma(self._sigma.at(time_))
        # The attack's randomness is a function of seed and position, so a resumed run repeats it.
        generator = torch.Generator().manual_seed(derived_seed(config.seed, position.epoch, position.batch))
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.estimator(x, y, eps=eps, generator=generator)
        value = float(loss.detach())
        self._require_finite("loss", value, eps)
        loss.backward()
        norm = float(clip_grad_norm_(self.model.parameters(), config.grad_clip))
        self._require_finite("gradient norm", norm, eps)
        self.optimizer.step()
        position.batch += 1
        position.loss += value * len(y)
        position.samples += len(y)
        stats = self.estimator.stats
        position.evaluations += stats.get("evaluations", 1.0)
        position.spread, position.sigma = stats.get("spread", 0.0), stats.get("sigma", 0.0)
        smoothing = {"spread": position.spread, "sigma": position.sigma}
        return {"loss": value, "eps": eps, "lr": lr, "grad_norm": norm, **smoothing}

    def _require_finite(self, what: str, value: float, eps: float) -> None:
        if not math.isfinite(value):
            where = f"epoch {self.position.epoch + 1}, step {self.position.batch + 1}"
            raise NumericalError(
                f"{what} is {value} at {where} (eps={eps:.4g}): stopped; the last good checkpoint is kept. "
                "A smaller --lr or a longer eps annealing may help"
            )

    def end_epoch(self) -> dict[str, Any]:
        """BatchNorm's population statistics, held-out accuracies, and the epoch's row of metrics."""
        config, position = self.config, self.position
        self._average()
        if batchnorms(self.model):
            reset_batchnorm(self.model, self._clean_batches())
        split = self.dataset.val if len(self.dataset.val) else self.dataset.train
        x, _ = split.batch(range(1), config.device)
        held_out = held_out_accuracy(
            self.model,
            self.criterion.engine(x),
            split,
            eps=config.eps,
            norm=config.norm,
            relaxation=_monitor(config),
            samples=config.eval_samples,
            device=config.device,
        )
        last = position.epoch + (position.batch - 1) / self.steps_per_epoch
        row = {
            "epoch": position.epoch + 1,
            "eps": self.eps_schedule.at(last),
            "lr": self._lr.at(last),
            "loss": position.loss / max(position.samples, 1),
            "natural": held_out.natural,
            "certified": held_out.certified,
            "unstable": held_out.unstable,
            "active": held_out.active,
            "held_out": "val" if len(self.dataset.val) else "train",
            "spread": position.spread,
            "sigma": position.sigma,
            "seconds": position.seconds,
            "evaluations_per_second": position.evaluations / max(position.seconds, 1e-9),
        }
        self.position = Position(epoch=position.epoch + 1)
        return row

    @torch.no_grad()
    def _average(self) -> None:
        """The mean of the weights at the ends of the epochs from ``average_from`` on."""
        first = self.config.average_from
        if first is None or self.position.epoch < first:
            return
        count = self.position.epoch - math.ceil(first) + 1
        for name, parameter in self.model.named_parameters():
            mean = self.average.setdefault(name, torch.zeros_like(parameter))
            mean += (parameter - mean) / count

    def final_weights(self) -> dict[str, Tensor]:
        """What the run is about: the averaged weights if asked for, else the last ones."""
        if self.average:
            self.model.load_state_dict(self.average, strict=False)
            if batchnorms(self.model):
                reset_batchnorm(self.model, self._clean_batches())
        return self.model.state_dict()

    def _clean_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.config.batch_size
        for x, y, _ in batches(self.dataset.train, batch_size=size, shuffle=False, device=self.config.device):
            yield x, y


def make_estimator(config: TrainConfig, loss: CertifiedLoss, model: nn.Module) -> Estimator:
    """The configured estimator around the loss."""
    placement = {
        "seed": config.seed,
        "actors": config.actors,
        "ray_address": config.ray_address,
        "gpus_per_actor": config.gpus_per_actor,
    }
    return config.estimator_method.around(loss, model, config.estimator_options, placement=placement)


def _monitor(config: TrainConfig) -> Relaxation:
    """The relaxation for held-out accuracy: the one trained with, where it is a plain one."""
    chosen = config.chosen_relaxation()
    return chosen if LOSSES.get(config.loss).bounds and chosen.differentiable else RELAXATIONS.get("crown-ibp")

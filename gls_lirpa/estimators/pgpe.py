"""PGPE: policy gradients with parameter-based exploration, a zeroth-order estimate for any loss."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gls_lirpa.base.checks import number, require, whole
from gls_lirpa.base.options import Option, Options
from gls_lirpa.errors import ConfigError
from gls_lirpa.estimators.asking import Population, no_loss
from gls_lirpa.estimators.methods import ESTIMATORS, SIGMA_RANGE, EstimatorMethod
from gls_lirpa.estimators.pool import Factory, in_shards
from gls_lirpa.estimators.protocol import State
from gls_lirpa.estimators.weights import Params
from gls_lirpa.estimators.worker import Loss, Task
from gls_lirpa.estimators.wrapped import Pooled

# Noise alone moves log σ by SIGMA_LR·√(2T/n) in T steps: by 0.33 over the 17,600 steps of the paper's MNIST
# schedule with n = 128 pairs, so the schedule ends with σ's order of magnitude, which is what the paper found
# to matter. DeepPoly on digits, 300 steps from a PGD-trained network, n = 64, fixed σ → rates 0.02, 0.1, 0.5:
# smoothed loss .5903 → .5900, .5887, .5974 at σ = 1e-3, where σ matters little; .834 → .791, .711, .605 at
# σ = 5e-2, which is too large and shrinks. At 0.5 noise spreads σ over e^1.3 and the test loss suffers.
SIGMA_LR = 0.02


class PGPE(Pooled):
    """Unbiased gradients of the smoothed loss from ``population`` loss values, n antithetic pairs.

    ∇θ = 1/(2nσ²) Σ ε(r⁺−r⁻) and ∇σ = 1/(n−1) Σ (r̄−b)(ε²−σ²)/σ³, r̄ a pair's mean, b the mean of all;
    1/(n−1), because b contains r̄ itself. No graph over the weights is built.

    σ is a vector, the leaf ``estimator.sigma``. ``backward()`` adds to its ``.grad`` as to the weights',
    and after a step of a torch optimizer that holds any of the weights it moves by
    Δσ/σ = −sigma_lr · σ∇σ / s, at most ``sigma_max_change``, within [sigma_min, sigma_max]: the natural
    gradient (a Gaussian's Fisher information is 2/σ²) of the loss in units of its spread s over pairs,
    so that ``sigma_lr`` has no unit and loss scaling and accumulation cancel. With another kind of
    update rule call ``step()`` after it. ``sigma_lr=0`` keeps σ.

    ``loss``: any callable; ``model``: the module whose parameters, or those in ``params`` (names or tensors), move.
    ``seed``: of the noise. ``actors``: Ray processes that share the work, 0 for none; ``factory``: what they make their
    own (model, loss) with, where the loss has none; ``ray_address``: a cluster that runs already; ``gpus_per_actor``:
    GPUs each of them is given. A call's ``generator`` decides what is random in the loss, not the noise.

    Whoever evaluates members elsewhere passes ``None`` for the loss and uses :meth:`ask` and :meth:`tell`.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = net.weight.data.fill_(1.0)
    >>> criterion = PGPE(lambda: 5 * net.weight.sum(), net, sigma=0.1, population=4000)
    >>> criterion().backward()
    >>> bool(abs(net.weight.grad.item() - 5) < 0.7)  # standard error 5·√(2/2000) = 0.16
    True
    """

    def __init__(
        self,
        loss: Loss | None,
        model: nn.Module,
        *,
        sigma: float,
        population: int = 256,
        sigma_lr: float = SIGMA_LR,
        sigma_min: float | None = None,
        sigma_max: float | None = None,
        sigma_max_change: float = 0.2,
        actors: int = 0,
        params: Params = None,
        seed: int = 0,
        factory: Factory | None = None,
        ray_address: str | None = None,
        gpus_per_actor: float = 0,
    ) -> None:
        # Four, because a spread and an unbiased ∇σ need two pairs.
        self.population = whole("population", population, least=4, even=True)
        self.sigma_lr = number("sigma_lr", sigma_lr, inclusive=True)
        start = number("sigma", sigma)
        self.sigma_min = start / 10 if sigma_min is None else number("sigma_min", sigma_min)
        self.sigma_max = start * 10 if sigma_max is None else number("sigma_max", sigma_max)
        self.sigma_max_change = number("sigma_max_change", sigma_max_change)
        require(self.sigma_max_change < 1, "sigma_max_change < 1", sigma_max_change)
        super().__init__(
            no_loss if loss is None else loss,
            model,
            params=params,
            seed=seed,
            actors=actors,
            factory=factory,
            ray_address=ray_address,
            gpus_per_actor=gpus_per_actor,
        )
        self.sigma = torch.empty(self.weights.size, dtype=self.weights.dtype, device=self.weights.device)
        self.set_sigma(start)
        self.sigma.requires_grad_()
        # A second leaf, whose "gradient" is the spread: what scales ∇σ on its way scales this alike.
        self._unit = torch.zeros((), dtype=self.weights.dtype, device=self.weights.device, requires_grad=True)
        self._asked: Population | None = None
        _follow_optimizers(self)

    def set_sigma(self, value: float) -> None:
        """Start σ anew with ``value`` for every weight."""
        start = number("sigma", value)
        limits = f"sigma between sigma_min={self.sigma_min:g} and sigma_max={self.sigma_max:g}"
        require(self.sigma_min <= start <= self.sigma_max, limits, value)
        self.sigma.data.fill_(start)

    def __call__(self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
        seeds = self._seeds(self.population // 2)
        task = self._task(args, kwargs, generator, self.sigma.detach().to(self.weights.device, copy=True))
        self._watch_batchnorm(task)
        shards = in_shards(seeds)
        pairs = [pair for shard in self._pool.map("pair_losses", task, [(b,) for b in shards]) for pair in shard]
        return self._estimate(task, shards, torch.tensor(pairs, dtype=torch.float64))

    def ask(self) -> Population:
        """The next population of perturbed weights, θ + ε and θ − ε alternating: a sequence of
        ``{name: tensor}``, each made when it is looked at.

        >>> net = nn.Linear(1, 1, bias=False)
        >>> _ = net.weight.data.fill_(1.0)
        >>> criterion = PGPE(None, net, sigma=0.1, population=4000)
        >>> members = criterion.ask()
        >>> criterion.tell([5 * float(member["weight"]) for member in members]).backward()
        >>> bool(abs(net.weight.grad.item() - 5) < 0.7)
        True
        """
        seeds = self._seeds(self.population // 2)
        task = self._task((), {}, None, self.sigma.detach().to(self.weights.device, copy=True))
        self._asked = Population(self._worker, task, seeds)
        return self._asked

    def tell(self, losses: Sequence[float] | Tensor) -> Tensor:
        """The mean of the losses of the members last asked for, in their order; its ``backward()`` delivers the
        estimate. Raises ConfigError without a population, for another number of losses, or for one that is not finite.
        """
        asked = self._asked
        if asked is None:
            raise ConfigError("tell() needs a population: call ask() first, and once for each tell()")
        values = torch.as_tensor(losses, dtype=torch.float64).detach().cpu()
        require(values.shape == (len(asked),), f"{len(asked)} losses, one per member", tuple(values.shape))
        require(bool(values.isfinite().all()), "finite losses", float(values[~values.isfinite()][:1].sum()))
        self._asked = None
        return self._estimate(asked.task, in_shards(asked.seeds), values.reshape(-1, 2))

    def _estimate(self, task: Task, shards: list[Any], losses: Tensor) -> Tensor:
        """The mean loss of all pairs (n, 2), whose ``backward()`` delivers the gradients."""
        value = float(losses.mean())
        sigma = self.sigma.detach()
        self.stats = {
            "loss": value,
            "spread": float(losses.std()),
            "sigma": float(sigma.mean()),
            "sigma_low": float(sigma.min()),
            "sigma_high": float(sigma.max()),
            "evaluations": float(self.population),
        }
        if not task.gradients:
            return self._scalar(value)
        means = losses.mean(1)
        by_theta, by_sigma = self._gradients(task, shards, losses[:, 0] - losses[:, 1], means - means.mean())
        return self._deliver(value, by_theta, (self.sigma, by_sigma), (self._unit, self._scalar(float(means.std()))))

    def _gradients(self, task: Task, shards: list[Any], differences: Tensor, centred: Tensor) -> tuple[Tensor, Tensor]:
        """∇θ and ∇σ from noise made once more from its seeds, so that memory does not grow with the population.

        With ε = σz the formulas become Σ z(r⁺−r⁻)/(2nσ) and Σ (r̄−b)z²/((n−1)σ): Σ(r̄−b) = 0 removes the −1.
        """
        n = len(differences)
        linear, square = in_shards(differences.tolist()), in_shards(centred.tolist())
        work = [
            (seeds, weights, squares if self.sigma_lr > 0 else None)
            for seeds, weights, squares in zip(shards, linear, square, strict=True)
        ]
        by_theta, by_sigma = torch.zeros_like(task.theta), torch.zeros_like(task.theta)
        for first, second in self._pool.map("noise_sums", task, work):
            by_theta.add_(first)
            if second is not None:
                by_sigma.add_(second)
        return by_theta.div_(task.sigma).div_(2 * n), by_sigma.div_(task.sigma).div_(n - 1)

    @torch.no_grad()
    def step(self) -> None:
        """Move σ by the gradients gathered since it last moved; nothing if there are none."""
        gradient, unit = self.sigma.grad, self._unit.grad
        self.sigma.grad = self._unit.grad = None
        if gradient is None or unit is None or self.sigma_lr == 0:
            return
        change = -self.sigma_lr * self.sigma * gradient / unit.abs()
        # A loss that is the same for all members, or not finite, says nothing about σ.
        change = torch.nan_to_num(change, nan=0.0, posinf=0.0, neginf=0.0)
        change.clamp_(-self.sigma_max_change, self.sigma_max_change)
        self.sigma.mul_(1 + change).clamp_(self.sigma_min, self.sigma_max)

    def state_dict(self) -> State:
        gradient = torch.zeros_like(self.sigma) if self.sigma.grad is None else self.sigma.grad
        unit = torch.zeros_like(self._unit) if self._unit.grad is None else self._unit.grad
        return {
            **super().state_dict(),
            "sigma": self.sigma.detach().clone(),
            "sigma_gradient": gradient.detach().clone(),
            "sigma_unit": unit.detach().clone(),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.sigma.data.copy_(torch.as_tensor(state["sigma"]))
        self.sigma.grad = torch.as_tensor(state["sigma_gradient"]).to(self.sigma).clone()
        self._unit.grad = torch.as_tensor(state["sigma_unit"]).to(self._unit).clone()


def _follow_optimizers(estimator: PGPE) -> None:
    """Let σ move when a torch optimizer has moved the weights, for as long as the estimator lives."""
    reference = weakref.ref(estimator)

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        living = reference()
        if living is None:
            return
        ours = {id(p) for p in living.weights.tensors}
        if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            living.step()

    handle = register_optimizer_step_post_hook(after)
    weakref.finalize(estimator, handle.remove)


def schedule(dataset: str, large: bool) -> dict[str, Any]:
    """The paper's: 150 epochs, ×0.4 after 110 and 130; ε annealed over 50 epochs only where it is ``large``."""
    return {
        "epochs": 150,
        "batch_size": 512 if dataset == "mnist" else 128,
        "lr": 3e-4,
        "lr_factor": 0.4,
        "milestones": (110, 130),
        "eps_warmup_epochs": 0,
        "eps_anneal_epochs": 50 if large else 0,
        "eps_shape": "smooth" if large else "none",
    }


ESTIMATORS.register(
    "pgpe",
    EstimatorMethod(
        "pgpe",
        PGPE,
        help="zeroth-order estimate from a population of perturbed networks",
        options=Options(
            Option("sigma", float, "standard deviation of the smoothing", strict=True, search=SIGMA_RANGE),
            Option("population", int, "perturbed networks per step", default=256, least=4, even=True),
            Option("sigma_lr", float, "learning rate of sigma; 0 keeps it", default=SIGMA_LR),
            Option("sigma_min", float, "least sigma (a tenth of the first one)", strict=True),
            Option("sigma_max", float, "largest sigma (ten times the first one)", strict=True),
            Option("sigma_max_change", float, "of sigma in one step, relative", default=0.2, strict=True),
        ),
        recipe={"sigma": 1e-3, "population": 256},
        needs_gradient=False,
        uses_actors=True,
        members="population",
        schedule=schedule,
        cold_start="PGPE moves slowly; the paper starts it from a PGD-trained network (--init-from RUN)",
    ),
)

"""Distillation from a robust teacher beside the bound, over any relaxation.

An adversarially trained network classifies better near its data than a certified one of the same size can; its
soft labels say more about an image than the label does. With PGD points x* of B_{ρε}(x), the teacher's logits
t(x) at the clean image, the student's f, the relaxation's lower bounds l of its margins over B_ε(x), and ℓ the
cross-entropy of margins,

    L = (1 − α) · [(1 − β) · CE(f(x*), y) + β · T² · KL(softmax(t(x)/T) ‖ softmax(f(x*)/T))] + α · ℓ(l).

β = 0 is ``mtl``, whatever the teacher says; T² keeps the size of the gradient when the temperature T changes. The
teacher is never trained, and sees images in its own eval mode.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gls_lirpa.base.boxes import linf_box
from gls_lirpa.base.modes import evaluating
from gls_lirpa.base.options import Option, Options, Range
from gls_lirpa.errors import ConfigError
from gls_lirpa.losses.expressive import ALPHA, RADIUS
from gls_lirpa.losses.terms import LOSSES, STEPS, Loss, LossInput, robust


def soft_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² · KL(softmax(teacher/T) ‖ softmax(student/T)), the mean over the batch.

    >>> logits = torch.tensor([[1.0, 2.0]])
    >>> soft_divergence(logits, logits, 3.0).item()
    0.0
    """
    own, wanted = F.log_softmax(student / temperature, dim=1), F.log_softmax(teacher / temperature, dim=1)
    return temperature**2 * F.kl_div(own, wanted, reduction="batchmean", log_target=True)


def distill(batch: LossInput, *, alpha: float, beta: float, temperature: float, radius: float, steps: int) -> Tensor:
    """The loss above; ``radius`` is the attack's, in units of ε. A part of weight 0 is not computed."""
    if alpha == 1.0:
        return robust(batch)
    logits = batch.logits(batch.adversarial(linf_box(batch.x, min(radius * batch.eps, 1.0)), steps=steps))
    attacked = (1.0 - beta) * F.cross_entropy(logits, batch.y)
    if beta > 0.0:
        attacked = attacked + beta * soft_divergence(logits, _teacher_logits(batch, logits), temperature)
    return attacked if alpha == 0.0 else (1.0 - alpha) * attacked + alpha * robust(batch)


@torch.no_grad()
def _teacher_logits(batch: LossInput, like: Tensor) -> Tensor:
    assert batch.teacher is not None, "CertifiedLoss asks for one"
    with evaluating(batch.teacher):
        logits: Tensor = batch.teacher(batch.x)
    if logits.shape != like.shape:
        classes = f"{logits.shape[-1]} classes, the student {like.shape[-1]}"
        raise ConfigError(f"the teacher has {classes}: expected the same")
    return logits


LOSSES.register(
    "distill",
    Loss(
        "distill",
        distill,
        bounds=True,
        options=Options(
            ALPHA,
            Option(
                *("beta", float, "the teacher's share of the adversarial part"),
                default=0.5,
                most=1.0,
                search=Range(0.0, 1.0),
            ),
            Option("temperature", float, "of the teacher's and the student's soft labels", default=1.0, least=1e-3),
            RADIUS,
            STEPS,
        ),
        relaxation="ibp",
        teacher=True,
        mixes=True,
        help="certified loss, and a robust teacher's soft labels at adversarial points",
    ),
    aliases=("distillation",),
)

"""Losses of certified training, all called ``loss(x, y, *, eps=None, generator=None)``."""

from gls_lirpa.losses import distillation, expressive, fusion, sabr, taps
from gls_lirpa.losses.certified import CertifiedLoss
from gls_lirpa.losses.terms import LOSSES, Loss, LossInput

__all__ = ["LOSSES", "CertifiedLoss", "Loss", "LossInput", "distillation", "expressive", "fusion", "sabr", "taps"]

"""Losses of certified training, all called ``loss(x, y, *, eps=None, generator=None)``.

Each is a file that ends in ``LOSSES.register``, with its options and what was published for them. Published options
were tuned for networks of 10⁷ parameters (CNN7 with BatchNorm): a place to start from. Not among them is the ε of
training, where it was larger: CTBench trains sabr, taps, staps and mtl for MNIST 0.1 at 0.2, TAPS for MNIST 0.3 at
0.4, SABR for CIFAR-10 2/255 at 3/255.
"""

from gls_lirpa.losses import distillation, expressive, fusion, sabr, taps
from gls_lirpa.losses.certified import CertifiedLoss
from gls_lirpa.losses.terms import LOSSES, Loss, LossInput

__all__ = ["LOSSES", "CertifiedLoss", "Loss", "LossInput", "distillation", "expressive", "fusion", "sabr", "taps"]

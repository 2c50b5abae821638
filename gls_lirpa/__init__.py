"""Certified training with tight convex relaxations: Gaussian Loss Smoothing on top of auto_LiRPA.

>>> import torch
>>> from torch import nn
>>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
>>> criterion = CertifiedLoss(model, relaxation="crown", eps=0.1)
>>> criterion = RGS(criterion, model, sigma=1e-3, samples=2)
>>> criterion(torch.rand(2, 1, 2, 2), torch.tensor([0, 2])).backward()
"""

from gls_lirpa import zoo
from gls_lirpa.api import TrainedRun, load_run, train
from gls_lirpa.base.balls import l2_ball
from gls_lirpa.base.boxes import Bounds, Box, linf_box
from gls_lirpa.certification import Certification, Radii, Record, certified_radius, certify
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.errors import GLSError
from gls_lirpa.estimators import GRAD, PGPE, RGS, SAM, reset_batchnorm
from gls_lirpa.losses import CertifiedLoss
from gls_lirpa.models import build_model
from gls_lirpa.relaxations import RELAXATIONS, Relaxation, get_relaxation
from gls_lirpa.version import __version__

__all__ = [
    "GRAD",
    "PGPE",
    "RELAXATIONS",
    "RGS",
    "SAM",
    "BoundEngine",
    "Bounds",
    "Box",
    "Certification",
    "CertifiedLoss",
    "GLSError",
    "Radii",
    "Record",
    "Relaxation",
    "TrainedRun",
    "__version__",
    "build_model",
    "certified_radius",
    "certify",
    "get_relaxation",
    "l2_ball",
    "linf_box",
    "load_run",
    "reset_batchnorm",
    "train",
    "zoo",
]

"""Estimators of the (smoothed) loss's gradient, each a drop-in wrapper around any loss.

``RGS(loss, model, sigma=1e-3)`` is called like ``loss`` and returns a scalar whose ``backward()`` adds the
estimate to the parameters' ``.grad``. Names for configuration files are in ``ESTIMATORS``.
"""

from __future__ import annotations

from gls_lirpa.estimators.batchnorm import reset_batchnorm
from gls_lirpa.estimators.grad import GRAD
from gls_lirpa.estimators.methods import ESTIMATORS, EstimatorMethod
from gls_lirpa.estimators.pgpe import PGPE
from gls_lirpa.estimators.protocol import Estimator
from gls_lirpa.estimators.rgs import RGS
from gls_lirpa.estimators.sam import SAM

__all__ = ["ESTIMATORS", "GRAD", "PGPE", "RGS", "SAM", "Estimator", "EstimatorMethod", "reset_batchnorm"]

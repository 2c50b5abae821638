"""Estimators of the (smoothed) loss's gradient, each a drop-in wrapper around any loss.

``RGS(loss, model, sigma=1e-3)`` is called like ``loss`` and returns a scalar whose ``backward()`` adds the
estimate to the parameters' ``.grad``. Names for configuration files are in ``ESTIMATORS``.
"""

from __future__ import annotations

from collections.abc import Callable

from gls_lirpa.base.registry import Registry
from gls_lirpa.estimators.batchnorm import reset_batchnorm
from gls_lirpa.estimators.grad import GRAD
from gls_lirpa.estimators.pgpe import PGPE
from gls_lirpa.estimators.protocol import Estimator
from gls_lirpa.estimators.rgs import RGS
from gls_lirpa.estimators.sam import SAM

__all__ = ["ESTIMATORS", "GRAD", "PGPE", "RGS", "SAM", "Estimator", "reset_batchnorm"]

# Each is called as ESTIMATORS.get(name)(loss, model, **options).
ESTIMATORS: Registry[Callable[..., Estimator]] = Registry("estimator")
ESTIMATORS.register("grad", GRAD)
ESTIMATORS.register("rgs", RGS)
ESTIMATORS.register("pgpe", PGPE)
ESTIMATORS.register("sam", SAM)

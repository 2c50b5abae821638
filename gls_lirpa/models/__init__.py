"""Networks: those of the paper, a user's own, and what can be done to their layers."""

from gls_lirpa.base.normalize import Normalize
from gls_lirpa.models.initialization import INITIALIZERS, initialize
from gls_lirpa.models.networks import MODELS, Architecture, Conv, ConvNet, build_model
from gls_lirpa.models.structure import count_parameters, fold_batchnorm, split_blocks
from gls_lirpa.models.user import load_user_model

__all__ = [
    "INITIALIZERS",
    "MODELS",
    "Architecture",
    "Conv",
    "ConvNet",
    "Normalize",
    "build_model",
    "count_parameters",
    "fold_batchnorm",
    "initialize",
    "load_user_model",
    "split_blocks",
]

"""Why tight relaxations are hard to train with: loss landscapes, their scores, tightness, toys, training curves."""

from gls_lirpa.analysis.dynamics import Dynamics, RunCurve, training_dynamics
from gls_lirpa.analysis.landscape import Curve, Landscape, loss_landscape
from gls_lirpa.analysis.pictures import draw_dynamics, draw_landscape, draw_scores, draw_tightness, draw_toys
from gls_lirpa.analysis.scores import Scores, smoothness_scores
from gls_lirpa.analysis.surface import Surface, draw_surface, sampled_surface
from gls_lirpa.analysis.tightness import Tightness, area_under, tightness_curves
from gls_lirpa.analysis.toys import Toy, jump_toy, valley_toy

__all__ = [
    "Curve",
    "Dynamics",
    "Landscape",
    "RunCurve",
    "Scores",
    "Surface",
    "Tightness",
    "Toy",
    "area_under",
    "draw_dynamics",
    "draw_landscape",
    "draw_scores",
    "draw_surface",
    "draw_tightness",
    "draw_toys",
    "jump_toy",
    "loss_landscape",
    "sampled_surface",
    "smoothness_scores",
    "tightness_curves",
    "training_dynamics",
    "valley_toy",
]

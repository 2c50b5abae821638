"""Training runs: configuration, presets, the loop, and the run folder."""

from gls_lirpa.base.interruption import Interrupted
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.loop import Reporter, train
from gls_lirpa.training.presets import PRESETS, get_preset, preset_of
from gls_lirpa.training.reporters import Several, Silent
from gls_lirpa.training.runs import Run, RunFolder, load_run
from gls_lirpa.training.summary import write_summary

__all__ = [
    "PRESETS",
    "Interrupted",
    "Reporter",
    "Run",
    "RunFolder",
    "Several",
    "Silent",
    "TrainConfig",
    "get_preset",
    "load_run",
    "preset_of",
    "train",
    "write_summary",
]

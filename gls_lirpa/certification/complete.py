"""The complete verifiers as stages of the cascade."""

from __future__ import annotations

from gls_lirpa.certification.branch import BranchAndBound
from gls_lirpa.certification.branch_settings import Settings as BranchSettings
from gls_lirpa.certification.input_split import InputSettings, InputSplit
from gls_lirpa.certification.milp import ExactOracle
from gls_lirpa.certification.stage import STAGES, Stage, StageOptions


def _branch_stage(options: StageOptions) -> Stage:
    return BranchAndBound(BranchSettings(max_nodes=options.max_nodes))


def _input_stage(options: StageOptions) -> Stage:
    return InputSplit(InputSettings(max_nodes=options.max_nodes))


def _exact_stage(options: StageOptions) -> Stage:
    del options  # none concerns it
    return ExactOracle()


STAGES.register("bab", _branch_stage, aliases=("branch-and-bound",))
STAGES.register("input-split", _input_stage, aliases=("input-bab",))
STAGES.register("milp", _exact_stage, aliases=("exact",))

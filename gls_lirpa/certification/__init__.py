"""Certification: attacks, convex relaxations and what is built on them, cheapest first."""

from gls_lirpa.certification.api import certify
from gls_lirpa.certification.attack import Attacked, pgd
from gls_lirpa.certification.cascade import Cascade
from gls_lirpa.certification.radius import Radii, certified_radius
from gls_lirpa.certification.records import Record, RecordFolder, Summary
from gls_lirpa.certification.result import Certification
from gls_lirpa.certification.settings import DEFAULT_STAGES, Settings
from gls_lirpa.certification.stage import STAGES, Findings, OpenSamples, Stage, StageOptions, Subject
from gls_lirpa.solver import SolverSettings

__all__ = [
    "DEFAULT_STAGES",
    "STAGES",
    "Attacked",
    "Cascade",
    "Certification",
    "Findings",
    "OpenSamples",
    "Radii",
    "Record",
    "RecordFolder",
    "Settings",
    "SolverSettings",
    "Stage",
    "StageOptions",
    "Subject",
    "Summary",
    "certified_radius",
    "certify",
    "pgd",
]

"""The installation's health, found by computing small bounds."""

from gls_lirpa.doctor.report import deep_report, report, route_report

__all__ = ["deep_report", "report", "route_report"]

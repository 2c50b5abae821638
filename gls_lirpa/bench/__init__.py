"""Suites of runs with a report: the paper's tables and figures on one's own machine."""

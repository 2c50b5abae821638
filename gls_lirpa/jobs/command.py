"""``glscert certify`` in its three forms: samples of a dataset, one property, a table of properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gls_lirpa.errors import ConfigError
from gls_lirpa.jobs.certify import certify_job
from gls_lirpa.jobs.exchange import instances_job, limits_of, property_job

LIMITS = ("stages", "timeout", "seed", "max_nodes", "bab")


def certify_command(
    path: Path | None,
    *,
    vnnlib: Path | None,
    csv: Path | None,
    witness: Path | None,
    result: Path | None,
    command: str,
    given: set[str],
    options: dict[str, Any],
) -> None:
    """Do what the command line asks for. ``given``: names of the options that the user wrote."""
    if vnnlib is not None and csv is not None:
        raise ConfigError("--vnnlib and --csv exclude each other")
    limits = {name: options[name] for name in LIMITS}
    if csv is not None:
        _refuse(given - {"csv", "out", *LIMITS} | given & {"timeout"}, "--csv, whose rows name networks and timeouts")
        if path is not None:
            raise ConfigError(f"--csv names the networks itself: remove {str(path)!r}")
        instances_job(csv, limits_of(**limits), out=options["out"], command=command)
        return
    if path is None:
        raise ConfigError("expected a run folder, an ONNX file or a weight file to certify")
    if vnnlib is not None:
        _refuse(given - {"vnnlib", "witness", "result", *LIMITS}, "--vnnlib")
        property_job(path, vnnlib, limits_of(**limits), witness=witness, result=result)
        return
    _refuse(given & {"witness", "result"}, "samples of a dataset: each one's file is in the result folder")
    certify_job(path, **options, command=command)


def _refuse(names: set[str], where: str) -> None:
    if names:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
        raise ConfigError(f"{shown} cannot be used with {where}")

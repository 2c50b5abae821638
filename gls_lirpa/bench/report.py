"""The report of a suite: one self-contained HTML page, and Markdown, CSV, JSON and PNG beside it."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import platform
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined

from gls_lirpa.base.files import replace_file
from gls_lirpa.bench.outcomes import Outcome, outcomes_csv
from gls_lirpa.bench.sections import Section
from gls_lirpa.bench.suite import Budget, PlannedRun, Suite
from gls_lirpa.engine.compat import versions


def hardware() -> dict[str, str]:
    """What the numbers were made on, without anything that names the machine."""
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }
    if hasattr(os, "sysconf"):
        found["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    if torch.cuda.is_available():
        found["gpu"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def write_report(
    out: Path,
    suite: Suite,
    budget: Budget,
    runs: Sequence[PlannedRun],
    outcomes: Sequence[Outcome],
    sections: Sequence[Section],
) -> Path:
    """Write all files into ``out``; returns the page."""
    content: dict[str, Any] = {
        "suite": suite.name,
        "summary": suite.summary,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "changes": budget.changes(suite),
        "versions": versions(),
        "hardware": hardware(),
        "failures": [o for o in outcomes if not o.done],
        "sections": sections,
        "configurations": {run.name: _settings(run) for run in runs},
    }
    for section in sections:
        for table in section.tables:
            replace_file(out / f"{table.name}.csv", table.csv().encode())
    if outcomes:
        replace_file(out / "runs.csv", outcomes_csv(outcomes).encode())
    replace_file(out / "report.json", _json(content).encode())
    replace_file(out / "report.md", _markdown(content).encode())
    page = out / "report.html"
    replace_file(page, _page(content).encode())
    return page


def _settings(run: PlannedRun) -> dict[str, Any]:
    movable = ("data_root", "init_from", "ray_address")
    fields = {key: value for key, value in run.config.to_dict().items() if key not in movable}
    return {**fields, "starts_from": run.needs, "certified_samples": run.samples, "timeout": run.timeout}


def _json(content: dict[str, Any]) -> str:
    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        return value.name if isinstance(value, Path) else str(value)

    return json.dumps(content, indent=2, default=plain) + "\n"


def _markdown(content: dict[str, Any]) -> str:
    lines = [f"# {content['suite']}", "", content["summary"], ""]
    for change in content["changes"]:
        lines += [f"**Shortened: {change}.**", ""]
    for section in content["sections"]:
        lines += [f"## {section.title}", ""]
        for paragraph in section.paragraphs:
            lines += [paragraph, ""]
        for table in section.tables:
            lines += [table.markdown(), ""]
        for figure in section.figures:
            lines += [f"![{figure.caption}]({figure.file.name})", "", figure.caption, ""]
    if content["failures"]:
        lines += ["## Runs without a result", ""]
        lines += [f"- {outcome.name}: {outcome.status}, {outcome.reason}" for outcome in content["failures"]] + [""]
    facts = {**content["hardware"], **content["versions"]}
    lines += ["## Made with", "", ", ".join(f"{key} {value}" for key, value in facts.items()), ""]
    return "\n".join(lines)


def _page(content: dict[str, Any]) -> str:
    template = resources.files("gls_lirpa.bench").joinpath("report.html.j2").read_text()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["picture"] = _embedded
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=2, default=str)
    return environment.from_string(template).render(**content)


def _embedded(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"

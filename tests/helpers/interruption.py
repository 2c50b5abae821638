"""A suite that is interrupted and goes on."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def check_interruption(tmp_path: Path, *, workers: int) -> None:
    """Ctrl-C in the middle of a run; the same command then gives what an uninterrupted suite gives."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = (
        "import sys, dataclasses; from pathlib import Path; from gls_lirpa.bench.job import bench_job\n"
        "from gls_lirpa.bench.suite import Budget, Cell, Suite\n"
        "o = dict(dataset='digits', net='cnn3-tiny', relaxation='crown-ibp', estimator='rgs', epochs=6, limit=400, "
        "milestones=(4,), eps_anneal_epochs=2.0)\n"
        "s = Suite('s', '', (Cell('', 'crown-ibp', 'rgs', o),), seeds=(0, 1), samples=10, timeout=2.0)\n"
        "bench_job(s, out=Path(sys.argv[1]), budget=Budget(), workers=int(sys.argv[2]), command='again')\n"
    )
    file = tmp_path / "suite.py"
    file.write_text(script)
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def command(out: Path) -> list[str]:
        return [sys.executable, str(file), str(out), str(workers)]

    subprocess.run(command(whole), check=True, capture_output=True, env=environment)
    process = subprocess.Popen(
        command(cut), env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    metrics = cut / "runs" / "crown-ibp-rgs-s0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    _, error = process.communicate(timeout=120)
    assert process.returncode != 0
    assert b"continue with `again`" in error
    assert not (cut / "report.html").exists()
    subprocess.run(command(cut), check=True, capture_output=True, env=environment)

    def results(out: Path) -> list[dict[str, str]]:
        timing = ("train_seconds", "certify_seconds")
        rows = csv.DictReader((out / "runs.csv").read_text().splitlines())
        return [{key: value for key, value in row.items() if key not in timing} for row in rows]

    assert results(cut) == results(whole)

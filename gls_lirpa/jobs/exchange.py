"""Properties and exports as the command line asks for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gls_lirpa.base.boxes import check_eps
from gls_lirpa.base.checks import require
from gls_lirpa.base.files import replace_file
from gls_lirpa.base.interruption import Interrupted
from gls_lirpa.certification import SolverSettings
from gls_lirpa.errors import ConfigError
from gls_lirpa.exchange.export import write_instances, write_onnx
from gls_lirpa.exchange.instances import ResultFolder, decide_instances, read_instances, timed_answer
from gls_lirpa.exchange.query import Answer, Limits
from gls_lirpa.jobs.certify import stage_names
from gls_lirpa.jobs.targets import is_onnx, load_target


def limits_of(
    *,
    stages: str | None,
    timeout: float,
    seed: int,
    max_nodes: int | None,
    bab: Sequence[tuple[str, float]] = (),
) -> Limits:
    """Limits as the command line gives them; wrong ones are refused before any file is read."""
    limits = Limits(stage_names(stages), timeout, seed, max_nodes, SolverSettings.of(dict(bab)))
    return replace(limits, stages=limits.settings(timeout).stages)


def property_job(
    path: Path, vnnlib: Path, limits: Limits, *, witness: Path | None = None, result: Path | None = None
) -> Answer:
    """Decide one property; the answer goes to standard output.

    ``witness``: where a counterexample goes, "-" for standard output; ``result``: a file in the form of
    VNN-COMP, the answer in its first line and a counterexample below.
    """
    if not is_onnx(path):
        raise ConfigError(f"--vnnlib needs a network in an .onnx file, got {str(path)!r}")
    for option, file in (("--witness", witness), ("--result", result)):
        if file is not None and any(file.exists() and file.samefile(given) for given in (path, vnnlib)):
            raise ConfigError(f"{option} {str(file)!r} would overwrite what is to be decided: choose another file")
    answer = timed_answer(path, vnnlib, limits)
    lines = [answer.verdict]
    if answer.counterexample is not None and witness is not None:
        text = answer.counterexample.text()
        if str(witness) == "-":
            lines.append(text)
        else:
            _write(witness, text + "\n")
    if result is not None:
        found = [] if answer.counterexample is None else [answer.counterexample.text()]
        _write(result, "\n".join([answer.verdict, *found]) + "\n")
    Console(soft_wrap=True).print("\n".join(lines), highlight=False, markup=False)
    console = Console(stderr=True)
    detail = f" ({answer.reason})" if answer.reason else ""
    if answer.counterexample is not None and witness is None and result is None:
        detail = " (add --witness - to print the counterexample, or --witness FILE to keep it)"
    console.print(f"{answer.seconds:.2f} s{detail}", highlight=False, markup=False)
    return answer


def _write(file: Path, text: str) -> None:
    try:
        replace_file(file, text.encode())
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be written: {error.strerror}") from error


def instances_job(table: Path, limits: Limits, *, out: Path | None = None, command: str = "") -> Counter[str]:
    """Decide every row of an ``instances.csv``, or go on with it; a line per row goes to standard output."""
    instances = read_instances(table)
    folder = ResultFolder(out or table.with_name(f"{table.stem}-results"), limits, instances)
    console, output = Console(stderr=True), Console(soft_wrap=True)
    if folder.done:
        console.print(f"{len(folder.done)} of {len(instances)} rows are in {folder.path} already", highlight=False)
    try:
        for result in decide_instances(table, instances, folder, limits):
            row = result.instance
            detail = f" {result.reason}" if result.reason else ""
            output.print(
                f"{result.verdict} {row.onnx} {row.vnnlib} {result.seconds:.2f}{detail}", highlight=False, markup=False
            )
    except KeyboardInterrupt:
        kept = f"interrupted: {len(folder.done)} of {len(instances)} rows are kept in {str(folder.path)!r}"
        raise Interrupted(f"{kept}; continue with `{command}`" if command else kept) from None
    folder.write_vnncomp(table.resolve().parent.name)
    counts = Counter(result.verdict for result in folder.done.values())
    numbers = ", ".join(f"{verdict} {number}" for verdict, number in counts.most_common())
    console.print(f"{numbers}; results: {folder.path / 'results.csv'}", highlight=False)
    return counts


def export_job(
    path: Path,
    *,
    onnx: Path,
    vnnlib: Path | None = None,
    samples: int = 10,
    eps: float | None = None,
    split: str = "test",
    timeout: float = 60.0,
    dataset: str | None = None,
    data_root: str | None = None,
    net: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a run's network as ONNX and, if ``vnnlib`` names a folder, the first samples' properties."""
    console = Console(stderr=True)
    target = load_target(path, dataset=dataset, data_root=data_root, net=net)
    radius = target.eps if eps is None else eps
    if vnnlib is not None and radius is None:
        raise ConfigError(f"{str(path)!r} does not say for which radius: add --eps")
    if radius is not None:
        check_eps(radius)
    require(samples >= 1, "samples >= 1", samples)
    write_onnx(target.model, target.dataset.in_shape, onnx, overwrite=overwrite)
    console.print(f"network: {onnx}", highlight=False)
    if vnnlib is None or radius is None:
        return
    chosen = target.dataset.split(split)
    x, labels = chosen.batch(list(range(min(samples, len(chosen)))))
    table = write_instances(
        onnx,
        x,
        labels,
        vnnlib,
        eps=radius,
        outputs=target.dataset.classes,
        timeout=timeout,
        overwrite=overwrite,
        title=f"{target.dataset.name} {split} ",
    )
    console.print(f"{len(x)} properties: {table}", highlight=False)

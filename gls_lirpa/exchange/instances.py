"""A VNN-COMP ``instances.csv`` worked through row by row, with results that survive a kill."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gls_lirpa.base.files import replace_file
from gls_lirpa.errors import CheckpointError, ConfigError, DataError, GLSError
from gls_lirpa.exchange.deadline import TimeLimit, time_limit
from gls_lirpa.exchange.onnx_model import import_libraries, read_onnx
from gls_lirpa.exchange.query import Answer, Limits, decide
from gls_lirpa.exchange.vnnlib import read_vnnlib

COLUMNS = ("row", "onnx", "vnnlib", "timeout", "verdict", "seconds", "reason", "counterexample")


@dataclass(frozen=True)
class Instance:
    """One row: files relative to the table, and the seconds it may take, as written there."""

    row: int
    onnx: str
    vnnlib: str
    timeout: str

    def limits(self, limits: Limits) -> Limits:
        try:
            timeout = float(self.timeout)
        except ValueError:
            timeout = math.nan
        if not math.isfinite(timeout) or timeout <= 0:
            raise DataError(f"expected a timeout in seconds, got {self.timeout!r}")
        return dataclasses.replace(limits, timeout=timeout)


def read_instances(path: Path) -> list[Instance]:
    """The rows of an ``instances.csv``: onnx, vnnlib, timeout.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "instances.csv"
    >>> _ = file.write_text("net.onnx,prop.vnnlib,60\\n")
    >>> read_instances(file)
    [Instance(row=1, onnx='net.onnx', vnnlib='prop.vnnlib', timeout='60')]
    """
    try:
        rows = [row for row in csv.reader(path.read_text().splitlines()) if row]
    except OSError as error:
        raise DataError(f"instances {str(path)!r} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"instances {str(path)!r} cannot be read: {error}") from error
    short = next((number for number, row in enumerate(rows, start=1) if len(row) < 3), None)
    if not rows or short is not None:
        where = "it is empty" if short is None else f"row {short} has fewer than three columns"
        raise DataError(f"instances {str(path)!r} must have the columns onnx, vnnlib, timeout: {where}")
    return [Instance(number, *(cell.strip() for cell in row[:3])) for number, row in enumerate(rows, start=1)]


@dataclass(frozen=True)
class InstanceResult:
    """What is known of a row; ``verdict`` may also be error."""

    instance: Instance
    verdict: str
    seconds: float
    reason: str = ""
    counterexample: str = ""

    def cells(self) -> list[str]:
        own = self.instance
        return [
            *(str(own.row), own.onnx, own.vnnlib, own.timeout, self.verdict),
            *(f"{self.seconds:.3f}", self.reason, self.counterexample),
        ]


class ResultFolder:
    """``results.csv``, ``settings.json`` and ``counterexamples/``; ``vnncomp.csv`` for the competition's tools.

    Opening it again resumes: rows with an answer are kept, errors are tried again, a line cut short
    by a kill is dropped.
    """

    def __init__(self, path: Path, limits: Limits, instances: list[Instance]) -> None:
        self.path = path
        self._table = path / "results.csv"
        try:
            (path / "counterexamples").mkdir(parents=True, exist_ok=True)
            self._check_settings(limits)
            self.done = self._read(instances)
            replace_file(self._table, _lines([list(COLUMNS), *(result.cells() for result in self.done.values())]))
        except OSError as error:
            raise ConfigError(f"output folder {str(path)!r} cannot be written: {error.strerror}") from error

    def add(self, instance: Instance, answer: Answer) -> InstanceResult:
        """Append a row; its counterexample is written first, so no row lacks its file."""
        name = ""
        if answer.counterexample is not None:
            name = f"counterexamples/{instance.row}.txt"
            replace_file(self.path / name, (answer.counterexample.text() + "\n").encode())
        return self._append(InstanceResult(instance, answer.verdict, answer.seconds, answer.reason, name))

    def fail(self, instance: Instance, seconds: float, reason: str) -> InstanceResult:
        return self._append(InstanceResult(instance, "error", seconds, reason))

    def write_vnncomp(self, category: str) -> Path:
        """The competition's own table: category, onnx, vnnlib, seconds of preparation, result, seconds."""
        file = self.path / "vnncomp.csv"
        results = sorted(self.done.values(), key=lambda result: result.instance.row)
        rows = [
            [category, own.instance.onnx, own.instance.vnnlib, "0", own.verdict, f"{own.seconds:.3f}"]
            for own in results
        ]
        replace_file(file, _lines(rows))
        return file

    def _append(self, result: InstanceResult) -> InstanceResult:
        with self._table.open("ab") as file:
            file.write(_lines([result.cells()]))
        self.done[result.instance.row] = result
        return result

    def _check_settings(self, limits: Limits) -> None:
        file = self.path / "settings.json"
        content = {
            "stages": list(limits.stages),
            "seed": limits.seed,
            "max_nodes": limits.max_nodes,
            "bab": dataclasses.asdict(limits.bab),
        }
        if file.exists() and json.loads(file.read_text()) != content:
            raise ConfigError(f"{str(self.path)!r} holds results made with other settings: choose another --out")
        replace_file(file, (json.dumps(content) + "\n").encode())

    def _read(self, instances: list[Instance]) -> dict[int, InstanceResult]:
        if not self._table.exists():
            return {}
        content = self._table.read_text()
        whole = content[: content.rfind("\n") + 1]
        known = {instance.row: instance for instance in instances}
        done: dict[int, InstanceResult] = {}
        for cells in list(csv.reader(io.StringIO(whole)))[1:]:
            instance = known.get(int(cells[0])) if len(cells) == len(COLUMNS) and cells[0].isdigit() else None
            if instance is None or cells[1:4] != [instance.onnx, instance.vnnlib, instance.timeout]:
                raise CheckpointError(f"{str(self._table)!r} holds results of other instances: choose another --out")
            if cells[4] != "error":
                done[instance.row] = InstanceResult(instance, cells[4], float(cells[5]), cells[6], cells[7])
        return done


def _lines(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[" ".join(cell.split()) for cell in row] for row in rows])
    return text.getvalue().encode()


def timed_answer(onnx: Path, vnnlib: Path, limits: Limits) -> Answer:
    """The answer to one property within its time, reading included."""
    import_libraries()  # not the property's time, and an import must not be cut off
    started = time.monotonic()
    try:
        with time_limit(limits.timeout) as started:
            query = read_vnnlib(vnnlib)
            return decide(read_onnx(onnx), query, limits, started=started)
    except TimeLimit:
        return Answer("timeout", time.monotonic() - started)


def decide_instances(
    table: Path, instances: list[Instance], folder: ResultFolder, limits: Limits
) -> Iterator[InstanceResult]:
    """Decide the rows that ``folder`` lacks, one after the other; a row that fails does not stop the others."""
    for instance in instances:
        if instance.row in folder.done:
            continue
        started = time.monotonic()
        try:
            answer = timed_answer(_file(table, instance.onnx), _file(table, instance.vnnlib), instance.limits(limits))
        except (GLSError, RuntimeError, MemoryError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            yield folder.fail(instance, time.monotonic() - started, line)
        else:
            yield folder.add(instance, answer)


def _file(table: Path, name: str) -> Path:
    """A file named in the table; benchmarks are often published packed."""
    path, packed = table.parent / name, table.parent / f"{name}.gz"
    return packed if packed.exists() and not path.exists() else path

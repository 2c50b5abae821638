"""Raw outcomes of finished runs as small files, enough to recompute every table and interval from them.

One JSON file per run: configuration without the machine's paths, commit and versions, how it was certified,
and a letter for the verdict on each image. Accuracies stand there for the reader; what is computed with are
the letters, and a file whose numbers are not those of its letters is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import Any

from rich.console import Console

from gls_lirpa.base.files import replace_file
from gls_lirpa.base.provenance import commit
from gls_lirpa.bench.bootstrap import Unit
from gls_lirpa.bench.letters import adversarial, certified, natural, packed, read_letters, unpacked
from gls_lirpa.errors import CheckpointError, ConfigError
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.runs import RunFolder

_OF_THE_MACHINE = ("data_root", "device", "actors", "ray_address", "gpus_per_actor")


@dataclass(frozen=True)
class Result:
    """One run, trained and certified. ``method`` and ``estimator`` are its row and column in the experiment's table.

    ``exploratory``: its settings were chosen after looking at outcomes like it. Accuracies are in per cent.
    """

    name: str
    experiment: str
    method: str
    estimator: str
    seed: int
    start: str
    exploratory: bool
    commit: str | None
    versions: dict[str, str]
    config: dict[str, Any]
    certification: dict[str, Any]
    epochs: int
    train_seconds: float
    certify_seconds: float
    samples: int
    natural: float
    adversarial: float
    certified: float
    unknown: int
    verdicts: str

    @property
    def letters(self) -> str:
        return unpacked(self.verdicts)

    @property
    def unit(self) -> Unit:
        return Unit(self.start, self.seed)

    @property
    def content(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()

    def write(self, folder: Path) -> Path:
        file = folder / f"{self.name}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(file, self.content)
        except OSError as error:
            raise ConfigError(
                f"{str(file)!r} cannot be written: {error.strerror}; choose another folder with --out"
            ) from error
        return file

    def __str__(self) -> str:
        return (
            f"{self.method} {self.estimator} seed {self.seed}, natural {self.natural:.2f} %, "
            f"certified {self.certified:.2f} % of {self.samples}"
        )


def collect(
    run: Path,
    *,
    experiment: str,
    name: str | None = None,
    method: str | None = None,
    estimator: str | None = None,
    exploratory: bool = False,
    made_by: str | None = None,
    split: str = "test",
    certification: Path | None = None,
) -> Result:
    """What is worth keeping of a run folder with its certification.

    ``method`` is by default the relaxation, after the loss where that is not ``robust``. ``made_by``: the commit
    that trained it, for runs that did not note theirs. ``split``: the images that were certified, test or val;
    ``certification``: its folder, where there are several.
    """
    folder = RunFolder(run)
    config = folder.config()
    if not folder.weights_file.exists():
        raise CheckpointError(f"run {str(run)!r} is not finished: continue it with --resume")
    records = certification or _certification(run, config, split)
    settings = _json(records / "settings.json")
    letters = read_letters(records)
    due = settings.get("samples")
    if len(letters) != due:
        raise CheckpointError(f"{str(records)!r} holds {len(letters)} of {due} images: finish the certification first")
    versions = _json(run / "versions.json")
    noted = versions.pop("commit", None)
    rows = folder.metrics()
    start = "" if config.init_from is None else PurePath(config.init_from).name
    return Result(
        name=name or run.resolve().name,
        experiment=experiment,
        method=method or _method(config),
        estimator=estimator or config.estimator,
        seed=config.seed,
        start=start,
        exploratory=exploratory,
        commit=made_by or noted or commit(),
        versions=versions,
        config={key: value for key, value in config.to_dict().items() if key not in _OF_THE_MACHINE}
        | {"init_from": start or None, "net": PurePath(config.net).name}
        | {"teacher": None if config.teacher is None else PurePath(config.teacher).name},
        certification={key: value for key, value in settings.items() if key not in ("weights", "samples")},
        epochs=len(rows),
        train_seconds=round(sum(row["seconds"] for row in rows), 1),
        certify_seconds=round(float(_json(records / "summary.json").get("seconds", 0.0)), 1),
        **_accuracies(letters),
        verdicts=packed(letters),
    )


def collect_job(
    runs: Sequence[Path], *, out: Path, name: str | None, certification: Path | None, force: bool, **options: Any
) -> None:
    """Collect runs into ``out`` and say what came of each; files that hold something else are kept unless forced."""
    if name is not None and name != PurePath(name).name:
        raise ConfigError(f"expected a --name without a folder, got {name!r}: --out is the folder")
    if len(runs) > 1 and (name is not None or certification is not None):
        raise ConfigError("--name and --certification are for one run, got several")
    results = [collect(run, name=name, certification=certification, **options) for run in runs]
    for position, result in enumerate(results):
        if result.name in {other.name for other in results[:position]}:
            raise ConfigError(f"two runs are called {result.name!r}: collect them one by one, each with its --name")
        if not force:
            _refuse_loss(result, out / f"{result.name}.json")
    console = Console(stderr=True)
    for result in results:
        console.print(f"{result.write(out)}: {result}", highlight=False, soft_wrap=True)


def _refuse_loss(result: Result, file: Path) -> None:
    if not file.exists() or (file.is_file() and file.read_bytes() == result.content):
        return
    try:
        held = read_result(file)
        other = f"{held.experiment}, {held}" if str(held) != str(result) else "the same run collected differently"
    except CheckpointError:
        other = "something else"
    raise ConfigError(f"{str(file)!r} holds {other}: choose another --name or --out, or replace it with --force")


def read_results(folder: Path) -> list[Result]:
    """All results in a folder, by name."""
    return [read_result(file) for file in sorted(folder.glob("*.json"))]


def read_result(file: Path) -> Result:
    content = _json(file)
    if set(content) != {field.name for field in fields(Result)}:
        raise CheckpointError(f"{str(file)!r} is not a result file: collect its run again")
    result = Result(**content)
    if _accuracies(result.letters) != {key: content[key] for key in _accuracies("v")}:
        raise CheckpointError(f"{str(file)!r} is damaged: its accuracies are not those of its verdicts")
    return result


def _accuracies(letters: str) -> dict[str, Any]:
    shares = {"natural": natural, "adversarial": adversarial, "certified": certified}
    return {
        "samples": len(letters),
        **{name: round(100 * float(bits(letters).mean()), 6) for name, bits in shares.items()},
        "unknown": letters.count("u") + letters.count("x"),
    }


def _method(config: TrainConfig) -> str:
    parts = config.method.split("·")[:-1]
    return " ".join(part for part in parts if part != "robust")


def _certification(run: Path, config: TrainConfig, split: str) -> Path:
    """The folder of the run's certification at its own radius on a split."""
    found = []
    for file in sorted(run.glob("*/settings.json")):
        settings = _json(file)
        if settings.get("split") == split and abs(float(settings.get("eps", -1.0)) - config.eps) < 1e-9:
            found.append(file.parent)
    if len(found) == 1:
        return found[0]
    if not found:
        first = f"run `glscert certify {run}{'' if split == 'test' else f' --split {split}'}` first"
        raise CheckpointError(
            f"run {str(run)!r} has no certification at eps {config.eps:.4g} on the {split} split: {first}"
        )
    names = ", ".join(folder.name for folder in found)
    raise ConfigError(f"run {str(run)!r} has several certifications ({names}): choose one with --certification")


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{str(file)!r} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(file)!r} is damaged: expected one JSON object")
    return content

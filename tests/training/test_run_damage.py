"""A run folder that was damaged is refused in one line, and one whose process was killed can be resumed.

Mutations that made a test of this file fail: no check on reading, the old digest dropped when the new one is written,
the file replaced before its checksum, metrics rows without digests, missing rows ignored, a checksum file that does not
check itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gls_lirpa.errors import CheckpointError, ConfigError, GLSError
from gls_lirpa.training import loop
from gls_lirpa.training.config import TrainConfig
from gls_lirpa.training.loop import train
from gls_lirpa.training.runs import RunFolder, load_file, load_run
from tests.helpers.command import Glscert

TRUSTED = ("config.json", "metrics.jsonl", "checkpoint.pt", "weights.pt", "checksums.json")
SMALL: dict[str, Any] = {
    **{"dataset": "digits", "net": "cnn3-tiny", "limit": 40, "batch_size": 20, "relaxation": "ibp"},
    **{"estimator": "grad", "epochs": 2, "eps": 0.05, "eval_samples": 10, "lr": 1e-3},
}


class Quiet:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    train(TrainConfig(**SMALL), path, reporter=Quiet())
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def use(path: Path) -> None:
    """All that reads a run folder."""
    folder = RunFolder(path)
    load_run(path)
    folder.metrics()
    train(folder.config(), path, reporter=Quiet(), resume=True)


def damages(content: bytes, number: int, seed: int) -> Iterator[bytes]:
    generator = random.Random(seed)
    for _ in range(number):
        place = generator.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ 1 << generator.randrange(8)]) + content[place + 1 :]
        yield content[:place]
        yield content[:place] + content[place + generator.randint(1, 9) :]


@pytest.mark.parametrize("name", TRUSTED)
def test_damage_is_one_clear_line(run: Path, name: str) -> None:
    file = run / name
    content = file.read_bytes()
    for damaged in damages(content, 25, seed=len(name)):
        if damaged == content:
            continue
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError) as raised:
            use(run)
        assert "\n" not in str(raised.value) and any(part in str(raised.value) for part in TRUSTED)
    file.write_bytes(content)
    use(run)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoint.pt", "weights.pt"])
def test_damage_without_checksums_is_no_traceback(run: Path, name: str) -> None:
    """As in a run of an earlier version; torch's own checksums find what changes a tensor."""
    (run / "checksums.json").unlink()
    content = (run / name).read_bytes()
    before = load_file(run / "weights.pt")["model"]
    for number, damaged in enumerate(damages(content, 8, seed=1)):
        path = Path(shutil.copytree(run, run.parent / str(number)))
        (path / name).write_bytes(damaged)
        try:
            after = load_run(path).model.state_dict()
            assert name == "config.json" or all(torch.equal(before[key], after[key]) for key in before)
            use(path)
        except GLSError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("checksums", [True, False])
def test_damaged_weights_are_written_again_by_resuming(run: Path, glscert: Glscert, checksums: bool) -> None:
    expected = load_file(run / "weights.pt")["model"]
    (run / "weights.pt").write_bytes((run / "weights.pt").read_bytes()[:500])
    if not checksums:
        (run / "checksums.json").unlink()
    answer = glscert("certify", run)
    assert answer.code == 2 and answer.err.count("\n") == 1 and f"`glscert train --out {run} --resume`" in answer.err
    assert glscert("train", "--out", run, "--resume").code == 0
    after = load_run(run).model.state_dict()
    assert all(torch.equal(expected[name], after[name]) for name in expected)
    (run / "weights.pt").write_bytes(b"")
    (run / "checkpoint.pt").unlink()
    assert "--resume" not in glscert("certify", run).err


def test_files_that_do_not_matter_may_change(run: Path) -> None:
    (run / "versions.json").write_bytes(b"\xff")
    use(run)


def test_what_is_missing_is_told(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(CheckpointError, match="0 of 2 finished epochs"):
        use(run)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match="0 of 2 finished epochs"):
        use(run)


def test_a_missing_checkpoint_is_told(run: Path) -> None:
    (run / "checkpoint.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint\.pt"):
        use(run)


class Killed(BaseException):
    pass


def test_a_kill_between_any_two_writes_leaves_a_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before or after each replacement of a file, again and again, the run ends as it would have."""
    replace = os.replace
    expected = load_file(finished / "weights.pt")["model"]
    calls = 0
    for after in (False, True):
        for stop in range(1, 40):
            path, calls = tmp_path / f"{after}-{stop}", 0

            def killing(source: Any, target: Any, after: bool = after, stop: int = stop) -> None:
                nonlocal calls
                calls += 1
                if calls == stop and not after:
                    raise Killed
                replace(source, target)
                if calls == stop:
                    raise Killed

            monkeypatch.setattr(os, "replace", killing)
            try:
                train(TrainConfig(**SMALL), path, reporter=Quiet())
            except Killed:
                pass
            else:
                break
            calls = stop - 2  # killed again soon
            with contextlib.suppress(Killed):
                train(TrainConfig(**SMALL), path, reporter=Quiet(), resume=(path / "config.json").exists())
            monkeypatch.setattr(os, "replace", replace)
            train(TrainConfig(**SMALL), path, reporter=Quiet(), resume=(path / "config.json").exists())
            found = load_file(path / "weights.pt")["model"]
            assert all(torch.equal(expected[key], found[key]) for key in expected)
            assert [row["epoch"] for row in RunFolder(path).metrics()] == [1, 2]
        else:
            raise AssertionError("the run has more writes than expected")


def test_a_kill_between_metrics_and_checkpoint(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(folder: RunFolder, row: dict[str, Any]) -> None:
        append(folder, row)
        raise Killed

    append = RunFolder.append_metrics
    monkeypatch.setattr(loop.RunFolder, "append_metrics", killed)
    with pytest.raises(Killed):
        train(TrainConfig(**SMALL), tmp_path / "run", reporter=Quiet())
    monkeypatch.undo()
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"epoch": 2, "lo')  # and in the middle of a row
    train(TrainConfig(**SMALL), tmp_path / "run", reporter=Quiet(), resume=True)
    rows = [{k: v for k, v in row.items() if "second" not in k} for row in RunFolder(tmp_path / "run").metrics()]
    assert rows == [{k: v for k, v in row.items() if "second" not in k} for row in RunFolder(finished).metrics()]


def test_runs_of_earlier_versions_are_read(run: Path) -> None:
    (run / "checksums.json").unlink()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    old = "".join(json.dumps({k: v for k, v in row.items() if k != "sha256"}) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(old)
    use(run)
    assert (run / "checksums.json").exists() and len(RunFolder(run).metrics()) == 2


def test_no_epochs_are_refused(tmp_path: Path, glscert: Glscert) -> None:
    with pytest.raises(ConfigError, match="epochs >= 1, got 0"):
        TrainConfig(**{**SMALL, "epochs": 0})
    result = glscert("train", "--epochs", "0", "--out", tmp_path / "run")
    assert result.code != 0 and "epochs >= 1" in result.err and "Traceback" not in result.err
    assert not (tmp_path / "run").exists()

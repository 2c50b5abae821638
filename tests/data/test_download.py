from __future__ import annotations

import gzip
import hashlib
import http.server
import socket
import struct
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from gls_lirpa.base.torchvision import repair_torchvision
from gls_lirpa.data import load_dataset
from gls_lirpa.errors import DataError
from gls_lirpa.readers import download


def _drip(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        for _ in range(30):
            connection.sendall(b"H")
            time.sleep(0.1)


@pytest.mark.parametrize("dripping", [False, True])
def test_a_server_that_never_finishes_its_answer_does_not_hang(monkeypatch: pytest.MonkeyPatch, dripping: bool) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        if dripping:
            threading.Thread(target=_drip, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        started = time.monotonic()
        assert not download.reachable([url], seconds=0.5)
        assert 0.3 < time.monotonic() - started < 2.5


def test_a_closed_port_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = time.monotonic()
    assert not download.reachable([f"http://127.0.0.1:{port}/"], seconds=60)
    assert time.monotonic() - started < 30


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        return


def test_download_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's own download code, pointed at a server of this test."""
    repair_torchvision()
    datasets = pytest.importorskip("torchvision").datasets
    served = tmp_path / "served"
    served.mkdir()
    resources = []
    for part in ("train", "t10k"):
        contents = {"images-idx3": struct.pack(">4B3i784B", 0, 0, 8, 3, 1, 28, 28, *[7] * 784)}
        contents["labels-idx1"] = struct.pack(">4BiB", 0, 0, 8, 1, 1, 3)
        for kind, raw in contents.items():
            name = f"{part}-{kind}-ubyte.gz"
            (served / name).write_bytes(packed := gzip.compress(raw))
            resources.append((name, hashlib.md5(packed).hexdigest()))
    handler = partial(_QuietHandler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(datasets.MNIST, "resources", resources)
        mnist = load_dataset("mnist", root=tmp_path / "data", val_fraction=0)
        assert mnist.train.images.unique().tolist() == [7] and mnist.test.labels.tolist() == [3]
        (served / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
        with pytest.raises(DataError, match=r"mnist not found: .*; download failed: .*; put the files there"):
            load_dataset("mnist", root=tmp_path / "other")
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz cannot be read: .*; delete it"):
            load_dataset("mnist", root=tmp_path / "other")
        server.shutdown()
    assert socket.getdefaulttimeout() is None

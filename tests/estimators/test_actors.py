"""The population on Ray actors: the same estimates, from processes that come and go without a trace."""

from __future__ import annotations

import itertools
import logging
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gls_lirpa.base import ray_pool, ray_session
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.errors import ConfigError, GLSError
from gls_lirpa.estimators import PGPE, RGS, actors, reset_batchnorm
from gls_lirpa.estimators.transport import Shipment, build, describe
from gls_lirpa.estimators.weights import Weights
from gls_lirpa.estimators.worker import Member, Task, Worker
from gls_lirpa.losses.certified import CertifiedLoss

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:BatchNorm in train mode"),
]


def smooth() -> tuple[nn.Module, Callable[..., Tensor]]:
    """A network and a loss whose behaviour a keyword chooses; also the factory that actors get."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))

    def loss(
        x: Tensor, y: Tensor, *, eps: float = 0.0, fail: bool = False, generator: torch.Generator | None = None
    ) -> Tensor:
        if fail:
            raise ValueError("this loss fails")
        noise = torch.rand((), generator=generator) + torch.rand(())
        return ((net(x) + eps + 0.1 * noise - y) ** 2).mean()

    return net, loss


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator)


class Kept:
    """One Ray session and two actors for the whole file."""

    def __init__(self) -> None:
        self.pgpe = PGPE(smooth()[1], smooth()[0], sigma=1e-2)  # replaced at the start
        self.folder = ""
        self.numbers_kept = False
        self.before = dict(os.environ)

    def start(self) -> PGPE:
        if not self.folder:
            ray = ray_session.acquire(None, actors=6, gpus=0, store_bytes=0)
            self.folder = str(Path(ray._private.worker._global_node.get_session_dir_path()).parent)
            net, loss = smooth()
            self.pgpe = PGPE(loss, net, sigma=1e-2, population=40, seed=3, actors=2, factory=smooth)
            rng = torch.get_rng_state()
            self.pgpe(*batch())
            self.numbers_kept = torch.equal(torch.get_rng_state(), rng)
        return self.pgpe

    def stop(self) -> None:
        if self.folder:
            self.folder = ""
            self.pgpe.close()
            ray_session.release()


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the actors, so that sums come out alike
    session = Kept()
    yield session
    session.stop()
    torch.set_num_threads(threads)


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo.extend(children.get(pid, []))
    return found


def open_addresses(pids: list[int]) -> set[str]:
    """Local addresses on which the processes listen, and remote ones they talk to, as the kernel writes them."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            listening = fields[3] == "0A"
            if fields[9] in inodes and fields[3] in ("0A", "01"):
                found.add(fields[1 if listening else 2].split(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_start_is_quiet_and_local(kept: Kept, capfd: pytest.CaptureFixture[str]) -> None:
    kept.start()
    assert kept.numbers_kept, "starting actors costs the user no random numbers"
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err == ""
    found = open_addresses(descendants())
    assert found and found <= LOOPBACK
    assert not any("dashboard" in n.lower() for n in os.listdir(kept.folder) if n.endswith(".sock"))


def trained(kind: Any, steps: int, **options: Any) -> tuple[list[float], dict[str, Any], list[Tensor]]:
    net, loss = smooth()
    estimator = kind(loss, net, seed=3, **options)
    return training(net, estimator, steps)


def training(net: nn.Module, estimator: Any, steps: int) -> tuple[list[float], dict[str, Any], list[Tensor]]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    values = []
    for step in range(steps):
        optimizer.zero_grad()
        value = estimator(*batch(), eps=0.1 * step)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values, estimator.state_dict(), [p.detach().clone() for p in net.parameters()]


def identical(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(identical(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("kind", [PGPE, RGS])
def test_two_actors_give_what_none_gives(kept: Kept, kind: Any) -> None:
    """Bit for bit: losses, σ, weights, with random numbers inside the loss and BatchNorm in train mode."""
    options = {"sigma": 1e-2, "population": 40} if kind is PGPE else {"sigma": 1e-2, "samples": 20}
    here = trained(kind, 3, **options)
    pool = kept.start()._pool
    assert isinstance(pool, actors.ActorPool)
    net, loss = smooth()
    remote = kind(loss, net, seed=3, **options)
    pool.worker, remote._pool = remote._worker, pool  # the actors that already run
    there = training(net, remote, 3)
    assert identical(here, there)
    assert remote.stats["evaluations"] == options.get("population", options.get("samples"))


def test_state_outside_the_weights_travels() -> None:
    """Frozen parameters, buffers and flags of an actor's model follow the user's model."""
    net, loss = smooth()
    bystander = nn.Dropout()
    local = Worker(net, loss, Weights(net, ["3.weight", "3.bias"]))
    there = smooth()

    def elsewhere(*args: Any, generator: torch.Generator, aside: nn.Module = bystander, **kwargs: Any) -> Tensor:
        return there[1](*args, generator=generator, **kwargs)

    remote = build(there[0], elsewhere, local.weights.names, torch.device("cpu"))
    assert describe(local) == describe(remote)
    with torch.no_grad():
        net[0].weight.mul_(2)
        net[3].bias.add_(1)
        net[1].running_mean.add_(0.3)
    net.eval()
    task = Task(local.weights.flat(), batch(), {"eps": torch.tensor(0.1)}, 7, sigma=1e-2)
    received = pickle.loads(pickle.dumps(Shipment.of(task, local))).install(remote)
    members = [Member(seed, 1.0, 0.5) for seed in (1, 2)]
    assert identical(local.gradient_sum(task, members), remote.gradient_sum(received, members))
    assert not bystander.training, "other modules of the loss follow the model"
    assert torch.equal(there[0][1].running_mean, net[1].running_mean)


def test_an_error_in_the_loss_is_raised_as_it_is(kept: Kept) -> None:
    pgpe = kept.start()
    pool = pgpe._pool
    assert isinstance(pool, actors.ActorPool)
    pids = pool.processes()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^this loss fails$"):
            pgpe(*batch(), fail=True)
    assert pool.processes() == pids, "an error in the loss is not retried and kills nobody"
    assert math.isfinite(pgpe(*batch()).item())


def test_a_killed_actor_is_replaced(
    kept: Kept,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pgpe = kept.start()
    pool = pgpe._pool
    assert isinstance(pool, actors.ActorPool)
    state = pgpe.state_dict()
    expected = pgpe(*batch()).item()
    victims = pool.processes()
    os.kill(victims[0], signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(ray_pool, "RETRIES", 0)
        with pytest.raises(GLSError, match=r"workers died 1 times .*checkpoint can be resumed") as caught:
            pgpe(*batch())
    assert "\n" not in str(caught.value)
    pgpe.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        assert pgpe(*batch()).item() == expected
    assert len(pool.processes()) == 2 and not set(pool.processes()) & set(victims)
    assert [r.message for r in caplog.records] == ["a worker died; it is replaced and what is missing is done again"]
    assert capfd.readouterr().out == ""


def test_more_than_there_is(kept: Kept) -> None:
    kept.start()
    net, loss = smooth()
    for options, message in (
        ({"actors": 1000}, r"1000 actors need 1000 CPUs, and Ray has \d+ free"),
        ({"actors": 1, "gpus_per_actor": 1}, "1 actors need 1 GPUs, and Ray has 0 free"),
        ({"actors": 1, "ray_address": "127.0.0.1:1"}, "already in use"),
    ):
        with pytest.raises(GLSError, match=message):
            RGS(loss, net, sigma=0.1, factory=smooth, **options)(*batch())


def test_wrong_factories(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.start()
    net, loss = smooth()
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        RGS(loss, net, sigma=0.1, actors=1, factory=lambda: (lock, loss))(*batch())  # type: ignore[arg-type, return-value]
    pool = kept.pgpe._pool
    assert isinstance(pool, actors.ActorPool) and pool._problem is not None
    other = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2))
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="other parameters, buffers or layers"):
        patch.setattr(pool, "worker", Worker(other, loss, Weights(other)))
        pool._launch(pool._problem)


def test_four_actors_with_a_certified_loss(kept: Kept) -> None:
    """CertifiedLoss gives its own factory; CROWN bounds agree bit for bit between 0 and 4 actors."""
    kept.start()
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 6), nn.ReLU(), nn.Linear(6, 3)
    )
    x, y = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    results = []
    for count in (0, 4):
        criterion = CertifiedLoss(net, "crown", eps=0.05)
        with PGPE(criterion, net, sigma=1e-3, population=8, actors=count, seed=2) as pgpe:
            net.zero_grad()
            value = pgpe(x, y, eps=0.02)
            value.backward()
            results.append([value.item(), *(p.grad for p in net.parameters())])
    assert identical(*results)


def users_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))


def users_loss(model: nn.Module) -> tuple[Any, Callable[..., Tensor]]:
    """Bounds and loss as in auto_LiRPA's own training examples."""
    lirpa = load_lirpa()
    bounded = lirpa.bounded_module(model, torch.zeros(2, 1, 8, 8), bound_opts=lirpa.bound_options())

    def criterion(x: Tensor, y: Tensor, *, eps: float) -> Tensor:
        bounded(x)  # in train mode bounds use the statistics of the latest forward pass
        ball = lirpa.perturbation(norm=math.inf, x_L=(x - eps).clamp(0, 1), x_U=(x + eps).clamp(0, 1))
        spec = torch.eye(3)[y][:, None] - torch.eye(3)
        inputs = (lirpa.bounded_tensor(x, ball),)
        lower = bounded.compute_bounds(x=inputs, C=spec, method="CROWN-IBP", bound_upper=False)[0]
        return F.cross_entropy(-lower, y)

    return bounded, criterion


def users_factory() -> tuple[nn.Module, Callable[..., Tensor]]:
    bounded, criterion = users_loss(users_network().eval())
    return bounded, criterion


def users_script(count: int) -> tuple[list[float], list[Tensor], list[Tensor], PGPE]:
    """BatchNorm, gradient accumulation, an ε schedule, weight decay, clipping: and one added line."""
    model = users_network().eval()
    bounded, criterion = users_loss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-3)
    generator = torch.Generator().manual_seed(4)
    loader = [(torch.rand(6, 1, 8, 8, generator=generator), torch.arange(6) % 3) for _ in range(6)]
    criterion = PGPE(criterion, bounded, sigma=1e-2, population=12, actors=count, factory=users_factory)
    sigmas = []
    losses = []
    bounded.train()
    with criterion:
        for step, (x, y) in enumerate(loader):
            loss = criterion(x, y, eps=0.02 * (step + 1) / len(loader))
            (loss / 2).backward()
            losses.append(loss.item())
            if step % 2 == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
            sigmas.append(criterion.sigma.detach().clone())
    model.train()
    reset_batchnorm(model, loader)
    bounded.load_state_dict(model.state_dict())
    bounded.eval()
    losses.append(criterion.loss(*loader[0], eps=0.02).item())
    return losses, sigmas, [t.detach().clone() for t in [*model.parameters(), *bounded.buffers()]], criterion


def test_an_ordinary_script_with_one_added_line(kept: Kept) -> None:
    kept.start()
    here, there = users_script(0), users_script(2)
    assert identical(here[:3], there[:3])
    losses, sigmas, tensors, _ = there
    assert all(math.isfinite(v) for v in losses)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(sigmas)]
    assert moved == [True, False, True, False, True], "σ moves with the optimizer, not with backward()"
    fresh = [t.detach() for t in users_network().parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(tensors, fresh, strict=False))
    means = tensors[len(fresh)]
    assert means.abs().max() > 1e-3, "the bounded module has the statistics that were reset"


def test_nothing_is_left_behind(kept: Kept) -> None:
    import ray

    kept.start()
    folder = Path(kept.folder)
    ours = [pid for pid in descendants() if pid != os.getpid()]
    assert folder.exists() and len(ours) >= 3
    ray_session._session.undo.close()  # as at the end of a program that does not close its estimators
    assert not ray.is_initialized()
    kept.stop()
    assert not ray.is_initialized(), "Ray was started again in order to stop actors in it"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and set(descendants()) & set(ours):
        time.sleep(0.2)
    assert not set(descendants()) & set(ours)
    assert not folder.exists()
    assert all(os.environ.get(key) == kept.before.get(key) for key in ray_session.ENVIRONMENT)


def test_a_cluster_that_does_not_answer() -> None:
    net, loss = smooth()
    for address, kind, message in (
        ("127.0.0.1:1", GLSError, "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://somewhere", ConfigError, "expected a Ray address host:port or auto"),
    ):
        with pytest.raises(kind, match=message):
            RGS(loss, net, sigma=0.1, factory=smooth, actors=1, ray_address=address)(*batch())

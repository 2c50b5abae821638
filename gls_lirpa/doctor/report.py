"""Does this installation work? Every relaxation really computes a bound."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gls_lirpa.attacks import random_points
from gls_lirpa.base.boxes import linf_box, margin_spec
from gls_lirpa.base.torchvision import repair_torchvision
from gls_lirpa.data import load_dataset
from gls_lirpa.engine.bounds import BoundEngine
from gls_lirpa.engine.compat import load_lirpa, versions
from gls_lirpa.engine.row_compiled import kernels
from gls_lirpa.errors import EngineError, GLSError
from gls_lirpa.models import build_model, load_user_model
from gls_lirpa.relaxations import RELAXATIONS

ROUTES = {"rows": "rows of unstable neurons", "lirpa": "auto_LiRPA"}


@dataclass(frozen=True)
class Check:
    """One finding. Without what is ``needed`` nothing works; the rest serves one feature each."""

    name: str
    works: bool
    detail: str
    needed: bool


def examine() -> Iterator[Check]:
    """Yield one finding after the other."""
    yield from (Check(name, True, version, False) for name, version in versions().items())
    if torch.cuda.is_available():
        yield Check("device", True, f"cuda ({torch.cuda.get_device_name()})", False)
    else:
        yield Check("device", True, f"cpu, {torch.get_num_threads()} threads", False)
    yield _tried("auto_LiRPA engine", lambda: f"version {load_lirpa().version}", needed=True)
    for name in RELAXATIONS:
        yield _tried(f"bounds: {name}", lambda name=name: _bound(name), needed=True)  # type: ignore[misc]
    yield _tried("embedded data", _digits, needed=True)
    yield _tried("numba (compiled bounds)", _compiled, needed=False)
    yield _tried("torchvision (downloads)", _torchvision, needed=False)
    yield _tried("ray and evotorch (actors)", _actors, needed=False)


def _tried(name: str, attempt: Callable[[], str], *, needed: bool) -> Check:
    try:
        return Check(name, True, attempt(), needed)
    except (GLSError, ImportError, RuntimeError, AttributeError) as error:
        return Check(name, False, " ".join(str(error).split()), needed)


def _bound(name: str) -> str:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    x, y = torch.rand(2, 1, 4, 4, generator=generator), torch.tensor([0, 2])
    box = linf_box(x, 0.05)
    with torch.no_grad():
        lower = BoundEngine(model, x).margins(box, y, RELAXATIONS.get(name))
        points = random_points(box.map(lambda end: end.expand(200, *x.shape)), generator=generator)
        logits = model(points.flatten(0, 1)).unflatten(0, (200, 2))
        margins = (margin_spec(y, 3) @ logits.unsqueeze(-1)).squeeze(-1).amin(0)
    if not bool((lower <= margins + 1e-5).all()):
        raise EngineError("the bound excludes points of the network: do not use this installation")
    return f"mean margin {float(lower.mean()):.4f}, 200 sampled points inside"


def _digits() -> str:
    return f"digits, {len(load_dataset('digits').train)} training images"


def _compiled() -> str:
    if kernels() is None:
        raise ImportError("CROWN of trained convolutional networks is up to three times slower: pip install numba")
    return f"version {importlib.import_module('numba').__version__}"


def _torchvision() -> str:
    repair_torchvision()
    return f"imports, {importlib.import_module('torchvision').__version__}"


def _actors() -> str:
    return ", ".join(f"{name} {importlib.import_module(name).__version__}" for name in ("ray", "evotorch"))


def report() -> bool:
    """Print the findings as a table; whether everything needed works."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", "", title="glscert doctor", show_header=False)
    healthy = True
    for check in examine():
        healthy &= check.works or not check.needed
        mark = "ok" if check.works else "BROKEN" if check.needed else "missing"
        table.add_row(check.name, mark, check.detail)
    Console().print(table)
    return healthy


def route_report(net: str, dataset: str, data_root: str) -> None:
    """Print which way bounds of a network for a ``dataset``'s images go, and why.

    ``net``: a name, or ``file.py:factory``; ``data_root``: where the dataset's files lie.
    """
    from rich.console import Console

    data = load_dataset(dataset, root=data_root)
    if ".py:" in net:
        model = load_user_model(net, in_shape=data.in_shape, classes=data.classes, mean=data.mean, std=data.std)
    else:
        model = build_model(net, in_shape=data.in_shape, classes=data.classes, mean=data.mean, std=data.std)
    route, reason = BoundEngine(model.eval(), torch.rand(1, *data.in_shape)).route()
    Console().print(f"{net} on {data.name}: bounds by {ROUTES[route]}: {reason}", soft_wrap=True)


def deep_report() -> bool:
    """Print what every relaxation does with every operation; whether none was violated and none failed."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from gls_lirpa.doctor.operator_cases import CASES
    from gls_lirpa.doctor.selftest import one_thread, operator_table

    table = Table("operation", title="bounds by operation, at random attributes")
    for name in RELAXATIONS:
        table.add_column(name, overflow="fold")
    console, sound = Console(), True
    with one_thread(), Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("operations", total=len(CASES))
        for name, verdicts in operator_table():
            progress.update(task, advance=1, description=f"checked {name}")
            sound &= not {"VIOLATED", "FAILED"} & set(verdicts.values())
            table.add_row(name, *verdicts.values())
    console.print(table)
    if not sound:
        console.print("VIOLATED: a bound excludes points of a network. FAILED: a bound could not be computed.")
        console.print("Do not use this installation.")
    return sound

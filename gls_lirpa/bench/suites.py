"""The suites, as data.

Cells of the paper's tables take a recipe of their dataset and radius: the paper's (IBP initialisation for GRAD
and RGS, the full training set, no regulariser), or with ``--preset tuned`` the tuned one; what the paper took from
CTBench for cnn7-bn is trained by CTBench's recipe. PGPE alone starts from a PGD-trained network, as in the paper.
In the small ``paradox`` suites, which are not the paper's, every cell starts from one shared PGD-trained network
and all relaxations under an estimator share one recipe, so that nothing but the relaxation differs within a column
and no cell was tuned more than another.
"""

from __future__ import annotations

from typing import Any

from gls_lirpa.base.registry import Registry
from gls_lirpa.bench.paper import PaperRow, paper_rows, slug
from gls_lirpa.bench.suite import Cell, Suite

Fields = dict[str, Any]

SUITES: Registry[Suite] = Registry("suite")
RELAXATIONS = ("ibp", "hbox", "crown-ibp", "crown")
ESTIMATORS = ("grad", "pgpe", "rgs")
_PAPER: Fields = {"preset": "paper"}
SIGMAS = (0.0, 1e-6, 5e-5, 5e-4)


def _pgd(group: str, options: Fields) -> Cell:
    """The network that others start from."""
    given = {"loss": "pgd", "estimator": "grad", "init": "kaiming-uniform", "warmup": 0.0, **options}
    return Cell(group, "pgd", "start", given, once=True)


def _paradox(
    name: str,
    summary: str,
    group: str,
    *,
    common: Fields,
    start: Fields,
    recipes: dict[str, Fields],
    samples: int | None,
    seeds: tuple[int, ...] = (0, 1, 2),
    rows: tuple[PaperRow, ...] = (),
    started: tuple[str, ...] = ESTIMATORS,
    preset: str | None = None,
) -> None:
    """``started``: the estimators whose cells start from the PGD-trained network."""
    pgd = _pgd(group, {**common, **start})
    paper = {(row.method, row.estimator): row for row in rows}
    cells = [
        Cell(
            group,
            relaxation,
            estimator,
            {**common, **recipes[estimator], "relaxation": relaxation, "estimator": estimator},
            start=pgd.key if estimator in started else None,
            paper=paper.get((relaxation, estimator)),
        )
        for estimator in ESTIMATORS
        for relaxation in RELAXATIONS
    ]
    SUITES.register(
        name,
        Suite(
            name, summary, (pgd, *cells), seeds=seeds, samples=samples, timeout=20.0, renderer="paradox", preset=preset
        ),
    )


_SMALL: Fields = {"warmup": 0.0, "l1": 0.0, "eps_warmup_epochs": 0.0, "lr_factor": 0.2}
_DIGITS: Fields = {"epochs": 40, "batch_size": 128, "lr": 5e-3, "milestones": (27, 34), "eps_anneal_epochs": 14.0}
_MNIST_SMALL: Fields = {"epochs": 10, "batch_size": 128, "lr": 5e-3, "milestones": (7, 9), "eps_anneal_epochs": 4.0}

_paradox(
    "paradox-digits",
    "relaxations × estimators on the embedded digits, cnn3, eps 0.1; 15 minutes on two cores",
    "digits 0.1 cnn3",
    common={**_SMALL, "dataset": "digits", "net": "cnn3", "eps": 0.1, "val_fraction": 0.1},
    start={"epochs": 30, "batch_size": 128, "lr": 5e-3, "milestones": (20, 25), "eps_anneal_epochs": 5.0},
    recipes={
        "grad": _DIGITS,
        "rgs": {**_DIGITS, "sigma": 1e-3, "samples": 2},
        "pgpe": {
            "epochs": 4,
            "batch_size": 128,
            "lr": 1e-3,
            "lr_factor": 0.4,
            "milestones": (2.7, 3.3),
            "eps_shape": "none",
            "sigma": 1e-2,
            "population": 48,
        },
    },
    samples=None,
)

_paradox(
    "paradox-mnist-small",
    "relaxations × estimators on 10,000 MNIST images, cnn3-tiny, eps 0.2; under two hours on two cores",
    "mnist 0.2 cnn3-tiny",
    common={
        **_SMALL,
        "dataset": "mnist",
        "net": "cnn3-tiny",
        "eps": 0.2,
        "limit": 10_000,
        "val_fraction": 0.1,
        "eval_samples": 256,
    },
    start={"epochs": 10, "batch_size": 128, "lr": 5e-3, "milestones": (7, 9), "eps_anneal_epochs": 2.0},
    recipes={
        "grad": _MNIST_SMALL,
        "rgs": {**_MNIST_SMALL, "sigma": 1e-3, "samples": 2},
        "pgpe": {
            "epochs": 1,
            "batch_size": 64,
            "lr": 1e-3,
            "lr_factor": 0.4,
            "milestones": (0.7, 0.85),
            "eps_shape": "none",
            "sigma": 1e-2,
            "population": 32,
        },
    },
    samples=1000,
)


def _paper_paradox(dataset: str, eps: str) -> None:
    rows = tuple(row for row in paper_rows("1") if row.dataset == dataset and row.eps == eps)
    setting = rows[0]
    net: Fields = {key: setting.options[key] for key in ("dataset", "eps", "net")} | _PAPER
    short = eps if dataset == "mnist" else eps.replace("/", "-")
    small = {"mnist": "0.1", "cifar10": "2/255"}[dataset] == eps
    _paradox(
        f"paradox-{dataset}" if small else f"paradox-{dataset}-{short}",
        f"the paper's main table on {dataset}, cnn3, eps {eps}; days on a CPU without --epochs-scale",
        setting.setting,
        common=net,
        start={},
        recipes={estimator: {} for estimator in ESTIMATORS},
        samples=None,
        seeds=(0,),
        rows=rows,
        started=("pgpe",),
        preset="paper",
    )


for _dataset, _eps in (("mnist", "0.1"), ("mnist", "0.3"), ("cifar10", "2/255"), ("cifar10", "8/255")):
    _paper_paradox(_dataset, _eps)


def _table(name: str, summary: str, *tables: str) -> None:
    """A table of the paper, cell by cell."""
    cells: list[Cell] = []
    for row in (row for table in tables for row in paper_rows(table)):
        if row.estimator == "pgd":
            continue
        start = None
        if row.estimator.startswith("pgpe"):
            pgd = _pgd(row.setting, {key: row.options[key] for key in ("dataset", "eps", "net")} | _PAPER)
            start = pgd.key
            if start not in {cell.key for cell in cells}:
                cells.append(pgd)
        if row.from_ibp:
            start = slug(row.setting, "ibp", "grad")
        options = row.options | {"preset": row.recipe}
        cells.append(Cell(row.setting, row.method, row.estimator, options, start=start, paper=row))
    SUITES.register(name, Suite(name, summary, tuple(cells), preset="paper"))


_table("cnn5", "cnn5 and larger at small radii: GRAD baselines against crown + rgs", "cnn5")
_table("cnn7", "crown-ibp + rgs on cnn7, with and without BatchNorm", "cnn7")
_table("nondiff", "alpha-crown under PGPE on cnn3-tiny, MNIST eps 0.1", "nondiff")
_table("large-eps", "crown + rgs at large radii, from scratch and from IBP weights", "cnn5-large")
_table("sam", "sharpness-aware minimisation instead of smoothing, cnn3, MNIST eps 0.1", "sam")
_table("pgpe-vs-rgs", "both estimators on cnn3-tiny, MNIST eps 0.1", "pgpe-vs-rgs")


def _mnist_pgd(net: str = "cnn3") -> Cell:
    options = {"dataset": "mnist", "eps": 0.1, "net": net, "epochs": 10, "milestones": (7, 9)}
    return _pgd(f"mnist 0.1 {net}", {**options, "eps_anneal_epochs": 2.0, "l1": 0.0})


SUITES.register(
    "tightness",
    Suite(
        "tightness",
        "certified accuracy over the radius for every relaxation, and the area under it",
        (_mnist_pgd(),),
        samples=500,
        renderer="tightness",
        settings={"points": 13, "reach": 2.0},
    ),
)
_DYNAMICS = tuple(
    Cell(
        "mnist 0.1 cnn3",
        "crown",
        estimator,
        {
            **_SMALL,
            "dataset": "mnist",
            "net": "cnn3",
            "eps": 0.1,
            "relaxation": "crown",
            "estimator": estimator,
            "limit": 2000,
            "batch_size": 128,
            "lr": 5e-3,
            "epochs": 8,
            "milestones": (),
            "eps_anneal_epochs": 3.0,
        },
        start=_mnist_pgd().key,
    )
    for estimator in ("grad", "rgs")
)
SUITES.register(
    "landscape",
    Suite(
        "landscape",
        "original and smoothed loss along the CROWN gradient, smoothness scores, toy pictures, dynamics",
        (_mnist_pgd(), *_DYNAMICS),
        samples=200,
        renderer="landscape",
        settings={"sigmas": SIGMAS, "samples": 128, "batch": 4, "step": 1 / 50, "points": 41},
    ),
)


def _ablation(name: str, summary: str, values: tuple[float, ...], option: str, recipe: Fields) -> None:
    start = _pgd("mnist 0.1 cnn3-tiny", {**_ABLATION, "epochs": 10, "milestones": (7, 9), "eps_anneal_epochs": 2})
    cells = [
        Cell(
            start.group,
            f"{option} {value:g}",
            str(recipe["estimator"]),
            {**_ABLATION, **recipe, option: value},
            start=start.key,
        )
        for value in values
    ]
    SUITES.register(
        name,
        Suite(
            name,
            summary,
            (start, *cells),
            samples=500,
            timeout=20.0,
            renderer="ablation",
            settings={"option": option, "values": values, "sigma": recipe.get("sigma")},
        ),
    )


_ABLATION: Fields = {
    **_SMALL,
    "dataset": "mnist",
    "net": "cnn3-tiny",
    "eps": 0.1,
    "limit": 10_000,
    "batch_size": 128,
    "lr": 5e-3,
    "relaxation": "crown",
}
_ABLATION_PGPE: Fields = {"estimator": "pgpe", "lr": 1e-3, "epochs": 1, "milestones": (), "eps_anneal_epochs": 0.0}
_ablation(
    "ablation-sigma",
    "loss surface and short crown + pgpe trainings over PGPE's sigma",
    (1e-4, 1e-3, 1e-2, 3e-2),
    "sigma",
    {**_ABLATION_PGPE, "population": 32},
)
_ablation(
    "ablation-population",
    "noisy loss surface and short crown + pgpe trainings over the population",
    (64, 128, 256, 512, 1024),
    "population",
    {**_ABLATION_PGPE, "sigma": 1e-2},
)
SUITES.register(
    "speed",
    Suite(
        "speed",
        "step times of every relaxation × estimator against plain auto_LiRPA; memory; actors",
        renderer="speed",
        settings={"batch": 32, "population": 16, "repeats": 3, "net": "cnn3", "shape": (1, 28, 28)},
    ),
)

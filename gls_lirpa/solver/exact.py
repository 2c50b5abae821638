"""The minimum of one specification row of a split form, exactly, on HiGHS: a MILP, or an LP where every sign is fixed.

Variables: t ∈ [−1, 1]^inputs, and per unstable neuron z ∈ [l, u], v ∈ [0, u] and a ∈ {0, 1} with

    z = W [t; v] + b,    v ≥ z,    v ≤ z − l (1 − a),    v ≤ u a,

so that a = 1 forces v = z ≥ 0 and a = 0 forces v = 0 ≥ z. The big-M constants l, u are the form's bounds of
pre-activations, whatever made them; a split fixes a and one bound of z.

HiGHS leaves out coefficients below 1e-9 and lets constraints be off by 1e-9, whatever the neurons' own sizes are. So
z and v are given to it in units of max(|l|, |u|), the objective in units of its size, and what may still be off is
carried through |W| to the objective and taken off its bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gls_lirpa.base.extras import install_command
from gls_lirpa.errors import EngineError
from gls_lirpa.solver.form import SplitForm

TOLERANCE = 1e-9
"""By which HiGHS may violate a constraint, and below which it leaves a coefficient out."""

Status = Literal["optimal", "above", "below", "empty", "limit"]


@dataclass(frozen=True)
class Optimum:
    """``bound`` ≤ the row's minimum ≤ ``value``, which is attained at position ``t`` (None if none was found).

    ``status``: optimal; above the cutoff; below the target; empty: the splits exclude each other
    (bound = inf); limit: time ran out or the solver gave up.
    """

    status: Status
    bound: float
    value: float = math.inf
    t: Tensor | None = None


def minimise(
    form: SplitForm,
    row: int,
    *,
    signs: Tensor | None = None,
    cutoff: float = math.inf,
    target: float = -math.inf,
    time_limit: float = math.inf,
    seed: int = 0,
) -> Optimum:
    """Minimise row ``row`` of ``form`` where the neurons have ``signs`` (−1, 0: free, +1).

    The search ends as soon as the minimum is known to exceed ``cutoff`` (then the bound is the cutoff),
    or where a point at or below ``target`` is found.

    >>> from torch import nn
    >>> from gls_lirpa.base.boxes import Box
    >>> from gls_lirpa.solver.builder import FormBuilder
    >>> model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> for p, values in zip(model.parameters(), ([[1.0], [-1.0]], [0.0, 0.0], [[1.0, 1.0], [0.0, 0.0]], [0.5, 0.0])):
    ...     p.data.copy_(torch.tensor(values))  # doctest: +ELLIPSIS
    tensor...
    >>> box = Box(-torch.ones(1, 1), torch.ones(1, 1))
    >>> round(minimise(FormBuilder(model, box.lower).form(box, torch.tensor([[1.0, -1.0]])), 0).bound, 6)
    0.5
    """
    if time_limit <= 0:
        return Optimum("limit", -math.inf)
    if form.neurons == 0:
        return _linear(form, row)
    highspy = _highspy()
    fixed = np.zeros(form.neurons) if signs is None else signs.cpu().numpy().astype(float)
    units = _Units.of(form, row)
    if not math.isfinite(units.error):
        return Optimum("limit", -math.inf)
    solver = highspy.Highs()
    for option, setting in _options(time_limit, target / units.objective, 1e-7 / units.objective, seed).items():
        solver.setOptionValue(option, setting)
    solver.passModel(_model(highspy, form, row, fixed, cutoff, units))
    solver.run()
    return _answer(highspy, solver, form, row, cutoff, units, integer=bool((fixed == 0).any()))


@dataclass(frozen=True)
class _Units:
    """Of every neuron and of the objective, and by how much the solver's objective may be below the row's minimum."""

    neurons: Any
    objective: float
    error: float

    @classmethod
    def of(cls, form: SplitForm, row: int) -> _Units:
        size = torch.maximum(form.lower.abs(), form.upper.abs())
        size = torch.where(size > 0, size, 1.0)
        columns = torch.cat([size.new_ones(form.inputs), size])
        cost = form.weight[row].abs() * columns
        objective = float(cost.sum()) or 1.0
        # |z − z(t)| ≤ |W| error of v + what its own row is off by; v then differs by that and by three more rows.
        error = size.new_zeros(form.inputs)
        for span, layer in zip(form.spans, form.layers, strict=True):
            own = size[span]
            terms = layer.weight.abs() * columns[: layer.weight.shape[1]]
            dropped = torch.where(terms <= TOLERANCE * own.unsqueeze(1), terms, 0.0).sum(1)
            off = layer.weight.abs() @ error + dropped + TOLERANCE * own
            error = torch.cat([error, off + 3 * TOLERANCE * own])
        dropped = torch.where(cost <= TOLERANCE * objective, cost, 0.0).sum()
        total = form.weight[row].abs() @ error + dropped + TOLERANCE * objective
        return cls(size.cpu().numpy(), objective, float(total))


def _linear(form: SplitForm, row: int) -> Optimum:
    """No neuron is unstable: the minimum lies in a corner."""
    t = -form.weight[row].sign()
    value = float(form.offset[row] - form.weight[row].abs().sum())
    return Optimum("optimal", value, value, t)


def _highspy() -> Any:
    try:
        import highspy
    except ModuleNotFoundError as error:
        raise EngineError(f"exact decisions need HiGHS: {install_command('milp')}") from error
    return highspy


def _options(time_limit: float, target: float, gap: float, seed: int) -> dict[str, Any]:
    return {
        "output_flag": False,
        "threads": 1,
        "random_seed": seed,
        "time_limit": time_limit,
        "objective_target": target,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": max(gap, 1e-10),
        # A binary that is 1e-6 off an integer would allow v = 1e-6 · u at z < 0.
        "mip_feasibility_tolerance": TOLERANCE,
        "primal_feasibility_tolerance": TOLERANCE,
        "dual_feasibility_tolerance": TOLERANCE,
    }


def _model(highspy: Any, form: SplitForm, row: int, fixed: Any, cutoff: float, units: _Units) -> Any:
    inputs, n = form.inputs, form.neurons
    infinity = highspy.kHighsInf
    size = units.neurons
    columns = np.concatenate([np.ones(inputs), size])
    low, high = form.lower.cpu().numpy() / size, form.upper.cpu().numpy() / size
    cost = np.zeros(inputs + 3 * n)
    cost[: inputs + n] = form.weight[row].cpu().numpy() * columns / units.objective
    offset = float(form.offset[row]) / units.objective
    v, z, a = (inputs + k * n + np.arange(n) for k in range(3))
    rows = _Rows()
    for span, layer in zip(form.spans, form.layers, strict=True):
        # z − W [t; v] = b
        own = size[span]
        weight = -layer.weight.cpu().numpy() * columns[: layer.weight.shape[1]] / own[:, None]
        b = layer.offset.cpu().numpy() / own
        for i in range(len(layer)):
            used = np.flatnonzero(weight[i])
            rows.add(np.append(used, z[span.start + i]), np.append(weight[i, used], 1.0), b[i], b[i])
    for i in range(n):
        rows.add((v[i], z[i]), (1.0, -1.0), 0.0, infinity)
        rows.add((v[i], z[i], a[i]), (1.0, -1.0, -low[i]), -infinity, -low[i])
        rows.add((v[i], a[i]), (1.0, -high[i]), -infinity, 0.0)
    if math.isfinite(cutoff):
        used = np.flatnonzero(cost)
        # Whatever the solver excludes is then above the cutoff itself.
        rows.add(used, cost[used], -infinity, (cutoff + units.error) / units.objective - offset)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(rows.lower)
    lp.col_cost_, lp.offset_ = cost, offset
    active, inactive, ones = fixed > 0, fixed < 0, np.ones(inputs)
    lp.col_lower_ = np.concatenate([-ones, np.zeros(n), np.where(active, 0.0, low), active.astype(float)])
    lp.col_upper_ = np.concatenate(
        [ones, np.where(inactive, 0.0, high), np.where(inactive, 0.0, high), 1.0 - inactive.astype(float)]
    )
    lp.row_lower_, lp.row_upper_ = np.array(rows.lower), np.array(rows.upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(rows.starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.concatenate([*rows.index, np.zeros(0)]).astype(np.int32)
    lp.a_matrix_.value_ = np.concatenate([*rows.value, np.zeros(0)])
    if (fixed == 0).any():
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kContinuous] * (inputs + 2 * n) + [kinds.kInteger] * n
    return lp


class _Rows:
    """A constraint matrix in the making, row by row."""

    def __init__(self) -> None:
        self.index: list[Any] = []
        self.value: list[Any] = []
        self.starts = [0]
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, index: Any, value: Any, lower: float, upper: float) -> None:
        self.index.append(np.asarray(index))
        self.value.append(np.asarray(value))
        self.starts.append(self.starts[-1] + len(index))
        self.lower.append(lower)
        self.upper.append(upper)


def _answer(
    highspy: Any, solver: Any, form: SplitForm, row: int, cutoff: float, units: _Units, *, integer: bool
) -> Optimum:
    status = solver.getModelStatus()
    statuses = highspy.HighsModelStatus
    if status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):
        # Everything is bounded, so the model is infeasible.
        return Optimum("above", cutoff) if math.isfinite(cutoff) else Optimum("empty", math.inf)
    info = solver.getInfo()
    t: Tensor | None = None
    value = math.inf
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        columns = np.array(solver.getSolution().col_value[: form.inputs])
        t = torch.from_numpy(columns).clamp(-1.0, 1.0)
        value = float(form.evaluate(t.unsqueeze(0))[0, row])
    if status == statuses.kOptimal:
        found = float(info.mip_dual_bound if integer else info.objective_function_value)
        return Optimum("optimal", min(found * units.objective - units.error, value), value, t)
    bound = min(float(info.mip_dual_bound) * units.objective - units.error, cutoff) if integer else -math.inf
    if status == statuses.kObjectiveTarget:
        return Optimum("below", min(bound, value), value, t)
    return Optimum("limit", min(bound, value), value, t)

"""SCIP and CP-SAT through OR-Tools' MathOpt, imported in workers only."""

from __future__ import annotations

import datetime
import math

import numpy as np
from ortools.math_opt import model_pb2  # type: ignore[import-untyped]
from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]
from ortools.util.python.solve_interrupter import SolveInterrupter  # type: ignore[import-untyped]

from ...data.arrays import FloatArray
from ...models.formulations.linear_model import LinearModel
from ..result import Limits, Status, StoppedBy
from .backend import Answer, Backend, whole_scale
from .worker import Desk

_PROOFS = {
    mathopt.TerminationReason.OPTIMAL: Status.OPTIMAL,
    mathopt.TerminationReason.INFEASIBLE: Status.INFEASIBLE,
    mathopt.TerminationReason.UNBOUNDED: Status.UNBOUNDED,
}
_LIMITS = {
    mathopt.Limit.TIME: StoppedBy.TIME,
    mathopt.Limit.NODE: StoppedBy.WORK,
    mathopt.Limit.INTERRUPTED: StoppedBy.INTERRUPT,
}

_ENDLESS = "found value: -inf; invalid PrimalSolutionProto.objective_value"
"""MathOpt's error for a model with an unbounded SCIP solution."""


def solve(
    backend: Backend, model: LinearModel, limits: Limits, start: FloatArray | None, desk: Desk
) -> Answer:
    """Solve a model with SCIP or CP-SAT, as ``backend`` names."""
    cp_sat = backend.whole_numbers_only
    scale = (whole_scale(model.objective) or 1) if cp_sat else 1
    translated = mathopt.Model.from_model_proto(_proto(model, scale))
    columns = list(translated.variables())
    interrupter = SolveInterrupter()
    desk.on_stop(interrupter.interrupt)
    hints = [] if start is None else [mathopt.SolutionHint(dict(zip(columns, start.tolist(), strict=True)))]

    best_value = math.inf

    def hand_over(data: mathopt.CallbackData) -> mathopt.CallbackResult:
        nonlocal best_value
        assert data.solution is not None
        values = model.rounded(np.array([data.solution[column] for column in columns]))
        # SCIP asks about points before it has checked all of their rows, and about some that are no better.
        if (value := model.objective_value(values)) < best_value and model.violation(values) is None:
            best_value = value
            desk.report("incumbent", values)
        return mathopt.CallbackResult()

    try:
        result = mathopt.solve(
            translated,
            mathopt.SolverType.CP_SAT if cp_sat else mathopt.SolverType.GSCIP,
            params=_parameters(limits, desk.remaining(), cp_sat),
            model_params=mathopt.ModelSolveParameters(solution_hints=hints),
            callback_reg=mathopt.CallbackRegistration(events={mathopt.Event.MIP_SOLUTION}),
            cb=hand_over,
            interrupter=interrupter,
        )
    except Exception as error:
        if _ENDLESS in str(error) or _ENDLESS in str(error.__context__):
            return Answer(Status.UNBOUNDED)
        raise
    values = None
    if (
        result.has_primal_feasible_solution()
        and result.termination.reason is not mathopt.TerminationReason.UNBOUNDED
    ):
        values = np.array(result.variable_values(columns))
    bound = result.termination.objective_bounds.dual_bound
    return Answer(
        _PROOFS.get(result.termination.reason),
        _limit(result, limits, desk, cp_sat),
        values,
        bound / scale + model.offset,
        infeasible_or_unbounded=result.termination.reason
        is mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
    )


def _parameters(limits: Limits, seconds: float | None, cp_sat: bool) -> mathopt.SolveParameters:
    parameters = mathopt.SolveParameters(
        time_limit=None if seconds is None else datetime.timedelta(seconds=seconds),
        threads=limits.threads,
        random_seed=limits.seed,
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=0.0,
    )
    if cp_sat:
        # Without interleaving, its workers race each other.
        parameters.cp_sat.interleave_search = limits.threads > 1 and limits.work is not None
        if limits.work is not None:
            parameters.cp_sat.max_deterministic_time = limits.work / 1000.0
    else:
        parameters.node_limit = limits.work
    return parameters


def _limit(found: mathopt.SolveResult, limits: Limits, desk: Desk, cp_sat: bool) -> StoppedBy | None:
    """Return the limit that stopped the solver.

    CP-SAT calls both its limits "undetermined".
    """
    limit = _LIMITS.get(found.termination.limit) if found.termination.limit is not None else None
    if limit is not None or not cp_sat or found.termination.limit is None:
        return limit
    return desk.what_stopped(limits.work)


def _proto(model: LinearModel, scale: int) -> model_pb2.ModelProto:
    """Return the model in bulk, without the offset.

    Column by column takes six times as long.
    """
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(model.columns))
    proto.variables.lower_bounds.extend(model.lower.tolist())
    proto.variables.upper_bounds.extend(model.upper.tolist())
    proto.variables.integers.extend(model.integer.tolist())
    used = np.flatnonzero(model.objective)
    proto.objective.linear_coefficients.ids.extend(used.tolist())
    costs = model.objective[used] if scale == 1 else np.round(model.objective[used] * scale)
    proto.objective.linear_coefficients.values.extend(costs.tolist())
    proto.linear_constraints.ids.extend(range(model.rows))
    proto.linear_constraints.lower_bounds.extend(model.row_lower.tolist())
    proto.linear_constraints.upper_bounds.extend(model.row_upper.tolist())
    entries = model.matrix.tocoo()
    order = np.lexsort((entries.col, entries.row))
    proto.linear_constraint_matrix.row_ids.extend(entries.row[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(entries.col[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(entries.data[order].tolist())
    return proto

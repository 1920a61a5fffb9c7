"""HiGHS, imported in workers only."""

from __future__ import annotations

import highspy
import numpy as np

from ...data.arrays import FloatArray
from ...models.formulations.linear_model import LinearModel
from ...models.programme import Programme, SilentHighs
from ..result import Limits, Status, StoppedBy
from .backend import Answer, Backend
from .worker import Desk

MOST_NODES = 2**31 - 1

_PROOFS = {
    highspy.HighsModelStatus.kOptimal: Status.OPTIMAL,
    highspy.HighsModelStatus.kInfeasible: Status.INFEASIBLE,
    highspy.HighsModelStatus.kUnbounded: Status.UNBOUNDED,
}
_LIMITS = {
    highspy.HighsModelStatus.kTimeLimit: StoppedBy.TIME,
    highspy.HighsModelStatus.kSolutionLimit: StoppedBy.WORK,
    highspy.HighsModelStatus.kInterrupt: StoppedBy.INTERRUPT,
}


def solve(
    backend: Backend, model: LinearModel, limits: Limits, start: FloatArray | None, desk: Desk
) -> Answer:
    """Solve a model with HiGHS."""
    solver = SilentHighs(callbacks=True)
    places = (model.matrix.indptr.astype(np.int64), model.matrix.indices.astype(np.int64))
    ends = (model.row_lower, model.row_upper, model.lower, model.upper)
    programme = Programme(model.objective, *places, model.matrix.data, *ends)
    programme.give_to(solver, model.integer.astype(np.int64))
    if start is not None:
        point = highspy.HighsSolution()
        point.col_value = start.tolist()
        solver.setSolution(point)
    solver.cbMipImprovingSolution.subscribe(
        lambda event: desk.report("incumbent", np.array(event.data_out.mip_solution))
    )
    solver.HandleUserInterrupt = True
    desk.on_stop(solver.cancelSolve)
    # The last option, as it holds the remaining time.
    for option, value in _options(limits, desk.remaining()).items():
        solver.setOptionValue(option, value)
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    bound = None
    if model.integer.any():
        bound = info.mip_dual_bound
    elif status == highspy.HighsModelStatus.kOptimal:
        bound = solver.getObjectiveValue()
    return Answer(
        _PROOFS.get(status),
        _LIMITS.get(status),
        np.array(solver.getSolution().col_value) if feasible else None,
        None if bound is None else bound + model.offset,
        infeasible_or_unbounded=status == highspy.HighsModelStatus.kUnboundedOrInfeasible,
    )


def _options(limits: Limits, seconds: float | None) -> dict[str, float | str]:
    options: dict[str, float | str] = {"mip_rel_gap": 0.0, "random_seed": limits.seed}
    options |= {"threads": limits.threads, "parallel": "on" if limits.threads > 1 else "off"}
    if limits.work is not None:
        options["mip_max_nodes"] = min(limits.work, MOST_NODES)
    if seconds is not None:
        options["time_limit"] = seconds
    return options

"""HiGHS, as it comes with scipy. Imported in workers only."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from ...data.costs.cost import FloatArray
from ...models.formulations.linear_model import LinearModel
from ..result import Limits, Status, StoppedBy
from .backend import Answer, Backend
from .worker import Desk


def solve(
    backend: Backend, model: LinearModel, limits: Limits, start: FloatArray | None, desk: Desk
) -> Answer:
    """Return HiGHS's answer. It takes no start, and has one thread and no seed here."""
    options: dict[str, Any] = {"mip_rel_gap": 0.0}
    if limits.work is not None:
        options["node_limit"] = limits.work
    if (seconds := desk.remaining()) is not None:
        options["time_limit"] = seconds
    matrix = model.matrix.tocsc()
    # Scipy before 1.15 takes no wider indices.
    matrix.indices, matrix.indptr = matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32)
    constraints = LinearConstraint(matrix, model.row_lower, model.row_upper)
    found = milp(
        model.objective,
        integrality=model.integer.astype(np.int64),
        bounds=Bounds(model.lower, model.upper),
        constraints=constraints if model.rows else None,
        options=options,  # type: ignore[arg-type]  # scipy-stubs has no open form of the options
    )
    bound = found.mip_dual_bound
    if found.status == 0 and bound is None:
        bound = found.fun
    proof = {0: Status.OPTIMAL, 2: Status.INFEASIBLE, 3: Status.UNBOUNDED}.get(found.status)
    # scipy has no status for the node limit, and one for several things it doesn't know: the message tells.
    limit = None
    if "Time limit reached" in found.message:
        limit = StoppedBy.TIME
    elif "olution limit reached" in found.message or "teration limit reached" in found.message:
        limit = StoppedBy.WORK
    return Answer(
        proof,
        limit,
        found.x,
        None if bound is None else float(bound) + model.offset,
        infeasible_or_unbounded=found.status == 4 and "infeasible" in found.message,
    )

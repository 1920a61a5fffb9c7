"""CBC through PuLP, imported in workers only."""

from __future__ import annotations

import math
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pulp  # type: ignore[import-untyped]

from ...data.arrays import FloatArray
from ...models.formulations.linear_model import LinearModel
from ..result import Limits, Status, StoppedBy
from .backend import Answer, Backend
from .worker import Desk

OWN_SHARE = 0.8
"""Share of the time for CBC, which rarely checks the clock."""

_BOUND = re.compile(r"(best possible|Lower bound:)\s*([-+.\de]+)")


def solve(
    backend: Backend, model: LinearModel, limits: Limits, start: FloatArray | None, desk: Desk
) -> Answer:
    """Solve a model with CBC.

    PuLP calls a solution at a time limit "Optimal", and has an objective value even without a solution. So
    only its solution status is used. It does not expose CBC's bound, which is read from the log.
    """
    begun = time.monotonic()
    problem, columns = _translated(model)
    handle, log = tempfile.mkstemp(suffix=".log")
    os.close(handle)
    if start is not None:
        for column, value in zip(columns, start.tolist(), strict=True):
            column.setInitialValue(value, check=False)
    # PuLP writes the model and reads the solution in about as long as it builds the model.
    remaining, built = desk.remaining(), time.monotonic() - begun
    command = pulp.PULP_CBC_CMD(
        msg=False,
        timeLimit=None if remaining is None else max(0.1, OWN_SHARE * remaining - built),
        threads=limits.threads if limits.threads > 1 else None,
        gapRel=0.0,
        maxNodes=limits.work,
        warmStart=start is not None,
        logPath=log,
        options=[f"randomSeed {limits.seed + 1}", f"randomCbcSeed {limits.seed + 1}"],
    )
    # This process ignores SIGINT; CBC, in its group, ends with its best solution on it.
    desk.on_stop(lambda: os.killpg(0, signal.SIGINT))
    problem.solve(command)
    text = Path(log).read_text(errors="replace")
    proof = {
        pulp.LpSolutionOptimal: Status.OPTIMAL,
        pulp.LpSolutionUnbounded: Status.UNBOUNDED,
    }.get(problem.sol_status)
    # For infeasible whole numbers, only one of the two statuses is set.
    infeasible = pulp.LpStatusInfeasible in (problem.status, problem.sol_status)
    if infeasible:
        proof = Status.INFEASIBLE
    either = infeasible and "or unbounded" in text
    has_solution = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    values = np.array([column.value() or 0.0 for column in columns]) if has_solution else None
    bound = _bound(text, model, proof)
    return Answer(
        None if either else proof, _limit(text, desk), values, bound, infeasible_or_unbounded=either
    )


def _translated(model: LinearModel) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    problem = pulp.LpProblem("model", pulp.LpMinimize)
    columns = [
        pulp.LpVariable(f"x{j}", _finite(low), _finite(high), "Integer" if whole else "Continuous")
        for j, (low, high, whole) in enumerate(zip(model.lower, model.upper, model.integer, strict=True))
    ]
    costs = pulp.LpAffineExpression(list(zip(columns, model.objective.tolist(), strict=True)))
    problem.setObjective(costs)
    matrix = model.matrix
    for i, (low, high) in enumerate(zip(model.row_lower.tolist(), model.row_upper.tolist(), strict=True)):
        span = slice(matrix.indptr[i], matrix.indptr[i + 1])
        entries = zip(matrix.indices[span].tolist(), matrix.data[span].tolist(), strict=True)
        total = pulp.LpAffineExpression([(columns[j], value) for j, value in entries])
        if low == high:
            problem.addConstraint(pulp.LpConstraint(total, pulp.LpConstraintEQ, f"r{i}", low))
            continue
        if math.isfinite(low):
            problem.addConstraint(pulp.LpConstraint(total, pulp.LpConstraintGE, f"l{i}", low))
        if math.isfinite(high):
            problem.addConstraint(pulp.LpConstraint(total, pulp.LpConstraintLE, f"u{i}", high))
    return problem, columns


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _limit(log: str, desk: Desk) -> StoppedBy | None:
    if desk.stopping:
        return StoppedBy.INTERRUPT
    if "Stopped on time" in log:
        return StoppedBy.TIME
    return StoppedBy.WORK if "Stopped on node limit" in log else None


def _bound(log: str, model: LinearModel, proof: Status | None) -> float | None:
    """Return the last bound in a log, rounded down.

    The log has eight digits, or thousandths.
    """
    if proof is not None or not (bounds := _BOUND.findall(log)):
        return None
    last = {words: float(number) for words, number in bounds}
    return model.offset + max(
        value - (1e-7 * abs(value) if words == "best possible" else 1e-3) for words, value in last.items()
    )

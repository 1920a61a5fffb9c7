"""Solving the scheduling problem by one of its formulations, on one of the backends."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from ..data.bound import Bound
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..models.formulations.full_model import literal_model, read_schedule, repaired_model, write_schedule
from ..models.formulations.linear_model import TOLERANCE
from ..models.formulations.slot_free import (
    interval_model,
    list_schedule,
    read_slot_free,
    schedule_of_starts,
    slot_free_model,
    write_slot_free,
)
from .backends.backend import BACKENDS
from .backends.linear import LinearResult, find_backend, solve_linear
from .backends.worker import run_in_worker
from .bounds.proven_bound import bound_within
from .result import Limits, Result, Status, StoppedBy

Formulation = Literal["slot-free", "repaired", "literal"]
CP_SAT = "cp-sat"
"""The backend of the slot-free formulation that takes intervals; the others take linear models."""


def solve_full(
    problem: Problem,
    formulation: Formulation = "slot-free",
    *,
    backend: str = CP_SAT,
    limits: Limits | None = None,
    start: Schedule | None = None,
) -> Result:
    """
    Return what a formulation of the full problem gives on a backend.

    Parameters
    ----------
    formulation
        ``slot-free``; ``repaired``, the paper's (1)-(25) put right; or ``literal``, as printed, whose optimum
        is handed back only if the referee accepts it, and whose bound is none.
    backend
        ``cp-sat`` (slot-free only), or one of :data:`~batchbound.solvers.backends.backend.BACKENDS`.
    limits
        The work is in the backend's unit.
    start
        A schedule to start from, or None.

    Raises
    ------
    ValueError
        If the formulation cannot say the problem, or the backend not take the formulation.
    ImportError
        If the backend's library is not installed.
    """
    limits, begun = limits or Limits(), time.perf_counter()
    if start is not None and (broken := start.check(problem)) is not None:
        raise ValueError(f"the start is not a schedule of this problem: {broken}")
    if backend == CP_SAT:
        if formulation != "slot-free":
            raise ValueError(f"the backend {CP_SAT!r} takes the formulation 'slot-free' only")
        return _by_intervals(problem, limits, start)
    if formulation == "literal":
        return _literal(problem, backend, limits)
    if formulation == "repaired":
        full = repaired_model(problem)
        ours, limits = _bounded(problem, limits)
        found = solve_linear(
            full.model, backend, limits, None if start is None else write_schedule(full, start)
        )
        schedule = None if found.values is None else read_schedule(full, found.values)
    else:
        free = slot_free_model(problem)
        ours, limits = _bounded(problem, limits)
        found = solve_linear(
            free.model, backend, limits, None if start is None else write_slot_free(free, start)
        )
        schedule = None if found.values is None else read_slot_free(free, found.values)
    return _judged(problem, ours, f"{formulation} on {backend}", found, schedule, begun)


def _bounded(problem: Problem, limits: Limits) -> tuple[Bound, Limits]:
    """Return our own bound, and the limits that it leaves the backend."""
    ours, seconds = bound_within(problem, limits.seconds)
    return ours, replace(limits, seconds=seconds)


def _judged(
    problem: Problem,
    ours: Bound,
    solver: str,
    found: LinearResult,
    schedule: Schedule | None,
    begun: float,
) -> Result:
    """Return the result, after the referee has seen the schedule."""
    if schedule is not None and int(schedule.rounds.sum()) > int(problem.rounds.sum()):
        # What a backend found by its limit may let slots stand empty for longer than any schedule needs.
        schedule = schedule.without_idle_rounds(problem)
    broken = None if schedule is None else schedule.check(problem)
    assert broken is None, f"a solution of a correct formulation breaks a rule: {broken}"
    proven = _stronger(ours, found.bound, solver, found.version)
    if schedule is None:
        makespan, status = None, found.status
    else:
        makespan = schedule.makespan(problem)
        status = _status(makespan, proven)
    stopped_by = StoppedBy.PROOF if status is Status.OPTIMAL else found.stopped_by
    return Result(
        status,
        stopped_by,
        schedule,
        makespan,
        proven,
        time.perf_counter() - begun,
        solver,
        found.version,
        found.message,
        ours,
    )


def _status(makespan: float, proven: Bound) -> Status:
    return Status.OPTIMAL if makespan - proven.seconds <= TOLERANCE * makespan else Status.FEASIBLE


def _stronger(ours: Bound, seconds: float | None, solver: str, version: str) -> Bound:
    """Return the solver's bound, or our own where that is as good: it has a certificate."""
    if seconds is None or seconds <= ours.seconds:
        return ours
    return Bound(
        seconds,
        f"branch and bound, {solver}",
        {"proven by the solver": seconds},
        {"kind": "solver", "solver": solver, "version": version},
    )


def _literal(problem: Problem, backend: str, limits: Limits) -> Result:
    full = literal_model(problem)
    found = solve_linear(full.model, backend, limits)
    schedule = None if found.values is None else read_schedule(full, found.values)
    broken = None if schedule is None else schedule.check(problem)
    message = found.message
    if broken is not None:
        message = (
            f"what the printed model calls {found.status}, {found.objective:.6g} s, breaks a rule: {broken}"
        )
        schedule = None
    if schedule is not None:
        status = Status.FEASIBLE
    else:
        status = Status.INFEASIBLE if found.status is Status.INFEASIBLE else Status.NO_SOLUTION
    return Result(
        status,
        found.stopped_by,
        schedule,
        None if schedule is None else schedule.makespan(problem),
        None,
        found.seconds,
        f"literal on {backend}",
        found.version,
        message,
    )


def _by_intervals(problem: Problem, limits: Limits, start: Schedule | None) -> Result:
    find_backend("ortools-cp-sat")
    begun = time.perf_counter()
    begin = start or list_schedule(problem)
    model = interval_model(problem, begin)
    places = None if begin is None else np.stack((begin.starts[begin.bin_of], begin.bin_of))
    ours, limits = _bounded(problem, limits)
    outcome = run_in_worker(
        "batchbound.solvers.backends.cp_sat", "solve_intervals", (model, limits, places), limits.seconds
    )
    answer = outcome.answer if isinstance(outcome.answer, Mapping) else {}
    version, message = BACKENDS["ortools-cp-sat"].version, outcome.message
    best, makespan = begin, math.inf if begin is None else begin.makespan(problem)
    for found in (answer.get("starts"), outcome.reports.get("incumbent")):
        if not isinstance(found, np.ndarray):
            continue
        schedule = schedule_of_starts(problem, *found)
        if (broken := schedule.check(problem)) is not None:
            message = message or f"a solution of the backend was refused: {broken}"
        elif schedule.makespan(problem) < makespan:
            best, makespan = schedule, schedule.makespan(problem)
    units, proven_seconds = answer.get("bound", outcome.reports.get("bound")), None
    if isinstance(units, int | float) and math.isfinite(units):
        proven_seconds = math.ceil(units - 1e-6) * model.unit + model.constant
        if proven_seconds > makespan * (1 + TOLERANCE):
            proven_seconds, message = None, "the backend's bound is above a checked schedule"
        else:
            proven_seconds = min(makespan, proven_seconds)
    solver = f"slot-free on {CP_SAT}"
    proven = _stronger(ours, proven_seconds, solver, version)
    status = Status.NO_SOLUTION if best is None else _status(makespan, proven)
    limit = answer.get("limit")
    ended = outcome.stopped_by or (limit if isinstance(limit, StoppedBy) else StoppedBy.GAVE_UP)
    return Result(
        status,
        StoppedBy.PROOF if status is Status.OPTIMAL else ended,
        best,
        None if best is None else makespan,
        proven,
        time.perf_counter() - begun,
        solver,
        version,
        message,
        ours,
    )

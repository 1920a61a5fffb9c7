"""Formulations of the scheduling problem, solved on backends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from ..data.bound import Bound
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..models.bounds.makespan import trivial_bound
from ..models.bounds.prove import bound_within
from ..models.formulations.full_model import (
    bins_needed,
    refuse_literal,
    refuse_repaired,
    without_empty_bins,
)
from ..models.formulations.linear_model import TOLERANCE
from ..models.formulations.slot_free import (
    interval_model,
    list_schedule,
    refuse_slot_free,
    schedule_of_starts,
)
from .backends.backend import BACKENDS
from .backends.formulation import Solved
from .backends.linear import BackendError, LinearResult, find_backend
from .backends.worker import Outcome, run_in_worker
from .result import Limits, Result, Status, StoppedBy
from .search.baselines import simulated_schedule
from .search.constructive import ski_rental_schedule

Formulation = Literal["slot-free", "repaired", "literal"]
CP_SAT = "cp-sat"
"""Backend of the slot-free formulation that takes intervals."""
_NO_BETTER = "it found nothing better than the rule's schedule that it began from"
_REFUSALS: Mapping[Formulation, Callable[[Problem], None]] = {
    "slot-free": refuse_slot_free,
    "repaired": refuse_repaired,
    "literal": refuse_literal,
}


def solve_full(
    problem: Problem,
    formulation: Formulation = "slot-free",
    *,
    backend: str = CP_SAT,
    limits: Limits | None = None,
    start: Schedule | None = None,
) -> Result:
    """Solve a formulation of the full problem on a backend.

    formulation: ``slot-free``; ``repaired``, the paper's (1)-(25) with corrections; or ``literal``, as
        printed. The optimum of ``literal`` needs the referee's approval, and is no bound.
    backend: ``cp-sat`` (slot-free only), or one of :data:`~batchbound.solvers.backends.backend.BACKENDS`.
    limits: Work is in the backend's unit.
    start: Schedule to start from; by default the better of two rules' schedules. The literal model takes
        none.

    Raises ValueError if formulation, problem and backend do not fit, and ImportError without the backend's
    library.
    """
    limits, begun = limits or Limits(), time.perf_counter()
    if start is not None and (broken := start.check(problem)) is not None:
        raise ValueError(f"the start is not a schedule of this problem: {broken}")
    if backend == CP_SAT:
        if formulation != "slot-free":
            raise ValueError(f"the backend {CP_SAT!r} takes the formulation 'slot-free' only")
        return _by_intervals(problem, limits, start)
    _REFUSALS[formulation](problem)
    if formulation == "literal":
        return _literal(problem, backend, limits)
    begin = _rule_schedule(problem) if start is None else start
    without_empty_bins(begin, bins_needed(problem))
    ours = _Bounding(problem, limits.seconds)
    limits_left, before = limits.left(begun), time.perf_counter() - begun
    solution, schedule, started = _modelled(problem, formulation, backend, limits_left, begin, ours)
    solution = replace(solution, seconds=before + solution.seconds)
    judged = _judged(problem, ours.bound, f"{formulation} on {backend}", solution, (schedule, begin))
    judged = replace(judged, started=started)
    return judged if start is not None else _said(problem, judged, begin)


def _rule_schedule(problem: Problem) -> Schedule:
    """Return the better longest-first schedule, with or without waiting."""
    rented = ski_rental_schedule(problem).without_idle_steps(problem)
    makespan = rented.makespan(problem)
    listed = list_schedule(problem) or simulated_schedule(problem, "lpt", makespan)
    return rented if listed is None or makespan <= listed.makespan(problem) else listed


def _said(problem: Problem, result: Result, rule: Schedule) -> Result:
    """Remark that a rule's schedule is returned, if nothing better was found."""
    if not result.started or result.makespan is None or result.makespan < rule.makespan(problem):
        return result
    return replace(result, message="; ".join(part for part in (result.message, _NO_BETTER) if part))


class _Bounding:
    """Our own bound, proven while a worker starts."""

    def __init__(self, problem: Problem, seconds: float | None) -> None:
        self._problem, self._seconds = problem, seconds
        self.bound = trivial_bound(problem)

    def __call__(self) -> None:
        self.bound, _ = bound_within(self._problem, self._seconds)


def _modelled(
    problem: Problem,
    formulation: Formulation,
    backend: str,
    limits: Limits,
    start: Schedule | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[LinearResult, Schedule | None, bool]:
    """Solve a formulation in a worker; read its schedule, and whether it was begun.

    The worker also builds the model, as that can outlast the limit.
    """
    chosen = find_backend(backend)
    outcome = run_in_worker(
        "batchbound.solvers.backends.formulation",
        "solve_formulation",
        (problem, formulation, chosen, limits, start),
        limits.seconds,
        meanwhile=meanwhile,
    )
    answer, message = outcome.answer, outcome.message
    if isinstance(answer, str):
        raise BackendError(f"{backend} can't be asked for this model: {answer}. Use another backend.")
    if isinstance(answer, Solved):
        answered, message = answer.found, "; ".join(part for part in (message, answer.found.message) if part)
        proven = answered.stopped_by is StoppedBy.PROOF
        stopped_by = answered.stopped_by if proven else outcome.stopped_by or answered.stopped_by
        return (
            replace(answered, seconds=outcome.seconds, stopped_by=stopped_by, message=message),
            answer.schedule,
            True,
        )
    if outcome.stopped_by is StoppedBy.TIME and not _started(outcome):
        message = "its limit came before the model was built"
    schedule = outcome.reports.get("incumbent")
    assert schedule is None or isinstance(schedule, Schedule)
    stopped_by, solver = outcome.stopped_by or StoppedBy.FINISHED, (chosen.name, chosen.version)
    return (
        LinearResult(Status.NO_SOLUTION, stopped_by, None, None, None, outcome.seconds, *solver, message),
        schedule,
        _started(outcome),
    )


def _started(outcome: Outcome) -> bool:
    """Return whether a worker has built its model."""
    return outcome.answer is not None or bool(outcome.reports.get("built"))


def _judged(
    problem: Problem,
    ours: Bound,
    solver: str,
    found: LinearResult,
    schedules: tuple[Schedule | None, Schedule],
) -> Result:
    """Return the best schedule that the referee accepts."""
    better, best = schedules
    if better is not None and int(better.decode_steps.sum()) > int(problem.decode_steps.sum()):
        # A schedule found at the limit may leave slots idle for longer than needed.
        better = better.without_idle_steps(problem)
    broken = None if better is None else better.check(problem)
    assert broken is None, f"a solution of a correct formulation breaks a rule: {broken}"
    if better is not None and better.makespan(problem) < best.makespan(problem):
        best = better
    makespan, seconds, message = best.makespan(problem), found.bound, found.message
    if seconds is not None and seconds > makespan * (1 + TOLERANCE):
        seconds, message = None, "the backend's bound is above a checked schedule"
    proven = _stronger(ours, seconds, solver, found.version)
    status = _status(makespan, proven)
    return Result(
        status,
        StoppedBy.PROOF if status is Status.OPTIMAL else found.stopped_by,
        best,
        makespan,
        proven,
        found.seconds,
        solver,
        found.version,
        message,
        ours,
    )


def _status(makespan: float, proven: Bound) -> Status:
    return Status.OPTIMAL if makespan - proven.seconds <= TOLERANCE * makespan else Status.FEASIBLE


def _stronger(ours: Bound, seconds: float | None, solver: str, version: str) -> Bound:
    """Return the solver's bound, or our certified one if as good."""
    if seconds is None or seconds <= ours.seconds:
        return ours
    return Bound(
        seconds,
        f"branch and bound, {solver}",
        {"proven by the solver": seconds},
        {"kind": "solver", "solver": solver, "version": version},
    )


def _literal(problem: Problem, backend: str, limits: Limits) -> Result:
    solution, schedule, started = _modelled(problem, "literal", backend, limits)
    broken = None if schedule is None else schedule.check(problem)
    message = solution.message
    if broken is not None:
        what = "a solution of the printed model"
        if solution.objective is not None:
            what = f"what the printed model calls {solution.status}, {solution.objective:.6g} s,"
        message = f"{what} breaks a rule: {broken}"
        schedule = None
    if schedule is not None:
        status = Status.FEASIBLE
    else:
        status = Status.INFEASIBLE if solution.status is Status.INFEASIBLE else Status.NO_SOLUTION
    return Result(
        status,
        solution.stopped_by,
        schedule,
        None if schedule is None else schedule.makespan(problem),
        None,
        solution.seconds,
        f"literal on {backend}",
        solution.version,
        message,
        started=started,
    )


def _by_intervals(problem: Problem, limits: Limits, start: Schedule | None) -> Result:
    find_backend("ortools-cp-sat")
    begun = time.perf_counter()
    begin = _rule_schedule(problem) if start is None else start
    model = interval_model(problem, begin)
    places = np.stack((begin.starts[begin.bin_of], begin.bin_of))
    bounding, before = _Bounding(problem, limits.seconds), time.perf_counter() - begun
    outcome = run_in_worker(
        "batchbound.solvers.backends.cp_sat",
        "solve_intervals",
        (model, limits, places),
        limits.left(begun).seconds,
        meanwhile=bounding,
    )
    ours = bounding.bound
    answer = outcome.answer if isinstance(outcome.answer, Mapping) else {}
    version, message = BACKENDS["ortools-cp-sat"].version, outcome.message
    best, makespan = begin, begin.makespan(problem)
    for starts in (answer.get("starts"), outcome.reports.get("incumbent")):
        if not isinstance(starts, np.ndarray):
            continue
        schedule = schedule_of_starts(problem, *starts)
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
    status = _status(makespan, proven)
    limit = answer.get("limit")
    ended = outcome.stopped_by or (limit if isinstance(limit, StoppedBy) else StoppedBy.FINISHED)
    result = Result(
        status,
        StoppedBy.PROOF if status is Status.OPTIMAL else ended,
        best,
        makespan,
        proven,
        before + outcome.seconds,
        solver,
        version,
        message,
        ours,
        started=_started(outcome),
    )
    return result if start is not None else _said(problem, result, begin)

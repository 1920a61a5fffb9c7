"""From a problem to a plan: solve, check, bound."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..data.plan import Maker, Plan, PromptSource
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..heuristics.loop import schedule_of
from ..heuristics.registry import policy_named
from ..heuristics.simulate import simulate
from ..solvers.bounds.proven_bound import proven_bound
from ..solvers.result import Limits, Result
from ..solvers.search.timetable import search_timetable
from ..solvers.solve import DEFAULT_SECONDS, DEFAULT_SOLVER, solve

SERVED_REQUESTS = 20_000
"""Requests up to which a policy is simulated for a schedule to start from."""

TIMETABLE_SHARES = (0.2, 0.65)
"""Shares of the time for timetables where memory is scarce; the second only if the first was worth it."""

LAST_SHARE = 0.1
"""Least share of the time for the solver, after those."""


class PlanningError(RuntimeError):
    """No plan came out: the solver found no schedule, or what it found breaks a rule."""


def make_plan(
    problem: Problem,
    *,
    solver: str = DEFAULT_SOLVER,
    limits: Limits | None = None,
    start: Schedule | None = None,
    lengths: Mapping[str, object] | None = None,
    cost_source: Mapping[str, object] | None = None,
    prompts: PromptSource | None = None,
) -> Plan:
    """
    Return a plan for a problem: a checked schedule, its predicted makespan, and the best bound proven.

    Parameters
    ----------
    problem
        Requests, costs and limits; arrivals are ignored, as a batch job has everything at the start.
    solver
        A name that :func:`~batchbound.solvers.solve.solve` knows.
    limits
        When to stop; after :data:`DEFAULT_SECONDS` by default.
    start
        A schedule to improve on, for solvers that can.
    lengths, cost_source, prompts
        What the plan records of where its numbers come from.

    Raises
    ------
    PlanningError
        If the solver found no schedule, or one that the referee rejects.
    """
    problem = problem.without_arrivals()
    limits = Limits(seconds=DEFAULT_SECONDS) if limits is None else limits
    begun = time.perf_counter()
    left = limits
    if solver == DEFAULT_SOLVER and _scarce(problem):
        start = _start_within_memory(problem, limits, start)
        if limits.seconds is not None:
            left = replace(limits, seconds=max(LAST_SHARE * limits.seconds, limits.seconds - _since(begun)))
    result = solve(problem, solver, limits=left, start=start)
    if result.schedule is None:
        said = f": {result.message}" if result.message else ""
        raise PlanningError(
            f"the solver {result.solver!r} found no schedule"
            f" ({result.status}, stopped by {result.stopped_by}{said})."
            " Give it more time or choose another solver."
        )
    violation = result.schedule.check(problem)
    if violation is not None:
        raise PlanningError(f"the solver {result.solver!r} broke a rule: {violation}")
    # A plan's bound is one that `verify` can derive again without the solver.
    bound = proven_bound(problem) if result.repeatable is None else result.repeatable
    return Plan(
        problem=problem,
        schedule=result.schedule,
        makespan=result.schedule.makespan(problem),
        bound=bound,
        maker=_maker(replace(result, seconds=_since(begun)), limits.seed),
        lengths={} if lengths is None else lengths,
        cost_source={} if cost_source is None else cost_source,
        prompts=prompts,
    )


def _scarce(problem: Problem) -> bool:
    """Return whether as many requests as there are slots could hold more than the KV capacity."""
    if problem.kv_capacity is None:
        return False
    return int(np.sort(problem.kv_peak)[-problem.slots :].sum()) > problem.kv_capacity


def _start_within_memory(problem: Problem, limits: Limits, start: Schedule | None) -> Schedule | None:
    """Return the best of the given start, a policy's schedule and timetables, or None without any."""
    found = [each for each in (start, _served(problem)) if each is not None]
    for share in TIMETABLE_SHARES:
        timetable = search_timetable(
            problem,
            seconds=None if limits.seconds is None else limits.seconds * share,
            iterations=limits.work,
            seed=limits.seed,
        )
        beaten = timetable is None or any(
            each.makespan(problem) <= timetable.makespan(problem) for each in found
        )
        if timetable is not None:
            found.append(timetable)
        if beaten or limits.seconds is None:
            break
    return min(found, key=lambda schedule: schedule.makespan(problem), default=None)


def _served(problem: Problem) -> Schedule | None:
    """
    Return what the ski-rental policy makes of a KV capacity, or None if it breaks a rule.

    Unlike the search's own first schedules, the policy lets no later request pass one that does not fit yet,
    which was better where long prompts are what fills the memory.
    """
    if len(problem) > SERVED_REQUESTS:
        return None
    trace = simulate(problem, policy_named("lpt-ski", problem))
    schedule = None if trace.evictions else schedule_of(trace)
    return None if schedule is None or schedule.check(problem) is not None else schedule


def _since(begun: float) -> float:
    return time.perf_counter() - begun


def _maker(result: Result, seed: int) -> Maker:
    return Maker(
        solver=result.solver,
        version=result.version,
        status=result.status,
        stopped_by=result.stopped_by,
        seconds=result.seconds,
        seed=seed,
    )

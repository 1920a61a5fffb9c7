"""Small problems solved to a proven optimum."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.formulations.full_model import UnsupportedProblemError
from ..result import Limits, StoppedBy
from ..search.core.compiled import compiled_core
from ..search.core.parameters import ExactParameters
from ..search.core.plans import countable
from ..search.schedule_search import search_schedule
from .compiled_search import EXACT, can_list_orders, can_list_states, search_exactly
from .outcome import REPEATABLE_STEPS, ExactOutcome

STEPS_PER_REQUEST = 15
"""Steps per request of the search for a schedule to beat."""
FEWEST = 12
"""Requests up to which the search over states solves most problems."""
AGAIN_SHARE = 0.6
"""Share of the time left for a repeatable proof, after another one."""
START_SHARE = 0.25
"""Share of the time for a schedule to beat."""


def solve_small(
    problem: Problem,
    limits: Limits | None = None,
    start: Schedule | None = None,
    params: ExactParameters = EXACT,
) -> ExactOutcome:
    """Return an optimal schedule, or the best within the limits.

    Small problems are searched by states; under scarce memory by orders from the end first. Raises
    UnsupportedProblemError for arrival times, shared prompts or too many requests.

    limits: Work is in states.
    start: Schedule to beat; by default that of a short search.
    """
    if not can_solve_exactly(problem):
        raise UnsupportedProblemError(f"the exact search cannot take {_unsupported(problem)}")
    limits, begun = limits or Limits(), time.perf_counter()
    if start is None:
        seconds = None if limits.seconds is None else START_SHARE * limits.seconds
        steps = STEPS_PER_REQUEST * len(problem)
        start = search_schedule(problem, seconds=seconds, iterations=steps, seed=limits.seed).schedule
    start, limits_left = start.without_idle_steps(problem), limits.left(begun)
    if not can_list_orders(problem):
        outcome = _beside_others(problem, limits_left, start, params)
        limits_left = limits.left(begun)
        return search_exactly(problem, "states", limits_left, start, params) if outcome is None else outcome
    first = search_exactly(problem, "orders", limits_left, start, params)
    if first.stopped_by in (StoppedBy.TIME, StoppedBy.WORK, StoppedBy.INTERRUPT):
        return first
    limits_left = limits.left(begun, first.steps)
    if first.stopped_by is not StoppedBy.PROOF:
        return search_exactly(problem, "states", limits_left, first.schedule, params)
    # A checker repeats the argument by states: it is tried as long as a checker could follow.
    work = REPEATABLE_STEPS["states"]
    seconds = None if limits_left.seconds is None else AGAIN_SHARE * limits_left.seconds
    limits_left = replace(
        limits_left,
        seconds=seconds,
        work=work if limits_left.work is None else min(work, limits_left.work),
    )
    again = search_exactly(problem, "states", limits_left, first.schedule, params)
    return again if again.stopped_by is StoppedBy.PROOF else first


def _beside_others(
    problem: Problem, limits: Limits, start: Schedule, params: ExactParameters
) -> ExactOutcome | None:
    """Prove an optimum in which requests without decode steps join stages.

    Where a stage costs its base and its tokens, no schedule costs less than an optimum of the other requests
    and the tokens of these.
    """
    cost, running = problem.cost, np.flatnonzero(problem.decode_steps)
    if cost.prefill_floor or cost.prefill_per_token_beyond or not 0 < len(running) < len(problem):
        return None
    rest = replace(problem, workload=problem.workload.select(running))
    if not can_list_orders(rest):
        return None
    initial = Schedule.from_bins(rest, start.bin_of[running], start.decode_steps).without_idle_steps(rest)
    seconds = None if limits.seconds is None else START_SHARE * limits.seconds
    outcome = search_exactly(rest, "orders", replace(limits, seconds=seconds), initial, params)
    if outcome.stopped_by is not StoppedBy.PROOF:
        return None
    bin_of = np.full(len(problem), -1)
    bin_of[running] = outcome.schedule.bin_of
    schedule: Schedule | None = None
    for request in np.flatnonzero(problem.decode_steps == 0).tolist():
        for stage in np.unique(outcome.schedule.bin_of).tolist():
            bin_of[request] = stage
            schedule = _checked(problem, bin_of, outcome.schedule.decode_steps)
            if schedule is not None:
                break
        if schedule is None:
            return None
    return None if schedule is None else replace(outcome, schedule=schedule)


def _checked(problem: Problem, bin_of: IntArray, decode_steps: IntArray) -> Schedule | None:
    """Return the schedule of the requests with a stage, if it breaks no rule."""
    there = np.flatnonzero(bin_of >= 0)
    part = replace(problem, workload=problem.workload.select(there))
    try:
        schedule = Schedule.from_bins(part, bin_of[there], decode_steps)
    except ValueError:
        return None
    return schedule if schedule.check(part) is None else None


def can_solve_exactly(problem: Problem) -> bool:
    """Return whether an exact search can be tried."""
    return can_list_states(problem)


def _unsupported(problem: Problem) -> str:
    if problem.workload.arrival.any():
        return "arrival times; choose another solver"
    if problem.shares_prompts:
        return "shared prompts; choose another solver"
    if compiled_core() is None:
        return "any problem without its compiled library; install batchbound where there is a C++ compiler"
    if not countable(problem):
        return "as many decode steps or tokens; choose another solver"
    return f"{len(problem):,} requests on {problem.slots:,} slots; choose another solver, or fewer requests"

"""The two compiled exact searches."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from ...data.problem import Problem
from ...data.schedule import Schedule
from ..result import Limits, StoppedBy
from ..search.core.compiled import Allowance, Found, Int32Array, call_exact, compiled_core
from ..search.core.parameters import ExactParameters
from ..search.core.plans import countable, job_of
from .outcome import Argument, ExactOutcome

MOST_REQUESTS: dict[Argument, int] = {"states": 24, "orders": 14}
"""Most requests of each search."""
MOST_CHOICES = 60_000
"""Most sets of requests that a stage can start."""
PRECISION = 1e-10
"""Relative difference below which two costs are equal."""
EXACT = ExactParameters()

_ENDED = (StoppedBy.PROOF, StoppedBy.TIME, StoppedBy.FINISHED)
_NAMES: dict[Argument, Literal["core_stage_states", "core_end_orders"]] = {
    "states": "core_stage_states",
    "orders": "core_end_orders",
}


def can_list_states(problem: Problem) -> bool:
    """Return whether the search by states can be tried.

    The problem must be small, without arrival times and shared prompts.
    """
    slots = min(problem.slots, len(problem))
    return (
        len(problem) <= MOST_REQUESTS["states"]
        and not problem.workload.arrival.any()
        and not problem.shares_prompts
        and countable(problem)
        and sum(math.comb(len(problem), size) for size in range(1, slots + 1)) <= MOST_CHOICES
        and compiled_core() is not None
    )


def can_list_orders(problem: Problem) -> bool:
    """Return whether the search by orders can be tried.

    It takes few requests under scarce memory, all with decode steps.
    """
    return (
        len(problem) <= MOST_REQUESTS["orders"]
        and problem.memory_can_run_out
        and problem.cost.decode_base > 0
        and bool((problem.decode_steps > 0).all())
        and can_list_states(problem)
    )


def search_exactly(
    problem: Problem, argument: Argument, limits: Limits, start: Schedule, params: ExactParameters = EXACT
) -> ExactOutcome:
    """Return an optimal schedule, or the best within the limits.

    limits: Work is in states.
    start: Schedule to beat.
    """
    cost, makespan = problem.cost, start.makespan(problem)
    fixed = cost.decode_per_slot * int(problem.decode_steps.sum())
    fixed += cost.decode_per_kv_token * problem.kv_token_steps
    seconds = math.inf if limits.seconds is None else limits.seconds
    allowance = Allowance(seconds, limits.work, -math.inf)
    columns = _columns(problem)  # C reads them during the call
    job = job_of(problem, columns, slots=problem.slots, kv_capacity=problem.kv_capacity)
    answer = call_exact(_NAMES[argument], job, params, allowance, makespan - fixed, PRECISION * makespan)
    best, ended = start, _ENDED[answer.ended]
    if np.isfinite(answer.cost):
        best = _schedule(problem, answer)
    if answer.interrupted:
        ended = StoppedBy.INTERRUPT
    elif ended is StoppedBy.TIME and limits.work is not None and answer.moves >= limits.work:
        ended = StoppedBy.WORK
    return ExactOutcome(best, ended, answer.moves, argument)


def _columns(problem: Problem) -> list[Int32Array]:
    """Return the requests' columns for C."""
    columns = (problem.decode_steps, problem.prompt_tokens, problem.kv_at_start)
    return [np.ascontiguousarray(column, dtype=np.int32) for column in columns]


def _schedule(problem: Problem, found: Found) -> Schedule:
    stages, stage = np.unique(found.stage, return_inverse=True)
    times = np.zeros(len(stages), dtype=np.int64)
    times[stage] = found.start
    end = int((found.start + problem.decode_steps).max())
    return Schedule.from_bins(problem, stage, np.diff(np.append(times, end)))

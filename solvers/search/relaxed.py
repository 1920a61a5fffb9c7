"""Searches without the token cap or the KV capacity, whose schedules are then made to keep them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...data.problem import Problem
from ...data.schedule import Schedule
from .backward import slots_are_scarcer
from .incumbent import Budget, SearchRun
from .ruin_recreate import MOST_STEPS, RuinRecreate
from .stage_split import stages_capped
from .stages.search import LONGEST_ROUNDING, ROUNDING_LEFT, STRETCHED, STRETCHES
from .stages.slot_flow import stretched
from .stages.within_memory import served_within_memory

LEAST_SECONDS = 0.2
"""Seconds below which a search of the relaxed problem is not worth its baselines."""

OVER_CAPACITY = "over capacity"
"""Name of the note that holds the relaxed schedule which breaks the capacity."""


def slots_bind(problem: Problem) -> bool:
    """Return whether slots are scarcer than memory."""
    return slots_are_scarcer(problem)


def relax_cap(run: SearchRun, budget: Budget) -> None:
    """Search without the token cap, and split prefill stages to keep it."""
    if budget.left >= LEAST_SECONDS:
        run.best.offer(stages_capped(run.problem, _relaxed(run, budget, None)))


def relax_memory(run: SearchRun, budget: Budget) -> None:
    """Search without cap and capacity, to the end if what is found keeps the capacity all the same."""
    problem, best = run.problem, run.best
    if budget.left < LEAST_SECONDS:
        return
    start = _relaxed(run, budget, None)
    capped = stages_capped(problem, start)
    best.offer(capped)
    if capped.check(problem) is not None:
        run.notes[OVER_CAPACITY] = start
    elif not (rest := Budget(best, 1.0)).over:
        best.offer(stages_capped(problem, _relaxed(run, rest, start)))


def _relaxed(run: SearchRun, budget: Budget, start: Schedule | None) -> Schedule:
    """Return what a search with neither cap nor capacity finds."""
    return run.subsearch(replace(run.problem, kv_capacity=None, prefill_token_cap=None), budget, start)


def serve_within_memory(run: SearchRun, budget: Budget) -> None:
    """Keep the stage times of the relaxed schedule, and the capacity with them."""
    best, problem, relaxed = run.best, run.problem, run.notes.get(OVER_CAPACITY)
    if relaxed is None:
        return
    used = np.unique(relaxed.bin_of[problem.decode_steps > 0])
    times = np.append(relaxed.starts[used], relaxed.decode_steps.sum()) - relaxed.starts[used[0]]
    short: Schedule | None = None
    for attempt in range(STRETCHES):
        later = stretched(times, STRETCHED * times[-1] * 2.0**attempt if attempt else 0.0)
        if budget.over:
            break
        seconds = min(max(ROUNDING_LEFT * best.left, 0.05), LONGEST_ROUNDING)
        found = served_within_memory(problem, later, seconds, run.rng)
        if found is None:
            break
        found = stages_capped(problem, found)
        if found.makespan(problem) >= best.makespan:
            break
        if best.offer(found):
            return
        short = found if short is None else short
    if short is not None and 0 < short.decode_steps.sum() <= MOST_STEPS:
        run.repeat(budget, RuinRecreate(problem, run.rng, short).step)

"""Choice of slots: the fewest that are as fast as possible."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from ..data.problem import Problem
from ..data.schedule import Schedule
from ..models.bounds.makespan import trivial_bound
from .search.constructive import ski_rental_schedule
from .search.schedule_search import search_schedule

PROMISING = 1e-2
"""Largest distance from the best quick makespan for a search."""

WORTH_A_SLOT = 1e-3
"""Relative makespan that more slots must save."""

STEP = 1.25
"""Ratio of neighbouring numbers of slots in the first look."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotTrial:
    """One number of slots and its result.

    makespan: Makespan of the best schedule found, seconds.
    bound: Lower bound with these slots, seconds.
    """

    slots: int
    makespan: float
    bound: float
    schedule: Schedule


def choose_slots(
    problem: Problem, *, seconds: float, seed: int = 0, most: int | None = None
) -> tuple[SlotTrial, ...]:
    """Try numbers of slots; return them with the best first.

    By the cost model more slots cost nothing, so memory limits them: requests that wait for room need more
    prefill stages. A ladder of numbers is tried with schedules made in one pass, then the neighbours of the
    best. The schedule search compares the best few. Among those within :data:`WORTH_A_SLOT` of the best, the
    fewest slots come first.

    seconds: Wall-clock limit of all searches.
    most: Most slots to try, such as those that the cost model was measured with; None for all that fit.
    """
    fitting = _most_that_fit(problem)
    most = fitting if most is None else min(fitting, most)
    trials: dict[int, SlotTrial] = {}
    begun = time.perf_counter()
    ladder = np.unique(np.rint(most / STEP ** np.arange(40)).astype(np.int64))[::-1]
    for slots in ladder[ladder >= 1].tolist():
        least_makespan = min((trial.makespan for trial in trials.values()), default=np.inf)
        if trivial_bound(replace(problem, slots=slots)).seconds > least_makespan * (1 + WORTH_A_SLOT):
            break
        trials[slots] = _quick(problem, slots)
        if time.perf_counter() - begun > seconds / 2:
            break
    for finer in (STEP**0.5, STEP**0.25):
        middle = min(trials.values(), key=lambda trial: trial.makespan).slots
        for slots in {round(middle / finer), min(most, round(middle * finer))} - trials.keys() - {0}:
            trials[slots] = _quick(problem, slots)
    best = min(trials.values(), key=lambda trial: trial.makespan)
    close = sorted(n for n in trials if trials[n].makespan <= best.makespan * (1 + PROMISING))
    finalists = [trials[n] for n in sorted({close[0], close[len(close) // 2], best.slots})]
    seconds_left = max(0.1, seconds - (time.perf_counter() - begun)) / len(finalists)
    for trial in finalists:
        sized = replace(problem, slots=trial.slots)
        outcome = search_schedule(sized, seconds=seconds_left, seed=seed, start=trial.schedule)
        trials[trial.slots] = SlotTrial(trial.slots, outcome.makespan, trial.bound, outcome.schedule)
    least_makespan = min(trial.makespan for trial in trials.values())

    def rank(trial: SlotTrial) -> tuple[bool, float]:
        close = trial.makespan <= least_makespan * (1 + WORTH_A_SLOT)
        return (not close, trial.slots if close else trial.makespan)

    return tuple(sorted(trials.values(), key=rank))


def _quick(problem: Problem, slots: int) -> SlotTrial:
    sized = replace(problem, slots=slots)
    schedules = [ski_rental_schedule(sized, patience=patience) for patience in (0.5, 1.0)]
    makespan, index = min((schedule.makespan(sized), i) for i, schedule in enumerate(schedules))
    return SlotTrial(slots, makespan, trivial_bound(sized).seconds, schedules[index])


def _most_that_fit(problem: Problem) -> int:
    """Return how many requests could ever run together."""
    if problem.kv_capacity is None:
        return len(problem)
    kv_tokens = np.cumsum(np.sort(problem.kv_at_start))
    return max(1, int(np.searchsorted(kv_tokens, problem.kv_capacity, side="right")))

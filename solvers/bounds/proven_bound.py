"""The strongest bound that some seconds of proof give, whatever solver makes the schedule."""

from __future__ import annotations

import time

from ...data.bound import Bound
from ...data.problem import Problem
from ...models.bounds.difference_set import Differences
from ...models.bounds.least_counts import Counts, least_counts
from ...models.bounds.makespan import trivial_bound
from ...models.bounds.partition_heuristics import longest_processing_time, machine_loads
from ...models.bounds.stage_intervals import StageIntervals
from .memory_growth import growing_bound
from .stage_intervals import IntervalPricing

DEFAULT_SECONDS = 5.0
"""Seconds for what takes a search; most bounds need less."""

GROWTH_SHARE = 0.4
"""The share of them that the growth of memory takes at most."""

FIRST_STAGE = 0.4
"""Seconds of the first stage of a proof."""

STAGE_GROWTH = 4
"""How many times longer it takes to the end of each later stage."""

WORTH_LONGER = 2
"""How many times longer a later stage has to be to be tried for what an earlier one had no time for."""

SHARE = 0.3
"""The share of its time that a solver gives to its bound at most."""

LEAST_LEFT = 1e-6
"""Seconds that a bound leaves a solver at least, which then ends with the first schedules it makes."""

MOST_LENGTHS = 2000
"""Distinct lengths up to which intervals between stages are priced: a checker repeats it in plain Python."""

WASTE_SECONDS = 1e-4
"""Seconds a distinct length that the least waste of rounding lengths up takes, about."""

MEMORY_RULES = 1.05
"""Rounds that memory takes, in those of slots packed full, from which nothing is looked for in slots."""


def proven_bound(problem: Problem, seconds: float = DEFAULT_SECONDS) -> Bound:
    """
    Return the strongest valid bound found within a time limit.

    Beyond :func:`~batchbound.models.bounds.makespan.best_bound`, the cheapest numbers of stages and steps are
    refuted, again and again until they stand: by the intervals between stages, which requests are held for as
    wholes (:class:`~batchbound.models.bounds.stage_intervals.StageIntervals`). What is proven is kept, so the
    bound does not fall with more time.

    Parameters
    ----------
    problem
        The problem bounded. Arrival times are left out, which only lowers the bound.
    seconds
        Seconds for what takes a search.

    Returns
    -------
    Bound
        Its certificate holds all a checker needs: prices in place of the search.
    """
    begun = time.perf_counter()
    counts = least_counts(problem)
    differences = Differences(problem, counts)
    end = begun + seconds
    stage, best = begun, trivial_bound(problem, counts)
    if seconds < WASTE_SECONDS * len(differences.lengths):
        return best
    rules = _memory_rules(problem, counts)
    if problem.memory_can_run_out:
        left = seconds if rules else GROWTH_SHARE * seconds
        grown = growing_bound(problem, counts, left)
        if grown is not None:
            best = max(best, grown, key=lambda bound: bound.seconds)
    if rules:
        return max(best, differences.bound(), key=lambda bound: bound.seconds)
    pricing = IntervalPricing(StageIntervals(differences.lengths, differences.numbers, differences.slots))
    while True:
        # A longer limit goes through the stages of a shorter one, then through more.
        stage = min(end, begun + max(FIRST_STAGE, STAGE_GROWTH * (stage - begun)))
        enough = not len(differences.lengths) or _refute(differences, pricing, stage)
        found = max(trivial_bound(problem, counts), differences.bound(), key=lambda bound: bound.seconds)
        settled = enough or end - begun < WORTH_LONGER * (stage - begun)
        stands = settled and found.seconds <= best.seconds and time.perf_counter() < stage
        best = max(best, found, key=lambda bound: bound.seconds)
        if stage >= end or stands:
            break
    if len(differences.lengths):
        _drop_idle(differences)
        best = max(differences.bound(), best, key=lambda bound: bound.seconds)
    return best


def bound_within(problem: Problem, seconds: float | None, least: float = 0.0) -> tuple[Bound, float | None]:
    """
    Return the strongest bound that a share of a solver's time proves, and the seconds left of it.

    Parameters
    ----------
    problem
        The problem bounded.
    seconds
        Wall-clock seconds of the solver, or None for no limit.
    least
        Seconds that the bound may take in any case.
    """
    if seconds is None:
        return proven_bound(problem), None
    begun = time.perf_counter()
    bound = proven_bound(problem, max(least, SHARE * seconds))
    return bound, max(LEAST_LEFT, seconds - (time.perf_counter() - begun))


def _memory_rules(problem: Problem, counts: Counts) -> bool:
    """Return whether memory takes so many rounds that slots, full or not, would need fewer."""
    if counts.claims["rounds"]["kind"] != "KV tokens over capacity":
        return False
    packed = longest_processing_time(problem.rounds, counts.slots)
    return counts.rounds > MEMORY_RULES * int(machine_loads(problem.rounds, packed, counts.slots).max())


def _refute(differences: Differences, pricing: IntervalPricing, deadline: float) -> bool:
    """Refute the cheapest numbers of stages and rounds until they stand; return if there was time for all."""
    _price_intervals(differences, pricing, deadline)
    return time.perf_counter() < deadline


def _price_intervals(differences: Differences, pricing: IntervalPricing, deadline: float) -> None:
    """Add prices of the intervals between stages until the cheapest counts stand."""
    while len(differences.lengths) <= MOST_LENGTHS:
        cheapest = differences.cheapest()
        solution = pricing.best(cheapest.stages, cheapest.rounds, deadline)
        if solution is None:
            return
        differences.intervals = [*differences.intervals, solution]


def _drop_idle(differences: Differences) -> None:
    """Keep only those proofs of intervals without which less would be proven."""
    seconds = differences.bound().seconds
    for solution in differences.intervals:
        intervals = differences.intervals
        differences.intervals = [each for each in intervals if each is not solution]
        if differences.bound().seconds < seconds:
            differences.intervals = intervals

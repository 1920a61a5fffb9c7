"""The strongest bound that a time limit gives: a loop over the arguments."""

from __future__ import annotations

import time

from ...data.bound import Bound
from ...data.problem import Problem
from .argument import Argument, Curve, Known
from .difference_set import DifferenceBound
from .growth.programmes import GrowthBound
from .least_counts import ALL_ON, Counts, least_counts
from .packing.heuristics import longest_processing_time, machine_loads
from .packing_prices import PackingBound
from .params import BoundParams
from .stage_intervals import IntervalBound, StageIntervals

DEFAULT_SECONDS = 5.0
"""Seconds for proofs that take a search; most bounds need less."""

LEAST_LEFT = 1e-6
"""Seconds that a bound leaves a solver at least, which then ends with the first schedules it makes."""

WASTE_SECONDS = 1e-4
"""Seconds of rounding up a distinct length; a shorter limit allows no argument beyond the counts."""


def proven_bound(problem: Problem, seconds: float = DEFAULT_SECONDS, params: BoundParams = ALL_ON) -> Bound:
    """
    Return the strongest valid bound found within a time limit.

    Every argument proves, for each number of prefill stages, at least how many decode steps there are. For
    each number the most of these steps hold, and the bound is the least cost over all numbers of stages. So
    the arguments are asked in turn for a curve that raises the steps where they cost least, until none does.
    A longer limit begins as a shorter one does, so the bound does not fall with more time.

    problem: The problem bounded. Arrival times are left out, which only lowers the bound.
    seconds: Time limit of the arguments that take a search.
    params: Which arguments are on, and how they share the time.
    Returns: Its certificate holds all that a checker needs: prices in place of the search.
    """
    begun = time.perf_counter()
    known = Known.of(problem, least_counts(problem, params))
    arguments = _arguments(problem, known.counts, seconds, params)
    while (curve := _next(arguments, known, begun + seconds)) is not None:
        known = known.with_curves((*known.curves, curve))
    return known.pruned().bound()


def bound_within(
    problem: Problem, seconds: float | None, least: float = 0.0, params: BoundParams = ALL_ON
) -> tuple[Bound, float | None]:
    """
    Return the bound proven in a share of a solver's seconds (None: no limit), and the seconds left of them.

    The bound may take ``least`` seconds in any case.
    """
    if seconds is None:
        return proven_bound(problem, params=params), None
    begun = time.perf_counter()
    bound = proven_bound(problem, max(least, params.time_share * seconds), params)
    return bound, max(LEAST_LEFT, seconds - (time.perf_counter() - begun))


def _next(arguments: list[Argument], known: Known, deadline: float) -> Curve | None:
    """Return the first curve that an argument finds, the quickest argument first."""
    curves = (argument.prove(known, deadline) for argument in arguments)
    return next((curve for curve in curves if curve is not None), None)


def _arguments(problem: Problem, counts: Counts, seconds: float, params: BoundParams) -> list[Argument]:
    """Return the arguments that the parameters allow and the problem and the time are worth."""
    differences = DifferenceBound(problem, counts)
    if seconds < WASTE_SECONDS * len(differences.lengths):
        return []
    arguments: list[Argument] = [differences]
    binds = _memory_binds(problem, counts, params)
    if problem.memory_can_run_out:
        arguments.append(GrowthBound(params, seconds if binds else params.growth_share * seconds))
    if not binds and 0 < len(differences.lengths) <= params.most_lengths:
        intervals = StageIntervals(differences.lengths, differences.numbers, counts.slots)
        arguments += [IntervalBound(intervals), PackingBound(params.packing_share * seconds)]
    return [argument for argument in arguments if getattr(params, argument.name)]


def _memory_binds(problem: Problem, counts: Counts, params: BoundParams) -> bool:
    """Return whether the KV capacity needs more steps than the slots."""
    if counts.claims["decode_steps"]["kind"] != "KV tokens over capacity":
        return False
    packed = longest_processing_time(problem.decode_steps, counts.slots)
    loads = machine_loads(problem.decode_steps, packed, counts.slots)
    return counts.decode_steps > params.memory_binds * int(loads.max())

"""Loop over the arguments of the bound."""

from __future__ import annotations

from ...data.bound import Bound
from ...data.problem import Problem
from ..deadline import Deadline, Work
from .argument import Argument, Curve, Known
from .difference_set import DifferenceBound
from .least_counts import ALL_ON, Counts, least_counts
from .memory_growth.programmes import GrowthBound
from .packing.heuristics import longest_processing_time, machine_loads
from .packing_prices import PackingBound
from .params import BoundParams
from .stage_intervals import IntervalBound, StageIntervals

DEFAULT_SECONDS = 5.0
"""Seconds for proofs that need a search; most need fewer."""

LEAST_LEFT = 1e-6
"""Least seconds that a bound leaves to a solver."""

WASTE_SECONDS = 1e-4
"""Seconds per distinct length; a shorter limit allows only counts."""


def proven_bound(
    problem: Problem,
    seconds: float = DEFAULT_SECONDS,
    params: BoundParams = ALL_ON,
    *,
    repeatable: bool = False,
) -> Bound:
    """Return the strongest valid bound found within a time limit.

    Every argument proves, for each number of prefill stages, a least number of decode steps. For each number
    of stages the largest of them holds, and the bound is the least cost over all. So the arguments are asked
    in turn for a curve that raises the steps where they cost least, until none does. A longer limit begins as
    a shorter one does, so the bound does not fall with more time.

    problem: Problem to bound; arrival times are left out, which only lowers the bound.
    seconds: Time limit of the arguments that need a search.
    params: Arguments to use, and their shares of the time.
    repeatable: True to count work in place of time, so that the bound is the same on any machine.
    """
    deadline = Deadline(seconds, Work() if repeatable else None)
    known = Known.of(problem, least_counts(problem, params))
    arguments = _arguments(problem, known.counts, seconds, params)
    while (curve := _next(arguments, known, deadline)) is not None:
        known = known.with_curves((*known.curves, curve))
    return known.pruned().bound()


def bound_within(
    problem: Problem, seconds: float | None, least: float = 0.0, params: BoundParams = ALL_ON
) -> tuple[Bound, float | None]:
    """Bound a problem within a share of the time; return the time left.

    It may take ``least`` seconds in any case. None means no limit: then work counts, so that it repeats.
    """
    if seconds is None:
        return proven_bound(problem, params=params, repeatable=True), None
    whole = Deadline(seconds)
    bound = proven_bound(problem, max(least, params.time_share * seconds), params)
    return bound, max(LEAST_LEFT, whole.left)


def _next(arguments: list[Argument], known: Known, deadline: Deadline) -> Curve | None:
    """Return the first curve found, by the quickest argument first."""
    curves = (argument.prove(known, deadline) for argument in arguments)
    return next((curve for curve in curves if curve is not None), None)


def _arguments(problem: Problem, counts: Counts, seconds: float, params: BoundParams) -> list[Argument]:
    """Return the arguments that apply and are worth the time."""
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

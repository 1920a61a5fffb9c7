"""Baselines: schedules of every rule that a user could run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...data.arrays import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...data.trace import Stage
from ...heuristics.loop import PolicyError, execute, schedule_of
from ...heuristics.policy import Policy
from ...heuristics.queues.admission import Admission
from ...heuristics.queues.known_lengths import dispatch_key, dispatch_of, known_schedule
from ...heuristics.queues.ordered import Ordered, arrival_order, group_by_group, longest_first
from ...heuristics.queues.prefill_rules import SkiRental
from ...heuristics.queues.queue_policy import QueuePolicy
from ...heuristics.registry import POLICIES, policy_named
from ...heuristics.simulator import Simulator
from .backward import backward_schedule
from .constructive import ski_rental_in_time
from .params import SearchParams
from .staggered import are_equally_long, staggered_schedule

CLASSES = (0, 1, 2)
"""Numbers of length classes within which groups go in turn."""

PROMISING = (
    "packing",
    "priority",
    "lpt-ski",
    "fcfs-ski",
    "lpt",
    "threshold",
    "lagrangian-token",
    "lagrangian",
    "packing-algorithm1",
)
"""Policies to simulate first, as they were best most often."""

SCARCE = ("lpt-ski", "lpt", "threshold", "fcfs-ski")
"""Policies to simulate first under scarce memory."""

WAITING = ("threshold", "lagrangian-token", "lagrangian")
"""Policies that wait longest before a prefill stage."""

LEARNERS = ("learned",)
"""Policies that learn the lengths of groups as they run."""

IN_ONE_PASS = ("lpt-ski", "lpt", "fcfs", "fcfs-ski")
"""Policies that one pass also schedules, if only slots are limited."""


class _GivenUpError(Exception):
    """Error that ends a late or long simulation."""


Baseline = Callable[[float], Schedule | None]
"""Function that returns a rule's schedule if it beats a makespan."""


def baselines(
    problem: Problem, late: Callable[[], bool], params: SearchParams | None = None
) -> tuple[list[Baseline], list[Baseline]]:
    """Return the baselines, and other quick constructions.

    The former are every policy of :data:`~batchbound.heuristics.registry.POLICIES`, the cheapest and most
    promising first. In large groups, policies that learn lengths take seconds, and are simulated last. The
    others are longest first and first come, first served with several patiences of the ski-rental rule. Where
    shared prompts cannot all be kept, passes take one group after another, the one with the longest request
    first.

    problem: Problem with every request there at the start.
    late: Returns True if no time is left; asked with each stage.
    params: Sizes up to which rules are baselines, and the patiences.
    """
    params = SearchParams() if params is None else params
    patiences, longest, arrival = params.patiences, longest_first(problem), arrival_order(problem)
    met = set[object]()

    def in_one_pass(order: IntArray, patience: float) -> Baseline:
        return lambda _: ski_rental_in_time(problem, late, order=order, patience=patience)

    def simulated(policy: str) -> Baseline:
        return lambda least: simulated_schedule(problem, policy, least, late, met)

    passes = [in_one_pass(order, patience) for patience in patiences[:2] for order in (longest, arrival)]
    further = [in_one_pass(longest, patience) for patience in patiences[2:]]
    in_turn, more = _in_turn(problem, late, patiences)
    further += more
    if len(problem) > params.baseline_requests:
        linear, rest = [*in_turn[:1], *passes], [*in_turn[1:], *further]
        first = linear[:1]
        if problem.memory_can_run_out:
            served = list(map(simulated, dict.fromkeys((*SCARCE, *IN_ONE_PASS))))
            linear, first, rest = [lambda _: backward_schedule(problem, late), *served], served[:2], in_turn
            if problem.tree is not None:
                linear, first, rest = [*in_turn[:1], *linear], [*in_turn[:1], *first], in_turn[1:]
            if are_equally_long(problem):
                linear = [lambda _: staggered_schedule(problem), *linear]
                first = [linear[0], *first]
        if len(problem) <= params.linear_requests:
            return linear, [*rest, *map(simulated, WAITING)]
        return first, [*(baseline for baseline in linear if baseline not in first), *rest]
    names = dict.fromkeys((*PROMISING, *POLICIES))
    if len(problem) > params.learning_requests:
        further += map(simulated, LEARNERS)
        names = dict.fromkeys(name for name in names if name not in LEARNERS)
    further = [*in_turn[1:], *further]
    if problem.memory_can_run_out:
        staggered = [lambda _: staggered_schedule(problem)] if are_equally_long(problem) else []
        # With memory to look after, a pass takes longer than a simulation; one backwards is usually better.
        names = dict.fromkeys((*SCARCE, *names))
        backward = [lambda _: backward_schedule(problem)]
        return [*in_turn[:1], *staggered, *backward, *map(simulated, names)], [*passes, *further]
    if problem.prefill_token_cap is None:
        # One pass makes the schedules of some rules, and of the others those that wait are best.
        names = dict.fromkeys((*WAITING, *names))
        linear_cost = not problem.cost.prefill_floor and not problem.cost.prefill_bend
        rules = [simulated(name) for name in names if not linear_cost or name not in IN_ONE_PASS]
        return [*in_turn[:1], *passes, *rules], further
    return [*in_turn[:1], *passes, *map(simulated, names)], further


def _in_turn(
    problem: Problem, late: Callable[[], bool], patiences: Sequence[float]
) -> tuple[list[Baseline], list[Baseline]]:
    """Return baselines that take one group after another, and others with more patience."""
    scarce = problem.tree is not None and problem.memory_can_run_out
    if not scarce and problem.keeps_every_prefix:
        return [], []

    def passed(order: IntArray, patience: float) -> Baseline:
        return lambda _: ski_rental_in_time(problem, late, order=order, patience=patience)

    def queued(order: IntArray, patience: float) -> Baseline:
        def made(least: float) -> Schedule | None:
            policy = QueuePolicy(Ordered(order), SkiRental(patience), Admission(problem))
            return executed_schedule(problem, policy, least, late)

        return made

    # A pass counts whole prompts against the memory.
    make, orders = queued if scarce else passed, [group_by_group(problem, classes) for classes in CLASSES]
    first, others = (
        [make(order, patience) for patience in part for order in orders]
        for part in (patiences[:2], patiences[2:])
    )
    return first, others


def simulated_schedule(
    problem: Problem,
    policy: str,
    least: float,
    late: Callable[[], bool] = lambda: False,
    met: set[object] | None = None,
) -> Schedule | None:
    """Simulate a policy; None if it evicts or takes too long.

    policy: Name in :data:`~batchbound.heuristics.registry.POLICIES`.
    least: Makespan to beat, seconds.
    late: Returns True if no time is left.
    met: Keys of the policies simulated so far, to which this one is added unless it is late. Policies of one
        key have equal schedules, so a later one gives None.
    """
    policy_made = policy_named(policy, problem)
    # The quick run counts whole prompts under limits of tokens.
    limited = problem.prefill_token_cap is not None or problem.kv_capacity is not None
    counted = problem.tree is not None and limited
    dispatch = None if counted else dispatch_of(policy_made)
    if dispatch is not None:
        same = dispatch_key(dispatch)
        if met is not None and same in met:
            return None
        schedule = known_schedule(problem, dispatch, least, late)
        if met is not None and not late():
            met.add(same)
        return schedule
    return executed_schedule(problem, policy_made, least, late)


def executed_schedule(
    problem: Problem, policy: Policy, least: float, late: Callable[[], bool]
) -> Schedule | None:
    """Run a policy on the simulator; None as :func:`simulated_schedule`."""

    def watch(stage: Stage, finished: int) -> None:
        if stage.end >= least or late():
            raise _GivenUpError

    try:
        trace = execute(problem, policy, Simulator(problem), on_stage=watch)
    except (_GivenUpError, PolicyError):
        return None
    return None if trace.evictions else schedule_of(trace)

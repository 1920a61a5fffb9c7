"""The schedules of the rules that could be run instead, the cheapest to make first."""

from __future__ import annotations

from collections.abc import Callable

from ...data.costs.cost import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...data.trace import Stage
from ...heuristics.loop import PolicyError, execute, schedule_of
from ...heuristics.queues.known_lengths import dispatch_key, dispatch_of, known_schedule
from ...heuristics.queues.ordered import arrival_order, group_by_group, longest_first
from ...heuristics.registry import POLICIES, policy_named
from ...heuristics.simulator import Simulator
from .backward import backward_schedule
from .constructive import ski_rental_in_time

PATIENCES = (0.5, 0.0, 0.25, 0.35, 0.7, 1.0, 1.4, 2.0, 5.0, 15.0)
"""Settings of the ski-rental rule tried, the best one of Table III first; 0 never waits."""

CLASSES = (0, 1, 2)
"""Classes of lengths, each halving of the decode steps, within which requests are taken group by group."""

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
"""Policies simulated before the others, as they were best most often."""

SCARCE = ("lpt-ski", "lpt", "threshold", "fcfs-ski")
"""Those of them tried first where memory can run out."""

WAITING = ("threshold", "lagrangian-token", "lagrangian")
"""Those of them that wait longest before a prefill stage."""

IN_ONE_PASS = ("lpt-ski", "lpt", "fcfs", "fcfs-ski")
"""Policies whose schedules one pass makes as well where neither memory nor tokens are limited."""

SIMULATED = 100_000
"""Requests up to which policies are simulated: beyond, one takes as long as any plan should."""


class _GivenUpError(Exception):
    """A simulation that has become too late or too long to be of use."""


def starts(problem: Problem, late: Callable[[], bool]) -> list[Callable[[float], Schedule | None]]:
    """
    Return what makes each rule's schedule, given the makespan to beat; None where it does not.

    They are longest first and first come, first served with several patiences of the ski-rental rule, made in
    one pass, and every policy of :data:`~batchbound.heuristics.registry.POLICIES` in the simulator, the
    cheapest and most promising first. Where shared prompts cannot all be kept, passes that take one group
    after another, the one with the longest request first, come before them: a single one where memory can
    run out, the others after the quick ones. A policy that evicts has no schedule.

    Parameters
    ----------
    problem
        The problem, every request there at the start.
    late
        Whether there is no time left for a start; asked with each stage of a simulation or a pass.
    """
    longest, given = longest_first(problem), arrival_order(problem)
    met = set[object]()

    def in_one_pass(order: IntArray, patience: float) -> Callable[[float], Schedule | None]:
        return lambda _: ski_rental_in_time(problem, late, order=order, patience=patience)

    def simulated(policy: str) -> Callable[[float], Schedule | None]:
        return lambda least: simulated_schedule(problem, policy, least, late, met)

    passes = [in_one_pass(order, patience) for patience in PATIENCES[:2] for order in (longest, given)]
    passes += [in_one_pass(longest, patience) for patience in PATIENCES[2:]]
    in_turn: list[Callable[[float], Schedule | None]] = []
    if not problem.keeps_every_prefix:
        orders = [group_by_group(problem, classes) for classes in CLASSES]
        in_turn += [in_one_pass(order, patience) for patience in PATIENCES[:2] for order in orders]
        passes += [in_one_pass(order, patience) for patience in PATIENCES[2:] for order in orders]
    if len(problem) > SIMULATED:
        return [*in_turn, *passes]
    names = dict.fromkeys((*PROMISING, *POLICIES))
    if problem.memory_can_run_out:
        # With memory to look after, a pass takes longer than a simulation; one backwards is mostly better.
        promising = dict.fromkeys((*SCARCE, *PROMISING))
        quick = [lambda _: backward_schedule(problem), *map(simulated, promising)]
        others = [simulated(name) for name in names if name not in PROMISING]
        return [*in_turn[:1], *quick, *in_turn[1:], *others, *passes]
    if problem.prefill_token_cap is None:
        # Where nothing else is limited, rules that wait for free slots are best beside these passes.
        names = dict.fromkeys((*WAITING, *names))
        rules = [simulated(name) for name in names if name not in IN_ONE_PASS]
        return [*in_turn, *passes[:4], *rules, *passes[4:]]
    return [*in_turn, *passes[:4], *map(simulated, names), *passes[4:]]


def simulated_schedule(
    problem: Problem,
    policy: str,
    least: float,
    late: Callable[[], bool] = lambda: False,
    met: set[object] | None = None,
) -> Schedule | None:
    """
    Return the schedule of a policy in the simulator, or None if it evicts or takes ``least`` seconds or more.

    Parameters
    ----------
    policy
        Its name in :data:`~batchbound.heuristics.registry.POLICIES`.
    least
        The makespan to beat, seconds.
    late
        As of :func:`starts`.
    met
        What the policies simulated so far come to where lengths are known: one that comes to the same has
        the same schedule, and None is returned. Policies are added once their schedule is not left in part.
    """
    policy_made = policy_named(policy, problem)
    dispatch = dispatch_of(policy_made)
    if dispatch is not None:
        same = dispatch_key(dispatch)
        if met is not None and same in met:
            return None
        schedule = known_schedule(problem, dispatch, least, late)
        if met is not None and not late():
            met.add(same)
        return schedule

    def watch(stage: Stage, finished: int) -> None:
        if stage.end >= least or late():
            raise _GivenUpError

    try:
        trace = execute(problem, policy_made, Simulator(problem), on_stage=watch)
    except (_GivenUpError, PolicyError):
        return None
    return None if trace.evictions else schedule_of(trace)

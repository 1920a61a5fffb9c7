"""Plans that follow an evicting policy where it beats the schedule."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..data.arrays import IntArray
from ..data.bound import Bound
from ..data.fleet import Fleet, FleetSchedule
from ..data.plan import FollowedPolicy, Plan
from ..data.problem import Problem
from ..data.trace import Stage
from ..heuristics.dispatch import dispatch
from ..heuristics.loop import PolicyError, execute
from ..heuristics.policy import Policy, State, Step
from ..heuristics.queues.first_come import can_count, first_come
from ..heuristics.queues.prefill_rules import PrefillRule, SkiRental
from ..heuristics.registry import POLICIES, policy_named
from ..heuristics.simulator import KEEPS_KV, Simulator
from ..heuristics.unknown_lengths.groups import has_groups
from ..models.bounds.fleet import work_bound
from ..models.bounds.prove import evicting_bound
from ..solvers.result import Limits, Status, StoppedBy
from ..solvers.search.constructive import ski_rental_schedule

EVICTING = tuple(name for name, entry in POLICIES.items() if entry.evicts)
"""Policies that evict requests at the planned lengths; the first one is the quickest to simulate."""

RULES_SHARE = 0.2
"""Share of a time limit that is kept for these policies; larger tries more of them, and searches less."""


QUICK_REQUESTS = 5_000
"""Requests up to which counted policies run to their end, late or not; 20 microseconds each."""


class _TooLongError(Exception):
    """Error that ends a simulation: late, or worse than the best."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Simulation of a policy on all replicas.

    replica_of: Replica of each request, shape (requests,).
    """

    policy: str
    replica_of: IntArray
    seconds: float
    prefill_stages: int
    decode_steps: int
    evictions: int


def searched(fleet: Fleet, limits: Limits) -> Limits:
    """Return the limits of a search that leaves time for evicting policies."""
    if limits.seconds is None or not _may_evict(fleet):
        return limits
    return replace(limits, seconds=(1 - RULES_SHARE) * limits.seconds)


def following_plan(
    plan: Plan, *, until: float | None = None, most_requests: int = 20_000, most_compared: int = 2_000
) -> Plan:
    """Follow an evicting policy if it takes less than the schedule.

    The plan names the policies that there was no time for. Ctrl-C ends the simulations, and keeps the best.

    plan: Plan of one replica or more; it is returned unchanged if memory cannot run out.
    until: Time of the clock at which the simulations end; None for no limit.
    most_requests: Most requests for which policies are simulated without a time limit.
    most_compared: The same for those that are not counted from event to event.
    """
    if not _may_evict(plan.fleet) or plan.maker.stopped_by == StoppedBy.INTERRUPT:
        return plan
    # Policies that learn the lengths of groups differ from others if there are groups.
    needed = names = EVICTING if (plan.fleet.workload.group >= 0).any() else EVICTING[:2]
    if until is None:
        most = most_requests if _is_counted(plan.fleet.problem(0), names[-1]) else most_compared
        names = names[: 0 if len(plan.fleet) > most_requests else 1 if len(plan.fleet) > most else None]
    best, tried, interrupted = None, set[str](), False
    try:
        for name, run in _runs(plan, names, until):
            tried.add(name)
            if run is not None and run.seconds < (plan.makespan if best is None else best.seconds):
                best = run
    except KeyboardInterrupt:
        interrupted = True
    untried = [name for name in needed if name not in tried]
    maker = plan.maker
    if untried:
        message = f"rules that evict requests, not tried: {', '.join(untried)}"
        maker = replace(maker, message="; ".join(filter(None, (maker.message, message))))
    if interrupted:
        maker = replace(maker, stopped_by=StoppedBy.INTERRUPT)
    plan = plan if maker is plan.maker else replace(plan, maker=maker)
    return plan if best is None else _followed(plan, best)


def _followed(plan: Plan, run: _Run) -> Plan:
    """Return the plan that follows a policy, on its share of the requests."""
    bound = evicting_fleet_bound(plan.fleet)
    counts = run.prefill_stages, run.decode_steps, run.evictions
    followed = FollowedPolicy(run.policy, run.seconds, *counts, bound=bound)
    status = Status.OPTIMAL if bound.proves(run.seconds) else Status.FEASIBLE
    # The schedule's own proof says nothing about schedules that evict requests.
    stopped_by = plan.maker.stopped_by
    if stopped_by == StoppedBy.PROOF and status is Status.FEASIBLE:
        stopped_by = StoppedBy.FINISHED
    if not np.array_equal(run.replica_of, plan.shares.replica_of):
        shares = _scheduled(plan.fleet, run.replica_of)
        plan = replace(plan, shares=shares, makespan=shares.makespan(plan.fleet))
    return replace(plan, followed=followed, maker=replace(plan.maker, status=status, stopped_by=stopped_by))


def evicting_fleet_bound(fleet: Fleet) -> Bound:
    """Return a bound of all schedules, evicting ones included."""
    alone = len(fleet.replicas) == 1 and not fleet.replicas[0].busy
    return evicting_bound(fleet.problem()) if alone else work_bound(fleet)


def simulated(
    fleet: Fleet,
    replica_of: IntArray,
    policy: str,
    *,
    most: float = np.inf,
    until: float | None = None,
) -> _Run | None:
    """Simulate a policy on each replica; None if it evicts nothing.

    Raises _TooLongError if it takes ``most`` seconds or more, or is late, and PolicyError.
    """
    seconds, counts = 0.0, np.zeros(3, dtype=np.int64)
    for k, replica in enumerate(fleet.replicas):
        mine = np.flatnonzero(replica_of == k)
        seconds = max(seconds, replica.busy)
        if not mine.size:
            continue
        problem = fleet.problem_of(k, mine)

        def watch(stage: Stage, _: int, busy: float = replica.busy) -> None:
            if busy + stage.end >= most:
                raise _TooLongError

        if _is_counted(problem, policy):
            late = partial(_late, None if len(fleet) <= QUICK_REQUESTS else until)
            first = first_come(problem, late, keeps_kv=True, rule=_COUNTED[policy])
            if first is None:
                raise _TooLongError
            seconds = max(seconds, replica.busy + first.seconds)
            counts += first.prefill_stages, first.decode_steps, first.evictions
            continue
        made = policy_named(policy, problem)
        trace = execute(problem, _until(until, made), Simulator(problem, swap=KEEPS_KV), on_stage=watch)
        seconds = max(seconds, replica.busy + trace.makespan)
        counts += trace.prefill_stages, trace.decode_steps, trace.evictions
    stages, steps, evictions = counts.tolist()
    return _Run(policy, replica_of, seconds, stages, steps, evictions) if evictions else None


_COUNTED: dict[str, PrefillRule | None] = {"fcfs": None, "learned": SkiRental()}
"""Policies that are counted from event to event on jobs without groups, by their prefill rule."""


def _is_counted(problem: Problem, policy: str) -> bool:
    alike = has_groups(problem) or problem.shares_prompts
    return policy in _COUNTED and can_count(problem) and (policy == "fcfs" or not alike)


def _late(until: float | None) -> bool:
    return until is not None and time.perf_counter() > until


def _runs(plan: Plan, names: tuple[str, ...], until: float | None) -> Iterator[tuple[str, _Run | None]]:
    """Yield each policy with its best run; fewer if late."""
    most = plan.makespan
    for name in names:
        best: _Run | None = None
        evicts = False
        if name == names[0]:
            # To its end: if the policy that admits most requests evicts none, no policy needs to.
            most = np.inf
        for replica_of in _dispatched(plan):
            try:
                run = simulated(plan.fleet, replica_of, name, most=most, until=until)
            except (_TooLongError, PolicyError):
                if until is not None and time.perf_counter() >= until:
                    return
                evicts = True
                continue
            if run is not None and (best is None or run.seconds < best.seconds):
                best, most, evicts = run, run.seconds, True
        yield name, best
        most = min(most, plan.makespan)
        if not evicts:
            for other in EVICTING:
                yield other, None
            return


def _dispatched(plan: Plan) -> Iterator[IntArray]:
    """Yield ways to share the requests out: the plan's, then by the rule that `simulate` takes."""
    yield plan.shares.replica_of
    if len(plan.fleet.replicas) > 1 and plan.groups == "any":
        replica_of = dispatch(plan.fleet, "lpt")
        if not np.array_equal(replica_of, plan.shares.replica_of):
            yield replica_of


def _scheduled(fleet: Fleet, replica_of: IntArray) -> FleetSchedule:
    schedules = []
    for k in range(len(fleet.replicas)):
        mine = np.flatnonzero(replica_of == k)
        problem = fleet.problem_of(k, mine) if mine.size else None
        quick = None if problem is None else ski_rental_schedule(problem).without_idle_steps(problem)
        schedules.append(quick)
    return FleetSchedule(replica_of, tuple(schedules))


def _may_evict(fleet: Fleet) -> bool:
    """Return whether memory can run out on some replica."""
    return any(fleet.problem(k).memory_can_run_out for k in _kinds(fleet))


def _kinds(fleet: Fleet) -> list[int]:
    first = {replica: k for k, replica in reversed(list(enumerate(fleet.replicas)))}
    return sorted(first.values())


def _until(end: float | None, policy: Policy) -> Policy:
    """Return a policy that stops at a time of the clock."""
    if end is None:
        return policy

    def step(state: State) -> Step:
        if time.perf_counter() > end:
            raise _TooLongError
        return policy(state)

    return step

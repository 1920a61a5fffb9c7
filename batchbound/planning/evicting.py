"""Plans that follow an evicting policy where it beats the schedule."""

from __future__ import annotations

from dataclasses import replace

from ..data.plan import FollowedPolicy, Plan
from ..data.problem import Problem
from ..heuristics.registry import POLICIES, policy_named
from ..heuristics.simulate import simulate
from ..models.bounds.prove import evicting_bound
from ..solvers.result import Status


def following_plan(plan: Plan, *, most_requests: int = 20_000, most_compared: int = 2_000) -> Plan:
    """Follow an evicting policy if it takes less than the schedule.

    plan: Plan of one replica; without a KV capacity it is returned unchanged.
    most_requests: Most requests for which policies are simulated.
    most_compared: Most requests for which every evicting policy is simulated; beyond, only the first.
    """
    problem = plan.problem
    if problem.kv_capacity is None or len(problem) > most_requests:
        return plan
    names = [name for name, entry in POLICIES.items() if entry.evicts]
    first = _run(problem, names[0])
    if first is None:
        # The first policy admits most requests: if it evicts none, no policy needs to.
        return plan
    grouped = bool((problem.workload.group >= 0).any())
    others = names[1:] if grouped else names[1:2]
    runs = [first, *(_run(problem, name) for name in others if len(problem) <= most_compared)]
    best = min((run for run in runs if run is not None), key=lambda run: run.seconds)
    if best.seconds >= plan.makespan:
        return plan
    status = Status.OPTIMAL if best.bound.proves(best.seconds) else Status.FEASIBLE
    return replace(plan, followed=best, maker=replace(plan.maker, status=status))


def _run(problem: Problem, name: str) -> FollowedPolicy | None:
    """Return a policy's run, or None if it evicts nothing."""
    trace = simulate(problem, policy_named(name, problem))
    if not trace.evictions:
        return None
    return FollowedPolicy(
        policy=name,
        seconds=trace.makespan,
        prefill_stages=trace.prefill_stages,
        decode_steps=trace.decode_steps,
        evictions=trace.evictions,
        bound=evicting_bound(problem),
    )

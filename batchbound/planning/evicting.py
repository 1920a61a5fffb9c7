"""Runs that may evict requests, against a plan that evicts none."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.bound import Bound
from ..data.problem import Problem
from ..heuristics.registry import policy_named
from ..heuristics.simulate import simulate
from ..models.bounds.evicting import evicting_bound

RULE = "fcfs"
"""Policy of the comparison: first come, first served."""


@dataclass(frozen=True, slots=True)
class EvictingRun:
    """
    A policy's run that evicts requests, and the bound of schedules that may.

    seconds: Of its makespan.
    evictions: Requests that it evicted.
    bound: Of every schedule, evicting or not.
    """

    seconds: float
    evictions: int
    bound: Bound

    @property
    def gap(self) -> float:
        """Excess over the bound, as a fraction of the bound."""
        return self.bound.gap(self.seconds)

    def to_json(self) -> dict[str, object]:
        """Return its figures as plain JSON values."""
        return {
            "policy": RULE,
            "makespan_s": self.seconds,
            "evictions": self.evictions,
            "bound_s": self.bound.seconds,
            "bound_source": self.bound.source,
            "gap": self.gap,
        }


def evicting_run(problem: Problem, *, most_requests: int = 20_000) -> EvictingRun | None:
    """Return the run of :data:`RULE` if it evicts requests; None if it does not, or for a larger job."""
    if problem.kv_capacity is None or len(problem) > most_requests:
        return None
    trace = simulate(problem, policy_named(RULE, problem))
    if not trace.evictions:
        return None
    return EvictingRun(trace.makespan, trace.evictions, evicting_bound(problem))

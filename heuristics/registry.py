"""Policies by name, for ``simulate --policy NAME``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..data.arrays import IntArray
from ..data.problem import Problem
from ..models.bounds.packing.heuristics import longest_processing_time
from .policy import Policy
from .queues.adaptive_batch import AdaptiveBatch
from .queues.admission import Admission, Reserve
from .queues.algorithm1 import SortingPreemptive
from .queues.assignment import Assigned, round_robin
from .queues.ordered import Ordered, arrival_order, longest_first
from .queues.preemption import PriorityPreemption
from .queues.prefill_rules import (
    Lagrangian,
    PrefillFirst,
    PrefillRule,
    SkiRental,
    Threshold,
)
from .queues.queue_policy import Queue, QueuePolicy
from .unknown_lengths.pacing import PacedPolicy
from .unknown_lengths.registry import hidden_policy


@dataclass(frozen=True, slots=True)
class Entry:
    """Policy by name.

    summary: Its rule, in a line.
    make: Returns a fresh policy for a problem and an assignment of its requests to slots.
    assignment: Returns the default assignment; None if the policy uses none.
    evicts: True if it evicts requests at the planned lengths.
    """

    summary: str
    make: Callable[[Problem, IntArray], Policy]
    assignment: Callable[[Problem], IntArray] | None = None
    evicts: bool = False


def _packed(problem: Problem) -> IntArray:
    return longest_processing_time(problem.decode_steps, problem.slots)


def _arrival(problem: Problem, _: IntArray) -> Queue:
    return Ordered(arrival_order(problem))


def _longest(problem: Problem, _: IntArray) -> Queue:
    return Ordered(longest_first(problem))


def _policy(
    queue: Callable[[Problem, IntArray], Queue], rule: Callable[[], PrefillRule], reserve: Reserve = "future"
) -> Callable[[Problem, IntArray], Policy]:
    def make(problem: Problem, assignment: IntArray) -> Policy:
        return QueuePolicy(queue(problem, assignment), rule(), Admission(problem, reserve))

    return make


def _paced(queue: Callable[[Problem, IntArray], Queue]) -> Callable[[Problem, IntArray], Policy]:
    return lambda problem, assignment: PacedPolicy(queue(problem, assignment), Admission(problem))


POLICIES: Mapping[str, Entry] = {
    "adaptive-batch": Entry(
        "as many as predicted memory allows, fewer past a threshold, more again (MICO)",
        lambda problem, _: AdaptiveBatch(problem),
    ),
    "fcfs": Entry(
        "first come, first served, prefill first: vLLM's rule, the papers' baseline",
        _policy(_arrival, PrefillFirst, "present"),
        evicts=True,
    ),
    "fcfs-paced": Entry(
        "first come, first served; prefill waits to be shared once sampled completions show that it saves",
        _paced(_arrival),
    ),
    "fcfs-ski": Entry(
        "first come, first served, prefill by the ski-rental rule", _policy(_arrival, SkiRental)
    ),
    "packing": Entry(
        "each slot serves its own list of an offline bin packing", _policy(Assigned, PrefillFirst), _packed
    ),
    "algorithm1": Entry(
        "the hybrid paper's Algorithm 1: own list longest first, then help the busiest slot",
        _policy(SortingPreemptive, PrefillFirst),
        round_robin,
    ),
    "packing-algorithm1": Entry(
        "Algorithm 1 on an offline bin packing", _policy(SortingPreemptive, PrefillFirst), _packed
    ),
    "lagrangian": Entry(
        "packing and Algorithm 1, prefill by the paper's rule (41)-(43), per slot-step",
        _policy(SortingPreemptive, lambda: Lagrangian("decode_step")),
        _packed,
    ),
    "lagrangian-token": Entry(
        "packing and Algorithm 1, prefill by the paper's rule (41)-(43), per token",
        _policy(SortingPreemptive, lambda: Lagrangian("token")),
        _packed,
    ),
    "learned": Entry(
        "lengths unknown: by arrival, and the last by what their groups have shown, as far as groups"
        " are seen to differ in length, by the ski-rental rule",
        lambda problem, _: hidden_policy("learned", problem),
        evicts=True,
    ),
    "lpt": Entry("longest first, prefill first", _policy(_longest, PrefillFirst)),
    "lpt-paced": Entry("longest first, prefill as of fcfs-paced", _paced(_longest)),
    "lpt-ski": Entry("longest first, prefill by the ski-rental rule", _policy(_longest, SkiRental)),
    "priority": Entry(
        "most urgent first, preempting what is less urgent (BATON)",
        lambda problem, _: PriorityPreemption(problem),
    ),
    "threshold": Entry(
        "longest first, prefill when a tenth of the slots is free",
        _policy(_longest, lambda: Threshold(share=0.1)),
    ),
}


def policy_named(name: str, problem: Problem, assignment: IntArray | None = None) -> Policy:
    """Return a fresh policy.

    name: Key of :data:`POLICIES`.
    assignment: Slot of each request, shape (requests,), for policies that start from one, such as an optimal
        bin packing. By default requests are dealt out in turn for ``algorithm1``, by LPT for the others.

    Raises ValueError if the policy is unknown, or takes no assignment.
    """
    entry = POLICIES.get(name)
    if entry is None:
        raise ValueError(f"no policy is called {name!r}; there are {', '.join(POLICIES)}")
    if entry.assignment is None:
        if assignment is not None:
            raise ValueError(f"the policy {name!r} takes no assignment")
        return entry.make(problem, round_robin(problem))
    return entry.make(problem, entry.assignment(problem) if assignment is None else assignment)

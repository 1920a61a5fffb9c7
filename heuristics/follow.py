"""Execution of a plan: its schedule, or its queue."""

from __future__ import annotations

import numpy as np

from ..data.arrays import IntArray
from ..data.expectation import Expectation, Follow
from ..data.plan import Plan
from ..data.problem import Problem
from ..data.schedule import Schedule
from .policy import Policy
from .queues.admission import Admission
from .queues.ordered import Ordered, arrival_order, longest_first
from .queues.prefill_rules import SkiRental
from .queues.queue_policy import QueuePolicy
from .registry import policy_named
from .replay_and_repair import Replay


def plan_policy(plan: Plan, schedule: Schedule, problem: Problem) -> Policy:
    """Return a fresh policy for a plan of one machine."""
    if plan.followed is not None:
        return policy_named(plan.followed.policy, problem)
    return following(plan.expected, schedule, problem)


def following(expected: Expectation | None, schedule: Schedule, problem: Problem) -> Policy:
    """Return a fresh policy that follows a plan.

    expected: The plan's expectation; None for known lengths, where the schedule is replayed.
    schedule: The plan's schedule of the problem's requests.
    problem: Problem with the lengths as planned.
    """
    if expected is None:
        return Replay(schedule, problem)
    if expected.follow == "schedule":
        return Replay(schedule, problem, expected.patience)
    order = queue_order(problem, expected.follow, expected.held_back)
    return QueuePolicy(Ordered(order), SkiRental(expected.patience), Admission(problem))


def queue_order(problem: Problem, follow: Follow, held_back: int = 0) -> IntArray:
    """Return the order of a queue, shape (requests,).

    Longest first ends a job of known lengths evenly, with short requests. If some predictions are far too
    short, a long request starts late and runs alone. Holding back nearly as many of the longest requests as
    there are slots avoids that: short requests free the slots within a brief time, and the long ones start
    and end together.

    held_back: Number of longest requests that come last, themselves longest first.
    """
    if follow == "as-given":
        return arrival_order(problem)
    return np.roll(longest_first(problem), -held_back)

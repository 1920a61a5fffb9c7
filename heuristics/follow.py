"""How a plan is followed: its schedule replayed, or the queue it chose instead."""

from __future__ import annotations

import numpy as np

from ..data.arrays import IntArray
from ..data.expectation import Expectation, Follow
from ..data.problem import Problem
from ..data.schedule import Schedule
from .policy import Policy
from .queues.admission import Admission
from .queues.ordered import Ordered, arrival_order, longest_first
from .queues.prefill_rules import SkiRental
from .queues.queue_policy import QueuePolicy
from .replay import Replay


def following(expected: Expectation | None, schedule: Schedule, problem: Problem) -> Policy:
    """
    Return a fresh policy that carries a plan out.

    expected: What the plan expects and follows; None for a plan of known lengths, whose schedule is replayed.
    schedule: The plan's schedule, of the requests of ``problem``.
    problem: The problem with the lengths as planned.
    """
    if expected is None:
        return Replay(schedule, problem)
    if expected.follow == "schedule":
        return Replay(schedule, problem, expected.patience)
    order = queue_order(problem, expected.follow, expected.held_back)
    return QueuePolicy(Ordered(order), SkiRental(expected.patience), Admission(problem))


def queue_order(problem: Problem, follow: Follow, held_back: int = 0) -> IntArray:
    """
    Return the order in which a queue takes its requests, shape (requests,).

    Longest first ends a job of known lengths evenly, with short requests. Where some of those predicted
    short are long after all, one of them starts late and runs on alone. Then it is better to hold back
    nearly as many of the longest as there are slots: the short ones before them free the slots in a brief
    time, and requests that are surely long, started together, end together.

    problem: The problem with the lengths as planned.
    follow: ``longest-first`` or ``as-given``.
    held_back: How many of the longest come last, themselves longest first.
    """
    if follow == "as-given":
        return arrival_order(problem)
    return np.roll(longest_first(problem), -held_back)

"""
Schedules of few requests under scarce KV memory: the order is annealed in which they are put one by one.

They are put back from the end (:class:`~.request_profile.RequestProfile`): every schedule in which nothing
could end later than it does is that of some order.
"""

from __future__ import annotations

import numpy as np

from ....data.problem import Problem
from ....data.schedule import Schedule
from ....models.bounds.least_counts import least_counts
from ..backward import schedule_backwards
from .request_profile import RequestProfile, running_requests

MOST_REQUESTS = 130
"""Requests up to which orders are annealed: of more, too few are tried for it in a second."""

HOT, COLD = 0.005, 0.0002
"""Temperatures at the start and the end, as shares of the decode steps."""

HOT_OF_ALL = 0.2
"""The first at most over all requests: the more there are, the less each can lose."""

STARTED = 0.5
"""The share of the cooling that is over where it begins with a schedule."""

REACHES = (0, 4, 16, 64, 10**9)
"""Steps by which a request may start earlier than it has to, to share a prefill stage: one at a time."""

NEAR, DISTANCE = 0.5, 5.0
"""How often a request goes to, or is swapped with, a place near its own, and how far from it on average."""

APART = 4
"""Places between two before which it is kept what was held: a copy takes a third of the time of a request."""

OTHER_REACH = 0.1
"""How often another one is tried, where decode steps are hardly more than there must be."""

HARDLY_MORE = 1.02
"""What hardly more is: then it is prefill stages that are left to save."""


class InsertionAnnealing:
    """
    An annealing walk over the orders in which requests are put.

    problem: The problem scheduled, with a KV capacity, whose decode steps cost something.
    rng: Draws the moves.
    start: A schedule whose order it begins with, half cooled down; longest first without one.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator, start: Schedule | None = None) -> None:
        assert problem.kv_capacity is not None
        self._problem, self._rng = problem, rng
        self._running, rows, self._requests = running_requests(problem)
        cost = problem.cost
        self._stage = max(cost.prefill_base, cost.prefill_floor) / cost.decode_base
        first = np.zeros(len(problem), dtype=np.int64)
        if start is not None:
            first = -start.starts[start.bin_of] - problem.decode_steps
        self._order = np.lexsort((-rows[1], -rows[0], first[self._running])).tolist()
        self._done = 0.0 if start is None else STARTED
        self._reach, self._spare = REACHES[0], False
        self._fewest = least_counts(problem).decode_steps
        self._now = self._least = np.inf
        self._ends = [0] * len(self._order)
        self._marks = [RequestProfile(problem)]

    def step(self, done: float) -> Schedule | None:
        """
        Try a changed order, and return its schedule if that is the best one met so far.

        done: The share of the walk that is over, 0 to 1.
        """
        begins = np.isinf(self._now)
        order, since, last = (self._order, 0, len(self._order)) if begins else self._changed()
        other = self._spare and self._rng.random() < OTHER_REACH
        reach = int(self._rng.choice(REACHES)) if other else self._reach
        hot = min(HOT, HOT_OF_ALL / len(self._order))
        done = self._done + (1.0 - self._done) * done
        loss = hot * (COLD / hot) ** done * self._rng.exponential()
        most = np.inf if begins else self._now + loss * self._least
        if reach != self._reach:
            since, last = 0, len(order)
        placed = self._placed(order, reach, (since, last), most)
        if placed is None:
            return None
        ends, marks = placed
        starts = [end + request[0] for end, request in zip(ends, self._requests, strict=True)]
        decode_steps = max(starts)
        costs = decode_steps + self._stage * len(set(starts))
        if costs <= most:
            self._order, self._reach, self._now = order, reach, costs
            self._ends, self._marks = ends, marks
            self._spare = decode_steps <= HARDLY_MORE * self._fewest
        if costs >= self._least:
            return None
        self._least = costs
        return schedule_backwards(self._problem, self._running, np.array(starts))

    def _changed(self) -> tuple[list[int], int, int]:
        """Return the order with two requests swapped, or one put elsewhere, and where it differs."""
        rng, order = self._rng, list(self._order)
        one, other = rng.integers(len(order), size=2).tolist()
        if rng.random() < NEAR:
            by = int(rng.geometric(1.0 / DISTANCE))
            other = min(max(0, one + by if rng.random() < 0.5 else one - by), len(order) - 1)
        if rng.random() < 0.5:
            order[one], order[other] = order[other], order[one]
        else:
            order.insert(other, order.pop(one))
        return order, min(one, other), max(one, other)

    def _placed(
        self, order: list[int], reach: int, span: tuple[int, int], most: float
    ) -> tuple[list[int], list[RequestProfile]] | None:
        """
        Return the step after each request's last one, counted back from the end, or None beyond so many.

        Only in the places of ``span`` does the order differ: those before it are as they were, and so are
        those behind it if nothing in it has moved. With the ends comes what was held before some places.
        """
        ends, first = list(self._ends), span[0] // APART
        marks = self._marks[:first]
        profile = self._marks[first].copy()
        for place, request in enumerate(order[first * APART :], first * APART):
            if place % APART == 0:
                marks.append(profile.copy())
            decode_steps, peak, prompt = self._requests[request]
            ends[request] = profile.put(decode_steps, peak, prompt, reach)
            if ends[request] + decode_steps > most:
                return None
            if place == span[1] and ends == self._ends:
                return ends, marks + self._marks[len(marks) :]
        return ends, marks

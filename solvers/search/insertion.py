"""
Schedules of few requests under scarce KV memory: put one by one where they first fit, back from the end.

Back from the end what a request holds only shrinks, so one that fits in the rounds in which others end fits
throughout. The order in which they are put is annealed: every schedule in which nothing could end later than
it does is that of some order.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.bounds.least_counts import least_counts
from .backward import schedule_backwards

MOST_REQUESTS = 130
"""Requests up to which orders are annealed: of more, too few are tried for it in a second."""

HOT, COLD = 0.005, 0.0002
"""Temperatures at the start and the end, as shares of the rounds."""

REACHES = (0, 4, 16, 64, 10**9)
"""Rounds by which a request may start earlier than it has to, to share a prefill stage: one at a time."""

OTHER_REACH = 0.1
"""How often another one is tried, where rounds are hardly more than there must be."""

HARDLY_MORE = 1.02
"""What hardly more is: then it is prefill stages that are left to save."""


class InsertionAnnealing:
    """
    An annealing walk over the orders in which requests are put.

    Parameters
    ----------
    problem
        The problem scheduled, with a KV capacity, whose rounds cost something.
    rng
        Draws the moves.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        assert problem.kv_capacity is not None
        self._problem, self._rng = problem, rng
        self._running = np.flatnonzero(problem.rounds > 0)
        rows = np.stack((problem.rounds, problem.kv_peak, problem.prompt_tokens))[:, self._running]
        self._requests = [(rounds, peak, prompt) for rounds, peak, prompt in rows.T.tolist()]
        cost = problem.cost
        self._stage = max(cost.prefill_base, cost.prefill_floor) / cost.decode_base
        self._order = np.lexsort((-rows[1], -rows[0])).tolist()
        self._reach, self._spare = REACHES[0], False
        self._fewest = least_counts(problem).rounds
        self._now = self._least = np.inf

    def step(self, done: float) -> Schedule | None:
        """
        Try a changed order, and return its schedule if that is the best one met so far.

        Parameters
        ----------
        done
            The share of the walk that is over, 0 to 1.
        """
        order = self._order if np.isinf(self._now) else self._changed()
        other = self._spare and self._rng.random() < OTHER_REACH
        reach = int(self._rng.choice(REACHES)) if other else self._reach
        ends = self._ends(order, reach)
        begins = [end + request[0] for end, request in zip(ends, self._requests, strict=True)]
        rounds = max(begins)
        costs = rounds + self._stage * len(set(begins))
        temperature = rounds * HOT * (COLD / HOT) ** done
        if costs <= self._now + temperature * self._rng.exponential():
            self._order, self._reach, self._now = order, reach, costs
            self._spare = rounds <= HARDLY_MORE * self._fewest
        if costs >= self._least:
            return None
        self._least = costs
        return schedule_backwards(self._problem, self._running, np.array(begins))

    def _changed(self) -> list[int]:
        """Return the order with two requests swapped, or one put elsewhere."""
        order, (one, other) = list(self._order), self._rng.integers(len(self._order), size=2).tolist()
        if self._rng.random() < 0.5:
            order[one], order[other] = order[other], order[one]
        else:
            order.insert(other, order.pop(one))
        return order

    def _ends(self, order: list[int], reach: int) -> list[int]:
        """Return the round after each request's last one, counted back from the end of the job."""
        profile = _Profile(self._problem)
        cap, ends, taken = self._problem.prefill_token_cap, [0] * len(order), dict[int, int]()
        for request in order:
            rounds, peak, prompt = self._requests[request]
            end = profile.first_fit(0, rounds, peak)
            shared = (begin for begin in taken if 0 <= begin - rounds - end <= reach)
            for begin in sorted(shared) if reach else ():
                if profile.first_fit(begin - rounds, rounds, peak) == begin - rounds:
                    end = begin - rounds
                    break
            while cap is not None and taken.get(end + rounds, 0) + prompt > cap:
                end = profile.first_fit(end + 1, rounds, peak)
            taken[end + rounds] = taken.get(end + rounds, 0) + prompt
            profile.put(end, rounds, peak)
            ends[request] = end
        return ends


class _Profile:
    """
    What is held from each round on, counted back from the end: a token less a round for each request.

    Parameters
    ----------
    problem
        Gives the KV capacity and the slots.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.kv_capacity is not None
        self._capacity, self._slots = problem.kv_capacity, problem.slots
        self._times, self._held, self._active = [0], [0], [0]

    def first_fit(self, start: int, rounds: int, peak: int) -> int:
        """Return the first round from some round on from which a request of these rounds fits."""
        times, held, active = self._times, self._held, self._active
        at, last = bisect_left(times, start + 1) - 1, len(times) - 1
        while True:
            # Where it ends it holds most: there is room once the others have shrunk by what is lacking.
            number = active[at]
            lacking = held[at] - number * (start - times[at]) + peak - self._capacity
            if number >= self._slots:
                lacking = self._capacity * (number + 1)
            if lacking > 0:
                start += -(-lacking // number)
                if at < last and start >= times[at + 1]:
                    at += 1
                    start = times[at]
                    continue
            # Others that end further back hold most there: up to the last of them that stands against it.
            room, over, against = self._capacity - peak - start, start + rounds, 0
            for place in range(at + 1, last + 1):
                time = times[place]
                if time >= over:
                    break
                if held[place] - time > room or active[place] >= self._slots:
                    against = place
            if not against:
                return start
            at, start = against, times[against]

    def put(self, start: int, rounds: int, peak: int) -> None:
        """Put a request of these rounds."""
        first, last = self._point(start), self._point(start + rounds)
        for place in range(first, last):
            self._held[place] += peak - (self._times[place] - start)
            self._active[place] += 1

    def _point(self, time: int) -> int:
        """Return the place of a round among those from which on something changes, a new one if need be."""
        at = bisect_left(self._times, time)
        if at == len(self._times) or self._times[at] != time:
            before = at - 1
            passed = time - self._times[before]
            self._held.insert(at, self._held[before] - self._active[before] * passed)
            self._active.insert(at, self._active[before])
            self._times.insert(at, time)
        return at

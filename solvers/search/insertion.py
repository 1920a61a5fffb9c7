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

HOT_OF_ALL = 0.2
"""The first at most over all requests: the more there are, the less each can lose."""

REACHES = (0, 4, 16, 64, 10**9)
"""Rounds by which a request may start earlier than it has to, to share a prefill stage: one at a time."""

NEAR, DISTANCE = 0.5, 5.0
"""How often a request goes to, or is swapped with, a place near its own, and how far from it on average."""

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
        self._ends = [0] * len(self._order)
        self._marks: list[_Mark] = [(RequestProfile(problem), {})]

    def step(self, done: float) -> Schedule | None:
        """
        Try a changed order, and return its schedule if that is the best one met so far.

        Parameters
        ----------
        done
            The share of the walk that is over, 0 to 1.
        """
        begins = np.isinf(self._now)
        order, since = (self._order, 0) if begins else self._changed()
        other = self._spare and self._rng.random() < OTHER_REACH
        reach = int(self._rng.choice(REACHES)) if other else self._reach
        hot = min(HOT, HOT_OF_ALL / len(self._order))
        loss = hot * (COLD / hot) ** done * self._rng.exponential()
        most = np.inf if begins else self._now + loss * self._least
        placed = self._placed(order, reach, since if reach == self._reach else 0, most)
        if placed is None:
            return None
        ends, marks = placed
        starts = [end + request[0] for end, request in zip(ends, self._requests, strict=True)]
        rounds = max(starts)
        costs = rounds + self._stage * len(set(starts))
        if costs <= most:
            self._order, self._reach, self._now = order, reach, costs
            self._ends, self._marks = ends, marks
            self._spare = rounds <= HARDLY_MORE * self._fewest
        if costs >= self._least:
            return None
        self._least = costs
        return schedule_backwards(self._problem, self._running, np.array(starts))

    def _changed(self) -> tuple[list[int], int]:
        """Return the order with two requests swapped, or one put elsewhere, and where it first differs."""
        rng, order = self._rng, list(self._order)
        one, other = rng.integers(len(order), size=2).tolist()
        if rng.random() < NEAR:
            by = int(rng.geometric(1.0 / DISTANCE))
            other = min(max(0, one + by if rng.random() < 0.5 else one - by), len(order) - 1)
        if rng.random() < 0.5:
            order[one], order[other] = order[other], order[one]
        else:
            order.insert(other, order.pop(one))
        return order, min(one, other)

    def _placed(
        self, order: list[int], reach: int, since: int, most: float
    ) -> tuple[list[int], list[_Mark]] | None:
        """
        Return the round after each request's last one, counted back from the end, or None beyond so many.

        The places before ``since`` are as they were; with the ends comes what was held before each place.
        """
        ends, marks = list(self._ends), self._marks[:since]
        profile, taken = self._marks[since]
        profile, taken, cap = profile.copy(), dict(taken), self._problem.prefill_token_cap
        for request in order[since:]:
            marks.append((profile.copy(), dict(taken)))
            rounds, peak, prompt = self._requests[request]
            end = profile.first_fit(0, rounds, peak)
            shared = (begin for begin in taken if 0 <= begin - rounds - end <= reach)
            for begin in sorted(shared) if reach else ():
                if profile.first_fit(begin - rounds, rounds, peak) == begin - rounds:
                    end = begin - rounds
                    break
            while cap is not None and taken.get(end + rounds, 0) + prompt > cap:
                end = profile.first_fit(end + 1, rounds, peak)
            if end + rounds > most:
                return None
            taken[end + rounds] = taken.get(end + rounds, 0) + prompt
            profile.put(end, rounds, peak)
            ends[request] = end
        return ends, marks


class RequestProfile:
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

    def copy(self) -> RequestProfile:
        """Return another that is as this one, and changes by itself."""
        other = object.__new__(RequestProfile)
        other._capacity, other._slots = self._capacity, self._slots
        other._times, other._held, other._active = self._times[:], self._held[:], self._active[:]
        return other

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
            room = self._capacity - peak - start
            for place in range(bisect_left(times, start + rounds) - 1, at, -1):
                if held[place] - times[place] > room or active[place] >= self._slots:
                    at, start = place, times[place]
                    break
            else:
                return start

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


_Mark = tuple[RequestProfile, dict[int, int]]
"""What is held before a place of the order, and the prompt tokens of the stages there are."""

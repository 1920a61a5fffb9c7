"""
Requests under scarce KV memory, put one by one where they first fit, back from the end.

Back from the end what a request holds only shrinks, so one that fits in the rounds in which others end fits
throughout.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from ....data.arrays import IntArray
from ....data.problem import Problem

FULL = 1 << 60
"""Tokens held where no slot is free: more than any capacity."""


def running_requests(problem: Problem) -> tuple[IntArray, IntArray, list[tuple[int, int, int]]]:
    """Return the requests that take rounds, their rounds, peaks and prompts as rows, and as tuples."""
    running = np.flatnonzero(problem.rounds > 0)
    rows = np.stack((problem.rounds, problem.kv_peak, problem.prompt_tokens))[:, running]
    return running, rows, [(rounds, peak, prompt) for rounds, peak, prompt in rows.T.tolist()]


class RequestProfile:
    """
    Requests put one by one: what is held from each round on, counted back from the end.

    Back from the end a request holds a token less a round.

    Parameters
    ----------
    problem
        Gives the KV capacity, the slots and the token cap.

    Attributes
    ----------
    stages
        The prompt tokens of each prefill stage, by the round that it stands at.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.kv_capacity is not None
        self._capacity, self._slots, self._cap = problem.kv_capacity, problem.slots, problem.prefill_token_cap
        # From each of these rounds on: what is held, by how many; that less the round; the most room there.
        self._times, self._held, self._active = [0], [0], [0]
        self._height, self._room = [0], [self._capacity]
        self.stages = dict[int, int]()

    @property
    def rounds(self) -> int:
        """Rounds from the first request's start to the end."""
        return self._times[-1]

    def copy(self) -> RequestProfile:
        """Return another that is as this one, and changes by itself."""
        other = object.__new__(RequestProfile)
        other._capacity, other._slots, other._cap = self._capacity, self._slots, self._cap
        other.stages = self.stages.copy()
        other._times, other._held, other._active = self._times[:], self._held[:], self._active[:]
        other._height, other._room = self._height[:], self._room[:]
        return other

    def _first_fit(self, start: int, rounds: int, peak: int) -> int:
        """Return the first round from some round on from which a request of these rounds fits."""
        times, height, room = self._times, self._height, self._room
        at = bisect_right(times, start) - 1
        while True:
            # Where it ends it holds most: there is room once the others have shrunk by what is lacking.
            if room[at] < peak:
                at += 1
                while room[at] < peak:
                    at += 1
                start = times[at]
            number = self._active[at]
            lacking = self._held[at] - number * (start - times[at]) + peak - self._capacity
            if lacking > 0:
                start += -(-lacking // number)
            # Others that end further back hold most there: up to the last of them that stands against it.
            most = self._capacity - peak - start
            for place in range(bisect_left(times, start + rounds) - 1, at, -1):
                if height[place] > most:
                    at, start = place, times[place]
                    break
            else:
                return start

    def _shared(self, end: int, rounds: int, peak: int, reach: float) -> int:
        """Return the first round so near from which a request fits and shares a stage, or else the given."""
        times, least = self._times, end + rounds
        for place in range(bisect_left(times, least), len(times)):
            begin = times[place]
            if begin > least + reach:
                break
            if begin in self.stages and self._first_fit(begin - rounds, rounds, peak) == begin - rounds:
                return begin - rounds
        return end

    def put(self, rounds: int, peak: int, prompt: int, reach: float) -> int:
        """
        Put a request where it first fits, or further back to share a stage, and return the round of its end.

        Parameters
        ----------
        rounds, peak, prompt
            Decode steps it takes, tokens it holds in the last of them, and tokens of its prompt.
        reach
            Rounds by which it may be put further back.
        """
        end = self._first_fit(0, rounds, peak)
        if reach:
            end = self._shared(end, rounds, peak, reach)
        while self._cap is not None and self.stages.get(end + rounds, 0) + prompt > self._cap:
            end = self._first_fit(end + 1, rounds, peak)
        self.stages[end + rounds] = self.stages.get(end + rounds, 0) + prompt
        first, last = self._point(end), self._point(end + rounds)
        times, held, active = self._times, self._held, self._active
        for place in range(first, last):
            time = times[place]
            held[place] += peak - time + end
            active[place] += 1
            if active[place] < self._slots:
                self._height[place] = held[place] - time
                left = held[place] - active[place] * (times[place + 1] - 1 - time)
                self._room[place] = self._capacity - left
            else:
                self._height[place], self._room[place] = FULL, -1
        return end

    def _point(self, time: int) -> int:
        """Return the place of a round among those from which on something changes, a new one if need be."""
        times, held, active = self._times, self._held, self._active
        at = bisect_left(times, time)
        if at == len(times) or times[at] != time:
            before = at - 1
            number, passed = active[before], time - times[before]
            now = held[before] - number * passed
            held.insert(at, now)
            active.insert(at, number)
            times.insert(at, time)
            self._height.insert(at, FULL if number >= self._slots else now - time)
            self._room.insert(at, self._room[before])
        return at

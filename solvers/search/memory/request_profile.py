"""
Requests under scarce KV memory, put one by one where they first fit, back from the end.

Back from the end what a request holds only shrinks, so one that fits in the steps in which others end fits
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
    """Return the requests that take steps, their decode steps, peaks and prompts as rows, and as tuples."""
    running = np.flatnonzero(problem.decode_steps > 0)
    rows = np.stack((problem.decode_steps, problem.kv_peak, problem.prompt_tokens))[:, running]
    return running, rows, [(decode_steps, peak, prompt) for decode_steps, peak, prompt in rows.T.tolist()]


class RequestProfile:
    """
    Requests put one by one: what is held from each decode step on, counted back from the end.

    Back from the end a request holds a token less a decode step.

    Parameters
    ----------
    problem
        Gives the KV capacity, the slots and the token cap.

    Attributes
    ----------
    stages
        The prompt tokens of each prefill stage, by the decode step that it stands at.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.kv_capacity is not None
        self._capacity, self._slots, self._cap = problem.kv_capacity, problem.slots, problem.prefill_token_cap
        # From each of these steps on: what is held, by how many; that less the step; the most room there.
        self._times, self._held, self._active = [0], [0], [0]
        self._height, self._room = [0], [self._capacity]
        self.stages = dict[int, int]()

    @property
    def decode_steps(self) -> int:
        """Decode steps from the first request's start to the end."""
        return self._times[-1]

    def copy(self) -> RequestProfile:
        """Return another that is as this one, and changes by itself."""
        other = object.__new__(RequestProfile)
        other._capacity, other._slots, other._cap = self._capacity, self._slots, self._cap
        other.stages = self.stages.copy()
        other._times, other._held, other._active = self._times[:], self._held[:], self._active[:]
        other._height, other._room = self._height[:], self._room[:]
        return other

    def _first_fit(self, start: int, decode_steps: int, peak: int) -> int:
        """Return the first step from some decode step on from which a request of these decode steps fits."""
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
            for place in range(bisect_left(times, start + decode_steps) - 1, at, -1):
                if height[place] > most:
                    at, start = place, times[place]
                    break
            else:
                return start

    def _shared(self, end: int, decode_steps: int, peak: int, reach: float) -> int:
        """Return the first step so near from which a request fits and shares a stage, or else the given."""
        times, least = self._times, end + decode_steps
        for place in range(bisect_left(times, least), len(times)):
            begin = times[place]
            if begin > least + reach:
                break
            if (
                begin in self.stages
                and self._first_fit(begin - decode_steps, decode_steps, peak) == begin - decode_steps
            ):
                return begin - decode_steps
        return end

    def put(self, decode_steps: int, peak: int, prompt: int, reach: float) -> int:
        """
        Put a request where it first fits, or further back to share a stage, and return the step of its end.

        decode_steps, peak, prompt: Decode steps it takes, tokens it holds in the last of them, and tokens of
            its prompt.
        reach: Decode steps by which it may be put further back.
        """
        end = self._first_fit(0, decode_steps, peak)
        if reach:
            end = self._shared(end, decode_steps, peak, reach)
        while self._cap is not None and self.stages.get(end + decode_steps, 0) + prompt > self._cap:
            end = self._first_fit(end + 1, decode_steps, peak)
        self.stages[end + decode_steps] = self.stages.get(end + decode_steps, 0) + prompt
        first, last = self._point(end), self._point(end + decode_steps)
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
        """Return the place of a step among those from which on something changes, a new one if need be."""
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

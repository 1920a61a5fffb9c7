"""
Requests under scarce KV memory, put one by one where they first fit, back from the end.

Back from the end what a request holds only shrinks, so one that fits in the rounds in which others end fits
throughout.
"""

from __future__ import annotations

from bisect import bisect_left

from ...data.problem import Problem


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
        self._times, self._held, self._active = [0], [0], [0]
        self.stages = dict[int, int]()

    def copy(self) -> RequestProfile:
        """Return another that is as this one, and changes by itself."""
        other = object.__new__(RequestProfile)
        other._capacity, other._slots, other._cap = self._capacity, self._slots, self._cap
        other.stages = dict(self.stages)
        other._times, other._held, other._active = self._times[:], self._held[:], self._active[:]
        return other

    def _first_fit(self, start: int, rounds: int, peak: int) -> int:
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
        shared = (begin for begin in self.stages if 0 <= begin - rounds - end <= reach)
        for begin in sorted(shared) if reach else ():
            if self._first_fit(begin - rounds, rounds, peak) == begin - rounds:
                end = begin - rounds
                break
        while self._cap is not None and self.stages.get(end + rounds, 0) + prompt > self._cap:
            end = self._first_fit(end + 1, rounds, peak)
        self.stages[end + rounds] = self.stages.get(end + rounds, 0) + prompt
        first, last = self._point(end), self._point(end + rounds)
        for place in range(first, last):
            self._held[place] += peak - (self._times[place] - end)
            self._active[place] += 1
        return end

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

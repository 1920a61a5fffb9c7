"""A schedule built in one pass: requests in an order, prefill stages by the ski-rental rule."""

from __future__ import annotations

import heapq
import math

import numpy as np

from ..data.cost import IntArray
from ..data.problem import Problem
from ..data.schedule import Schedule

LOOK_AHEAD = 48
"""Waiting requests tried in a row without finding one that fits before a stage is closed."""

FULL_STAGE = 0.95
"""Share of the token cap from which a prefill stage counts as full, so that waiting saves no stage."""


def longest_first(problem: Problem) -> IntArray:
    """Return the requests by decreasing decode rounds, the order of LPT, shape (requests,)."""
    return np.argsort(-problem.rounds, kind="stable")


def ski_rental_schedule(
    problem: Problem, *, order: IntArray | None = None, patience: float = 0.5
) -> Schedule:
    """
    Return a schedule that fills free slots in the given order whenever waiting has cost enough.

    A prefill stage starts once the slot-rounds idle since the last one, priced at the share
    ``decode_base / slots`` of a round each, reach ``patience`` times the cost of opening a stage: the rule
    of ski rental, under which either choice is paid for at most twice. A stage also starts when its
    requests already fill the token cap, or when nothing runs. A request joins only if the KV capacity
    holds to the end of everything that runs, which known lengths tell.

    Parameters
    ----------
    problem
        The problem scheduled. Arrival times are not looked at.
    order
        The requests in the order they are taken, shape (requests,); longest first if left out.
    patience
        Stage openings' worth of idle rounds to wait for.
    """
    waiting = list((longest_first(problem) if order is None else order).tolist())
    waiting.reverse()
    chooser = _Chooser(problem)
    opening = max(problem.cost.prefill_base, problem.cost.prefill_floor)
    longest = float(problem.rounds.max() * problem.slots)
    free_rounds = problem.cost.decode_base == 0
    bearable = longest if free_rounds else patience * opening * problem.slots / problem.cost.decode_base
    bin_of = np.empty(len(problem), dtype=np.int64)
    starts: list[int] = []
    finishes: list[int] = []
    rounds = problem.rounds.tolist()
    now, idle = 0, 0.0
    while waiting:
        chosen, full = chooser.choose(waiting, problem.slots - len(finishes), now)
        if chosen:
            wait = math.ceil((bearable - idle) / len(chosen)) if finishes and not full else 0
            if wait <= 0:
                bin_of[chosen] = len(starts)
                starts.append(now)
                chooser.admit(chosen, now)
                _remove(waiting, chosen)
                for request in chosen:
                    heapq.heappush(finishes, now + rounds[request])
                idle = 0.0
                continue
            elapsed = min(wait, finishes[0] - now)
            idle += len(chosen) * elapsed
            now += elapsed
        else:
            now = finishes[0]
        while finishes and finishes[0] <= now:
            heapq.heappop(finishes)
    end = max(finishes, default=now)
    return Schedule.from_bins(problem, bin_of, np.diff(np.array([*starts, end], dtype=np.int64)))


def _remove(waiting: list[int], chosen: list[int]) -> None:
    """Take the chosen requests, which lie near the end, out of the waiting list."""
    left = set(chosen)
    kept: list[int] = []
    while left:
        request = waiting.pop()
        if request in left:
            left.remove(request)
        else:
            kept.append(request)
    waiting.extend(reversed(kept))


class _Chooser:
    """Which waiting requests the next prefill stage takes."""

    def __init__(self, problem: Problem) -> None:
        self._slots = problem.slots
        self._cap = problem.prefill_token_cap
        self._prompt = problem.prompt_tokens.tolist()
        self._memory = None if problem.kv_capacity is None else Memory(problem, problem.kv_capacity)

    def choose(self, waiting: list[int], free: int, now: int) -> tuple[list[int], bool]:
        """Return the requests a stage at round ``now`` takes, and whether it is as full as can be."""
        if self._cap is None and self._memory is None:
            return waiting[-free:][::-1] if free else [], free == self._slots
        if self._memory is not None:
            self._memory.advance(now)
        chosen: list[int] = []
        tokens, misses = 0, 0
        for request in reversed(waiting):
            if len(chosen) == free or misses == LOOK_AHEAD:
                break
            prompt = self._prompt[request]
            fits = self._cap is None or tokens + prompt <= self._cap
            if fits and (self._memory is None or self._memory.hold(request, now)):
                chosen.append(request)
                tokens += prompt
            else:
                misses += 1
        if self._memory is not None:
            self._memory.release(len(chosen))
        return chosen, self._cap is not None and tokens >= FULL_STAGE * self._cap

    def admit(self, chosen: list[int], now: int) -> None:
        """Note that the chosen requests run from round ``now`` on."""
        if self._memory is not None:
            for request in chosen:
                self._memory.place(request, now)


class Memory:
    """
    The KV tokens that running requests will hold, up to the end of the last of them.

    What is held only grows between two finishes, so the capacity holds at every round if it holds in the
    last round of every running request.

    Parameters
    ----------
    problem
        Its requests' prompts and rounds are read.
    capacity
        Most tokens held at any moment.
    """

    def __init__(self, problem: Problem, capacity: int) -> None:
        self._capacity = capacity
        self._rounds = problem.rounds
        self._at_start = problem.kv_at_start
        self._prompt = problem.prompt_tokens
        self._finish = np.empty(problem.slots + 1, dtype=np.int64)
        self._offset = np.empty(problem.slots + 1, dtype=np.int64)
        self._count = 0

    def advance(self, now: int) -> None:
        """Forget the requests that have finished by round ``now``."""
        running = self._finish[: self._count] > now
        kept = int(running.sum())
        self._finish[:kept] = self._finish[: self._count][running]
        self._offset[:kept] = self._offset[: self._count][running]
        self._count = kept

    def place(self, request: int, now: int) -> None:
        """Let a request run from round ``now`` on."""
        self._finish[self._count] = now + self._rounds[request]
        self._offset[self._count] = self._at_start[request] - now
        self._count += 1

    def hold(self, request: int, now: int) -> bool:
        """Let a request run from round ``now`` on if the capacity allows, and return whether it does."""
        self.place(request, now)
        finish, offset = self._finish[: self._count], self._offset[: self._count]
        by_finish = np.argsort(-finish)
        last = finish[by_finish] - 1
        held = np.cumsum(offset[by_finish]) + np.arange(1, self._count + 1) * last
        entry = int((offset + now).sum())
        if max(entry, int(held[last >= now].max(initial=0))) <= self._capacity:
            return True
        self._count -= 1
        return False

    def release(self, count: int) -> None:
        """Take the requests placed last out again."""
        self._count -= count

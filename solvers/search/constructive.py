"""Schedule built in one pass, with the ski-rental rule."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from ...data.arrays import IntArray
from ...data.kept_beginnings import CountedAhead
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...heuristics.queues.admission import FULL_STAGE
from ...heuristics.queues.ordered import longest_first
from ...heuristics.queues.prefill_rules import bearable_idle, steps_to_wait

LOOK_AHEAD = 48
"""Requests to try in a row before a stage is closed."""


ASKED_EVERY = 64
"""Stages between two looks at the clock."""


def ski_rental_schedule(
    problem: Problem, *, order: IntArray | None = None, patience: float = 0.5, burst: int | None = None
) -> Schedule:
    """Return a schedule that fills free slots in a given order.

    A prefill stage starts once slots have idled as long as the rule of ski rental bears
    (:func:`~batchbound.heuristics.queues.prefill_rules.bearable_idle`). A stage also starts when the token
    cap lets no other request join it, when no others are left, or when nothing runs. A request joins only if
    the KV capacity holds to the end of everything that runs.

    problem: Problem to schedule; arrival times are ignored.
    order: Order of the requests, shape (requests,); by default longest first.
    patience: Stage openings' worth of idle steps to wait for; 0 never waits.
    burst: Most requests that a stage starts, or None. Requests that start together also hold most tokens
        together, so a tight KV capacity is better used by small bursts.
    """
    schedule = ski_rental_in_time(problem, lambda: False, order=order, patience=patience, burst=burst)
    assert schedule is not None, "it is never late"
    return schedule


def ski_rental_in_time(
    problem: Problem,
    late: Callable[[], bool],
    *,
    order: IntArray | None = None,
    patience: float = 0.5,
    burst: int | None = None,
) -> Schedule | None:
    """Return :func:`ski_rental_schedule`, or None once it is late."""
    order = longest_first(problem) if order is None else order
    # If decode steps cost nothing, the limit is longer than any slot could idle.
    bearable = min(bearable_idle(problem, patience), float(problem.decode_steps.max() * problem.slots))
    largest = problem.slots if burst is None else min(burst, problem.slots)
    limited = problem.memory_can_run_out or problem.prefill_token_cap is not None
    schedule = (_chosen if limited else _in_order)(problem, late, order, bearable, largest)
    if schedule is None:
        return None
    bin_of, times = schedule
    return Schedule.from_bins(problem, bin_of, np.diff(np.array(times, dtype=np.int64)))


def _in_order(
    problem: Problem, late: Callable[[], bool], order: IntArray, bearable: float, most: int
) -> tuple[IntArray, list[int]] | None:
    """Return bins, times and end, with requests strictly in order."""
    decode_steps: list[int] = problem.decode_steps[order].tolist()
    finishes, begun, starts = list[int](), list[int](), list[int]()
    head, now, idle, count = 0, 0, 0, len(order)
    while head < count:
        joining = min(most, problem.slots - len(finishes), count - head)
        wait = 0
        # The last requests wait for no other that could join them.
        if joining and finishes and joining < count - head:
            wait = steps_to_wait(bearable, idle, joining)
        if joining and not wait:
            if len(begun) % ASKED_EVERY == 0 and late():
                return None
            begun.append(head)
            starts.append(now)
            for steps in decode_steps[head : head + joining]:
                heappush(finishes, now + steps)
            head, idle = head + joining, 0
            continue
        elapsed = min(wait, max(finishes[0] - now, 1)) if joining else finishes[0] - now
        idle += joining * elapsed
        now += elapsed
        while finishes and finishes[0] <= now:
            heappop(finishes)
    bin_of = np.empty(count, dtype=np.int64)
    bin_of[order] = np.repeat(np.arange(len(begun)), np.diff([*begun, count]))
    return bin_of, [*starts, max(finishes, default=now)]


def _chosen(
    problem: Problem, late: Callable[[], bool], order: IntArray, bearable: float, most: int
) -> tuple[IntArray, list[int]] | None:
    """Return bins, times and end, with requests chosen by memory or tokens."""
    waiting: list[int] = order.tolist()
    waiting.reverse()
    chooser = _Chooser(problem)
    bin_of = np.empty(len(problem), dtype=np.int64)
    starts: list[int] = []
    finishes: list[int] = []
    decode_steps = problem.decode_steps.tolist()
    now, idle = 0, 0.0
    while waiting:
        chosen, full = chooser.choose(waiting, min(most, problem.slots - len(finishes)), now)
        if chosen:
            # The last requests wait for no other that could join them.
            now_or_never = full or len(chosen) == len(waiting) or not finishes
            wait = 0 if now_or_never else steps_to_wait(bearable, idle, len(chosen))
            if not wait:
                if late():
                    return None
                bin_of[chosen] = len(starts)
                starts.append(now)
                chooser.admit(chosen)
                _remove(waiting, chosen)
                for request in chosen:
                    heappush(finishes, now + decode_steps[request])
                idle = 0.0
                continue
            # Choosing again at every finish is slow under memory checks; four times a wait is enough.
            elapsed = min(wait, max(finishes[0] - now, -(-wait // 4) if problem.kv_capacity else 1))
            idle += len(chosen) * elapsed
            now += elapsed
        else:
            now = finishes[0]
        while finishes and finishes[0] <= now:
            heappop(finishes)
    return bin_of, [*starts, max(finishes, default=now)]


def _remove(waiting: list[int], chosen: list[int]) -> None:
    chosen_left = set(chosen)
    rest: list[int] = []
    while chosen_left:
        request = waiting.pop()
        if request in chosen_left:
            chosen_left.remove(request)
        else:
            rest.append(request)
    waiting.extend(reversed(rest))


class _Chooser:
    """Choice of the waiting requests for the next prefill stage."""

    def __init__(self, problem: Problem) -> None:
        self._cap = problem.prefill_token_cap
        self._own: list[int] = problem.own_tokens.tolist()
        counted = self._cap is not None and problem.tree is not None
        self._ahead = CountedAhead(problem) if counted else None
        self._memory = None if problem.kv_capacity is None else Memory(problem, problem.kv_capacity)
        self._held = 0

    def choose(self, waiting: list[int], free: int, now: int) -> tuple[list[int], bool]:
        """Return the requests of a stage, and whether it is full."""
        if self._memory is not None:
            self._memory.forget(self._held)
            self._memory.advance(now)
        chosen, computed = list[int](), set[int]()
        tokens, misses, turned_away = 0, 0, False
        for request in reversed(waiting):
            if len(chosen) == free or misses == LOOK_AHEAD:
                break
            nodes = set(computed)
            more = self._own[request] if self._ahead is None else self._ahead.more(request, nodes)
            fits = self._cap is None or tokens + more <= self._cap
            if fits and (self._memory is None or self._memory.hold(request, now)):
                chosen.append(request)
                computed = nodes
                tokens += more
            else:
                misses += 1
                turned_away = turned_away or not fits
        self._held = len(chosen)
        if self._cap is None:
            return chosen, False
        # A rejected request has no room under the cap, however long the stage waits.
        return chosen, tokens >= FULL_STAGE * self._cap or (turned_away and len(chosen) < free)

    def admit(self, chosen: list[int]) -> None:
        """Note that the chosen requests run from now on."""
        self._held = 0
        if self._ahead is not None:
            self._ahead.begin(chosen)


class Memory:
    """KV tokens of running requests, up to the last one's end.

    Held tokens only grow between two ends, so the capacity holds always if it holds in the last decode step
    of every running request.
    """

    def __init__(self, problem: Problem, capacity: int) -> None:
        self._capacity = capacity
        self._decode_steps = problem.decode_steps.tolist()
        # A request without a decode step holds its prompt alone, until its stage ends.
        self._at_start = np.where(
            problem.decode_steps > 0, problem.kv_at_start, problem.prompt_tokens
        ).tolist()
        self._prompt = problem.prompt_tokens.tolist()
        self._running: list[tuple[int, int]] = []
        # By their last decode steps, latest first: these, what is held in them apart from them, and its sums.
        self._last, self._offset, self._sums = np.zeros((3, len(problem) + 1), dtype=np.int64)
        self._ranks = np.arange(1, len(problem) + 1)
        self._index()

    def _index(self) -> None:
        """Sort the running requests by their end, and add up their tokens."""
        last, offset = np.array(self._running, dtype=np.int64).reshape(-1, 2).T
        latest_first = np.argsort(-last, kind="stable")
        self._last[: len(last)], self._offset[: len(last)] = last[latest_first], offset[latest_first]
        self._add_up()

    def _add_up(self) -> None:
        count = len(self._running)
        last, sums = self._last[:count], self._sums[1 : count + 1]
        np.cumsum(self._offset[:count], out=sums)
        self._before = -last
        # Most tokens held at the ends up to each one's own; a newcomer's offset is added to them.
        kv_tokens = sums + (self._ranks[:count] + 1) * last
        self._worst = np.append(np.maximum.accumulate(kv_tokens[::-1])[::-1], -self._capacity)

    def advance(self, now: int) -> None:
        """Forget the requests that have finished by a decode step."""
        self._running = [entry for entry in self._running if entry[0] >= now]
        self._index()

    def forget(self, count: int) -> None:
        """Remove the requests admitted last."""
        if count:
            del self._running[-count:]

    def hold(self, request: int, now: int) -> bool:
        """Admit a request if the capacity allows; return success."""
        offset, last = self._at_start[request] - now, now + self._decode_steps[request] - 1
        count = len(self._running)
        if self._sums[count] + count * now + self._prompt[request] > self._capacity:
            return False
        beside = int(self._before.searchsorted(-last, side="right"))
        if last >= now:
            if offset + self._worst[self._before.searchsorted(-last)] > self._capacity:
                return False
            if self._sums[beside] + offset + (beside + 1) * last > self._capacity:
                return False
        for column, value in ((self._last, last), (self._offset, offset)):
            column[beside + 1 : count + 1] = column[beside:count]
            column[beside] = value
        self._running.append((last, offset))
        self._add_up()
        return True

"""Fast schedules of queue policies for known lengths."""

from __future__ import annotations

import heapq
import math
from bisect import bisect, insort
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ..policy import Policy
from .adaptive_batch import AdaptiveBatch
from .admission import FULL_STAGE, Admission
from .algorithm1 import SortingPreemptive
from .assignment import Assigned
from .ordered import Ordered
from .preemption import PriorityPreemption
from .prefill_rules import Opportunity
from .queue_policy import Queue, QueuePolicy

ASKED_EVERY = 64
"""Prefill stages between two checks of the time limit."""


def known_schedule(
    problem: Problem, policy: QueuePolicy, least: float = math.inf, late: Callable[[], bool] = lambda: False
) -> Schedule | None:
    """Return a policy's schedule without running the loop.

    Decisions are those of :class:`~batchbound.heuristics.queues.queue_policy.QueuePolicy`, in a tenth of the
    time; a test compares the two. The run stops once even full slots and full memory could not beat
    ``least``. It returns None if a request is evicted, ``least`` is not beaten, or the time is over.

    problem: Problem with every request there at the start.
    policy: Policy that :func:`dispatch_of` returns.
    least: Makespan to beat, seconds.
    late: True once the time is over.
    """
    return _Run(problem, policy).schedule(least, late)


def dispatch_of(policy: Policy) -> QueuePolicy | None:
    """Return the queue policy that equals another for known lengths."""
    if isinstance(policy, AdaptiveBatch | PriorityPreemption):
        policy = policy.dispatch
    known = isinstance(policy, QueuePolicy) and isinstance(policy.queue, Assigned | Ordered)
    return policy if isinstance(policy, QueuePolicy) and known else None


def dispatch_key(policy: QueuePolicy) -> object:
    """Return a key, equal if two policies decide the same."""
    queue, admission = policy.queue, policy.admission
    if isinstance(queue, Assigned):
        order: object = type(queue), tuple(map(tuple, queue.lists))
    else:
        assert isinstance(queue, Ordered)
        order = queue.order.tobytes()
    return order, policy.rule, admission.capacity, admission.capacity and admission.reserve


class _Queue(Protocol):
    """Waiting requests as lists."""

    def propose(self, free: list[int]) -> tuple[list[int], list[int]]:
        """Return the requests that free slots would take, and their slots."""
        ...

    def take(self, requests: list[int]) -> None: ...


class _InOrder:
    """Lists of :class:`~batchbound.heuristics.queues.ordered.Ordered`."""

    def __init__(self, queue: Ordered) -> None:
        self._order, self._head = queue.order.tolist(), 0

    def propose(self, free: list[int]) -> tuple[list[int], list[int]]:
        requests = self._order[self._head : self._head + len(free)]
        return requests, free[: len(requests)]

    def take(self, requests: list[int]) -> None:
        self._head += len(requests)


class _OwnLists:
    """Lists of :class:`~batchbound.heuristics.queues.assignment.Assigned`."""

    def __init__(self, queue: Assigned) -> None:
        self._lists, self._owner = [list(queued) for queued in queue.lists], queue.owner
        self._next = [0] * len(self._lists)

    def propose(self, free: list[int]) -> tuple[list[int], list[int]]:
        slots = [slot for slot in free if self._next[slot] < len(self._lists[slot])]
        return [self._lists[slot][self._next[slot]] for slot in slots], slots

    def take(self, requests: list[int]) -> None:
        for request in requests:
            self._next[self._owner[request]] += 1


class _HelpedLists(_OwnLists):
    """Lists of :class:`~batchbound.heuristics.queues.algorithm1.SortingPreemptive`."""

    def __init__(self, queue: SortingPreemptive) -> None:
        super().__init__(queue)
        self._tokens, self._remaining = queue.tokens, queue.remaining.copy()

    def propose(self, free: list[int]) -> tuple[list[int], list[int]]:
        requests, slots = super().propose(free)
        if len(slots) == len(free):
            return requests, slots
        requests = []
        ahead, remaining = self._next.copy(), self._remaining.copy()
        for slot in free:
            while ahead[slot] == len(self._lists[slot]):
                slot = int(remaining.argmax())
                if remaining[slot] <= 0:
                    return requests, free[: len(requests)]
                if ahead[slot] == len(self._lists[slot]):
                    remaining[slot] = 0
            request = self._lists[slot][ahead[slot]]
            ahead[slot] += 1
            remaining[slot] -= self._tokens[request]
            requests.append(request)
        return requests, free[: len(requests)]

    def take(self, requests: list[int]) -> None:
        super().take(requests)
        for request in requests:
            self._remaining[self._owner[request]] -= self._tokens[request]


def _lists(queue: Queue) -> _Queue:
    if isinstance(queue, SortingPreemptive):
        return _HelpedLists(queue)
    if isinstance(queue, Assigned):
        return _OwnLists(queue)
    assert isinstance(queue, Ordered)
    return _InOrder(queue)


class _Room:
    """Token cap and planned KV tokens of an admission."""

    def __init__(self, problem: Problem, admission: Admission) -> None:
        self._prompt, self._start = problem.prompt_tokens.tolist(), problem.kv_at_start.tolist()
        self._decode_steps = problem.decode_steps.tolist()
        self._cap, self._capacity = admission.cap, admission.capacity
        self._entry = admission.room_at_entry if admission.reserve == "present" else None
        self._last: list[int] = []
        self._offset: list[int] = []
        """Last decode step of each running request, in order, and its tokens extrapolated back to step 0."""
        self._arrays: tuple[IntArray, IntArray] | None = None
        """The same as arrays, until a request begins or ends."""
        self._offsets = self._peaks = self._fitted = 0
        self._blocked: dict[int, tuple[int, int]] = {}
        """Blocked requests, with the decode step that lacks room and the tokens held by others then."""

    def held(self, now: int) -> int:
        return self._offsets + len(self._last) * now

    def overflows(self, now: int, decode_steps: int) -> bool:
        """Return whether KV memory overflows within some decode steps."""
        return self._capacity is not None and self.held(now + decode_steps - 1) > self._capacity

    def fitting(self, requests: list[int], now: int) -> tuple[int, bool]:
        """Return the same as :meth:`~batchbound.heuristics.queues.admission.Admission.fitting`."""
        count, full = len(requests), False
        if self._cap is not None and count:
            tokens = taken = 0
            for request in requests:
                tokens += self._prompt[request]
                if tokens > self._cap:
                    break
                taken += 1
            count = max(1, taken)
            full = taken < len(requests) or tokens >= FULL_STAGE * self._cap
        if self._capacity is not None and count:
            within = self._within(requests[:count], now)
            full, count = full and within == count, within
        if not count and requests and not len(self._last):
            count = 1
        return count, full

    def _within(self, requests: list[int], now: int) -> int:
        """Return how many of the first requests fit the KV memory."""
        assert self._capacity is not None
        # The stage's tokens, or those of the decode step after it.
        room, first = (self._capacity, self._prompt) if self._entry is None else (self._entry, self._start)
        kv_tokens, count, peaks = self.held(now), 0, self._peaks
        for request in requests:
            kv_tokens += first[request]
            if kv_tokens > room:
                break
            peaks += self._start[request] + max(self._decode_steps[request], 1) - 1
            count += 1
        if self._entry is not None or peaks <= self._capacity:
            return count
        if not count or self._is_blocked(requests[0], now):
            return 0
        # Often as many fit as at the last question, or one more.
        low, high, probe = 0, count, min(count, self._fitted + 1)
        while low < high:
            peak, at = self._peak(requests[:probe], now)
            if peak <= self._capacity:
                low = probe
            else:
                high = probe - 1
                if probe == 1:
                    first = requests[0]
                    self._blocked[first] = at, peak - self._start[first] - (at - now)
            probe = low + 1 if low == self._fitted else (low + high + 1) // 2
        self._fitted = low
        return low

    def _is_blocked(self, request: int, now: int) -> bool:
        """Return whether running requests still block this one."""
        at, blockers = self._blocked.get(request, (-1, 0))
        assert self._capacity is not None
        return now <= at and blockers + self._start[request] + at - now > self._capacity

    def _peak(self, requests: list[int], now: int) -> tuple[int, int]:
        """Return the peak of KV tokens, and its decode step."""
        if self._arrays is None:
            self._arrays = np.array(self._last, dtype=np.int64), np.array(self._offset, dtype=np.int64)
        new = [i for i in requests if self._decode_steps[i] > 0]
        last = np.concatenate((self._arrays[0], [now + self._decode_steps[i] - 1 for i in new]))
        offset = np.concatenate((self._arrays[1], [self._start[i] - now for i in new]))
        if not len(last):
            return 0, now
        latest_first = np.argsort(-last)
        last = last[latest_first]
        held_then = np.cumsum(offset[latest_first]) + np.arange(1, len(last) + 1) * last
        worst = int(held_then.argmax())
        return int(held_then[worst]), int(last[worst])

    def enter(self, requests: list[int], now: int) -> None:
        """Record that some requests run from a decode step on."""
        self._arrays = None
        for request in requests:
            last, offset = now + self._decode_steps[request] - 1, self._start[request] - now
            place = bisect(self._last, last)
            self._last.insert(place, last)
            self._offset.insert(place, offset)
            self._offsets += offset
            self._peaks += offset + last

    def leave(self, now: int) -> None:
        while self._last and self._last[0] < now:
            self._arrays = None
            last, offset = self._last.pop(0), self._offset.pop(0)
            self._offsets -= offset
            self._peaks -= offset + last


class _Run:
    """Run of a policy: time, running requests and cost."""

    def __init__(self, problem: Problem, policy: QueuePolicy) -> None:
        self._problem, self._rule = problem, policy.rule
        self._queue, self._room = _lists(policy.queue), _Room(problem, policy.admission)
        self._decode_steps, self._prompt = problem.decode_steps.tolist(), problem.prompt_tokens.tolist()
        self._free = list(range(problem.slots))
        self._finishing: list[tuple[int, int]] = []
        self._now, self._prefill, self._waiting = 0, 0.0, len(problem)
        self._bin_of, self._starts = [0] * len(problem), list[int]()
        cost = problem.cost
        self._work, self._tokens = int(problem.decode_steps.sum()), problem.kv_token_steps
        self._left = self._work
        self._own: list[int] = problem.own_tokens.tolist()
        self._prompts: int = sum(self._own)
        self._reads = cost.decode_per_slot * self._work + cost.decode_per_kv_token * self._tokens

    def schedule(self, least: float, late: Callable[[], bool]) -> Schedule | None:
        """Return the schedule, or None as :func:`known_schedule`."""
        idle, wait = 0, 0
        while self._waiting:
            requests, slots, full = list[int](), list[int](), False
            if self._free:
                requests, slots = self._queue.propose(self._free)
                count, full = self._room.fitting(requests, self._now)
                requests, slots = requests[:count], slots[:count]
            wait = self._wait(requests, idle, full) if requests else -1
            if wait == 0:
                idle = 0
                self._start(requests, slots)
                if self._least() >= least or (len(self._starts) % ASKED_EVERY == 0 and late()):
                    return None
            else:
                before = self._now
                if not self._decode(wait):
                    return None
                idle += len(requests) * (self._now - before)
        while self._finishing:
            if not self._decode(-1):
                return None
        if self._least() >= least:
            return None
        decode_steps = np.diff(np.array([*self._starts, self._now], dtype=np.int64))
        schedule = Schedule.from_bins(self._problem, self._bin_of, decode_steps)
        # What requests share is not counted on the way.
        shares = self._problem.shares_prompts
        return None if shares and schedule.makespan(self._problem) >= least else schedule

    def _wait(self, requests: list[int], idle: int, full: bool) -> int:
        """Return the decode steps until the rule starts a stage."""
        if len(self._free) == self._problem.slots:
            return 0
        tokens = sum([self._prompt[request] for request in requests])
        decoded, running = self._left - self._work, len(self._finishing)
        pace = (len(self._decode_steps) - self._waiting - running) / self._now if self._now else 0.0
        stage = Opportunity(len(requests), tokens, self._waiting, idle, full, decoded, running, pace)
        return max(0, self._rule(self._problem, stage))

    def _start(self, requests: list[int], slots: list[int]) -> None:
        mine, last, self._left = 0, len(self._starts), self._work
        taken = []
        for request, slot in zip(requests, slots, strict=True):
            self._bin_of[request] = last
            mine += self._own[request]
            if self._decode_steps[request] > 0:
                taken.append(request)
                self._free.remove(slot)
                heapq.heappush(self._finishing, (self._now + self._decode_steps[request], slot))
        self._starts.append(self._now)
        self._queue.take(requests)
        self._room.enter(taken, self._now)
        self._waiting -= len(requests)
        self._prompts -= mine
        self._prefill += self._problem.cost.prefill_seconds(mine)

    def _decode(self, most: int) -> bool:
        """Decode to the next end; return whether memory has room."""
        decode_steps = self._finishing[0][0] - self._now
        decode_steps = decode_steps if most < 0 else min(decode_steps, most)
        if self._room.overflows(self._now, decode_steps) and len(self._finishing) > 1:
            return False
        active, kv_tokens = len(self._finishing), self._room.held(self._now)
        self._work -= active * decode_steps
        self._tokens -= decode_steps * kv_tokens + active * (decode_steps * (decode_steps - 1) // 2)
        self._now += decode_steps
        while self._finishing and self._finishing[0][0] <= self._now:
            insort(self._free, heapq.heappop(self._finishing)[1])
        self._room.leave(self._now)
        return True

    def _least(self) -> float:
        """Return the least seconds left, with slots and memory full."""
        problem, cost = self._problem, self._problem.cost
        seconds_left = self._work / problem.slots
        if problem.kv_capacity is not None:
            seconds_left = max(seconds_left, self._tokens / problem.kv_capacity)
        if self._finishing:
            seconds_left = max(seconds_left, max(self._finishing)[0] - self._now if not self._waiting else 0)
        stages = -(-self._waiting // problem.slots)
        rest: float = cost.prefill_base * stages + cost.prefill_per_token * self._prompts
        return self._prefill + rest + cost.decode_base * (self._now + seconds_left) + self._reads

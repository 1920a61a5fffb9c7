"""Given the steps at which prefill stages happen, requests between them that a KV capacity has room for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ....data.problem import Problem
from ....data.schedule import Schedule
from ....models.programme import Programme
from ..backward import schedule_backwards
from .rounding import HeldTokens, round_flow, shift_times
from .slot_flow import LengthProfile, Spans

SPARE = 0.5
"""Share of what memory has room for beyond the average that a flow leaves: single requests hold more."""

MOST_SPANS = 1800
"""Spans beyond which a flow takes too long."""

SPLITS = 6
"""Times that stages are added where memory is short, each halfway to the one before."""

NEAR = 1e-3
"""Share beyond what a flow may fill that counts as none."""

FILLED = 0.985
"""Share of the capacity that slots made whole may fill at no cost."""

WALKS = 4
"""Times that requests change places from the same beginning, until memory suffices."""

SHORT = 1e3
"""Slot-rounds that a hundredth of the capacity beyond it is worth."""

FAILURES = 200
"""Requests in a row that no exchange helps, after which no further one is tried."""

TRIED = 12
"""Requests that are tried for an exchange with one."""


def served_within_memory(
    problem: Problem, times: IntArray, seconds: float, rng: np.random.Generator
) -> Schedule | None:
    """
    Return a schedule with stages near these times, or None if slots are too few or no flow is found.

    The flow of slots between stages that holds slots for the fewest steps has a further row for each stage:
    what its spans hold right before, with the tokens that requests of a length hold at first as a straight
    line in the length, must fit the capacity, or costs. Where memory is then still short, as single requests
    hold more, they change places with others of a like length that hold less.

    problem: One whose memory can run out.
    times: The decode steps of the stages and the end, not decreasing, shape (stages + 1,).
    seconds: Time allowed.
    rng: Draws what is tried for an exchange.
    Returns: It may break the KV capacity or the token cap.
    """
    running = np.flatnonzero(problem.decode_steps > 0)
    decode_steps, first = problem.decode_steps[running], problem.kv_at_start[running]
    capacity = problem.kv_capacity
    assert capacity is not None
    spare = SPARE * max(0.0, capacity - problem.kv_token_steps / float(times[-1]))
    flow = _Flow.fitting(times, decode_steps, first, problem.slots, int(capacity - spare), seconds)
    if flow is None:
        return None
    profile, spans, times = flow.profile, flow.spans, flow.times
    held = replace(flow.held, capacity=int(FILLED * capacity))
    used = round_flow(spans, profile, problem.slots, len(times) - 1, flow.slots, seconds, held)
    if used is None:
        return None
    times, spans = shift_times(times, spans, used, profile)
    span = spans.of_requests(used, decode_steps)
    start, room = times[spans.first[span]], spans.decode_steps[span]
    best = _Exchanges(start, room, decode_steps, first, capacity)
    for _ in range(WALKS):
        walk = _Exchanges(start, room, decode_steps, first, capacity)
        walk.run(rng)
        best = min(best, walk, key=lambda each: each.short)
        if not best.short:
            break
    return schedule_backwards(problem, running, int(times[-1]) - best.start)


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """
    Slots between stages, in fractions.

    times: The decode steps of the stages and the end, shape (stages + 1,).
    spans: The spans between two of the times.
    held: What they hold, and what they may.
    slots: The slots in each span, shape (spans,).
    """

    times: IntArray
    profile: LengthProfile
    spans: Spans
    held: HeldTokens
    slots: FloatArray

    @classmethod
    def fitting(
        cls,
        times: IntArray,
        decode_steps: IntArray,
        first: IntArray,
        slots: int,
        capacity: int,
        seconds: float,
    ) -> _Flow | None:
        """
        Return a flow that fits the capacity, or nearly; stages are added where it would not.

        A long time without a stage leaves no choice of what memory holds at its end.
        """
        profile = LengthProfile.of(decode_steps)
        splits = 0
        while True:
            if Spans.number_between(times, profile) > MOST_SPANS:
                return None
            spans = Spans.between(times, profile)
            if not spans.hold(profile):
                return None
            held = _held(spans, times, decode_steps, first, capacity)
            flow = _least_holding(spans, profile, slots, held, seconds)
            if flow is None:
                return None
            tokens = np.bincount(held.stage, flow[held.span] * held.tokens, len(times))
            full = tokens > (1.0 + NEAR) * capacity
            middle = np.setdiff1d((times[:-1] + times[1:])[full[1:]] // 2, times)
            if splits == SPLITS or not len(middle):
                return cls(times, profile, spans, held, flow)
            times, splits = np.union1d(times, middle), splits + 1


def _held(
    spans: Spans, times: IntArray, decode_steps: IntArray, first: IntArray, capacity: int
) -> HeldTokens:
    """Return what the spans hold right before each stage and the end, if each is filled."""
    slope, base = (
        np.polyfit(decode_steps, first, 1) if len(np.unique(decode_steps)) > 1 else (0.0, first.mean())
    )
    at_first = np.maximum(1.0, base + slope * spans.decode_steps)
    count = spans.last - spans.first
    span = np.repeat(np.arange(len(spans)), count)
    stage = np.arange(len(span)) - np.repeat(np.cumsum(count) - count, count) + spans.first[span] + 1
    age = times[stage] - times[spans.first[span]]
    runs = age <= spans.decode_steps[span]
    span, stage, age = span[runs], stage[runs], age[runs]
    order = np.argsort(stage, kind="stable")
    tokens = np.rint(at_first[span] + age - 1).astype(np.int64)
    return HeldTokens(capacity, stage[order], span[order], tokens[order])


def _least_holding(
    spans: Spans, profile: LengthProfile, slots: int, held: HeldTokens, seconds: float
) -> FloatArray | None:
    """Return the flow of fewest slot-steps, in fractions, with memory short of little, shape (spans,)."""
    rank, at_least = spans.demand(profile)
    stages, ranks = int(spans.last.max()), len(at_least)
    longer = len(spans) + stages + np.arange(ranks)
    beyond = len(spans) + stages + ranks + np.arange(stages)
    rows = stages + 1 + ranks
    # Rows: those of the flow; tokens held before each stage.
    entries = [
        *spans.flow(rank, stages, ranks),
        (rows + held.stage - 1, held.span, held.tokens),
        (rows + np.arange(stages), beyond, -held.capacity / 100.0),
    ]
    low = np.zeros(rows + stages)
    low[0], low[stages] = slots, -slots
    high = low.copy()
    low[rows:], high[rows:] = -np.inf, held.capacity
    lower = np.zeros(rows + stages - 1 + len(spans))
    lower[longer] = at_least
    cost = np.zeros(len(lower))
    cost[: len(spans)], cost[beyond] = spans.decode_steps, SHORT
    found = Programme.of(cost, entries, low, high, lower).solved(seconds, interior=True)
    return None if found is None else found.x[: len(spans)]


class _Exchanges:
    """
    Two requests at a time that change places, as long as memory is short of fewer tokens then.

    start, room: The decode step before which each request starts, and the rounds it has a slot for, shape
        (requests,).
    decode_steps, first: What each needs, and the tokens it holds in its first one, shape (requests,).
    capacity: Tokens there is room for.
    """

    def __init__(
        self, start: IntArray, room: IntArray, decode_steps: IntArray, first: IntArray, capacity: int
    ) -> None:
        self.start, self._room = start.copy(), room.copy()
        self._decode_steps, self._first, self._capacity = decode_steps, first, capacity
        self._held = np.zeros(int((start + np.maximum(room, decode_steps)).max()), dtype=np.int64)
        for request in range(len(start)):
            self._add(request, 1)

    @property
    def short(self) -> int:
        """Tokens that memory is short of, summed over the decode steps."""
        return int(np.maximum(self._held - self._capacity, 0).sum())

    def run(self, rng: np.random.Generator) -> None:
        """Exchange until memory suffices, or many in a row that run when it does not find no other."""
        start, decode_steps, room, first = self.start, self._decode_steps, self._room, self._first
        failures = 0
        while failures < FAILURES and (over := np.flatnonzero(self._held > self._capacity)).size:
            short = int(rng.choice(over))
            runs = (start <= short) & (short < start + decode_steps)
            one = int(rng.choice(np.flatnonzero(runs)))
            fits = ~runs & (first < first[one]) & (decode_steps <= room[one]) & (decode_steps[one] <= room)
            others = rng.permutation(np.flatnonzero(fits))[:TRIED].tolist()
            failures = 0 if any(self._improved(one, other) for other in others) else failures + 1

    def _improved(self, one: int, other: int) -> bool:
        """Exchange two requests, or leave them if memory is short of no fewer tokens then."""
        begins, ends = self.start[[one, other]], (self.start + self._room)[[one, other]]
        here = slice(int(begins.min()), int(ends.max()))
        before = self._held[here].copy()
        self._add(one, -1)
        self._add(other, -1)
        self._swap(self.start, one, other)
        self._add(one, 1)
        self._add(other, 1)
        after = np.maximum(self._held[here] - self._capacity, 0).sum()
        if after < np.maximum(before - self._capacity, 0).sum():
            self._swap(self._room, one, other)
            return True
        self._swap(self.start, one, other)
        self._held[here] = before
        return False

    def _add(self, request: int, sign: int) -> None:
        here = slice(self.start[request], self.start[request] + self._decode_steps[request])
        self._held[here] += sign * (self._first[request] + np.arange(self._decode_steps[request]))

    @staticmethod
    def _swap(values: IntArray, one: int, other: int) -> None:
        values[[one, other]] = values[[other, one]]

"""Schedules built from their end, for scarce KV memory.

Seen from its last step back to its first, a request frees a token each step. So a request that fits once
fits from there on, and memory can stay almost full. A forward construction must keep room for growth.
Requests that run back to the same decode step share a prefill stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.bounds.least_counts import least_counts

NEAREST = 4
"""Longest fitting requests to compare for each prefill stage."""

WEIGHT, WEIGHT_OF_SLOTS = 3.0, 10.0
"""Further steps of full memory that the first request may waste; second for scarcer slots.
"""


def slots_are_scarcer(problem: Problem) -> bool:
    """Return whether full slots would hold less than the KV capacity."""
    assert problem.kv_capacity is not None
    slot_steps = int(problem.decode_steps.sum())
    return problem.kv_token_steps * problem.slots < slot_steps * problem.kv_capacity


def schedule_backwards(problem: Problem, running: IntArray, back: IntArray) -> Schedule:
    """Return the schedule with some requests' distances from the end.

    The requests without decode steps fill stages behind them.

    running: Requests that take a decode step at least, shape (running,).
    back: Decode steps from the start of each to the end of the job, shape (running,).
    """
    start = int(back.max()) - back
    times, stage = np.unique(start, return_inverse=True)
    end = int((start + problem.decode_steps[running]).max())
    bin_of = np.empty(len(problem), dtype=np.int64)
    bin_of[running] = stage
    rest = np.flatnonzero(problem.decode_steps == 0)
    last = _stages_of(problem, rest)
    bin_of[rest] = len(times) + last
    bursts = np.zeros(len(times) + int(last.max(initial=-1)) + 1, dtype=np.int64)
    bursts[: len(times)] = np.diff(np.append(times, end))
    return Schedule.from_bins(problem, bin_of, bursts)


def backward_schedule(problem: Problem, late: Callable[[], bool] = lambda: False) -> Schedule | None:
    """Return the schedule built backward; None if late."""
    running = np.flatnonzero(problem.decode_steps > 0)
    if not len(running):
        return None
    decode_steps, peak = problem.decode_steps[running], problem.kv_peak[running]
    keys = WEIGHT * (decode_steps / decode_steps.max() + peak / peak.max())
    if slots_are_scarcer(problem):
        keys = WEIGHT_OF_SLOTS * (decode_steps / decode_steps.max())
    back = _Construction(problem, running, keys, least_counts(problem).decode_steps).ends(1.0, late)
    return None if back is None else schedule_backwards(problem, running, back)


def _stages_of(problem: Problem, requests: IntArray) -> IntArray:
    """Pack requests without decode steps into full stages."""
    caps = [cap for cap in (problem.prefill_token_cap, problem.kv_capacity) if cap is not None]
    largest = min(caps, default=int(problem.prompt_tokens.sum()))
    stages, stage, count, tokens = [], 0, 0, 0
    for prompt in problem.prompt_tokens[requests].tolist():
        if count == problem.slots or tokens + prompt > largest:
            stage, count, tokens = stage + 1, 0, 0
        count, tokens = count + 1, tokens + prompt
        stages.append(stage)
    return np.array(stages, dtype=np.int64)


class _Construction:
    """One construction, in decode steps counted back from the end.

    requests: Requests to serve, each of a decode step at least.
    keys: Waste, in decode steps of full memory, that is subtracted for each when the least waste is chosen;
        larger is placed sooner, shape (requests,).
    end: Planned decode steps: requests that would need more if they began any later go first.
    """

    def __init__(self, problem: Problem, requests: IntArray, keys: FloatArray, end: int) -> None:
        assert problem.kv_capacity is not None
        self._problem, self._capacity, self._aim = problem, problem.kv_capacity, max(1, end)
        decode_steps, peak = problem.decode_steps[requests], problem.kv_peak[requests]
        order = np.argsort(decode_steps, kind="stable")
        self._left = len(order)
        self._whole = np.stack((decode_steps, peak, np.arange(len(order)), problem.prompt_tokens[requests]))[
            :, order
        ]
        share = np.maximum(peak / self._capacity, 1.0 / problem.slots)
        self._real = np.stack((keys, share))[:, order]
        self._gone = (peak - decode_steps).tolist()
        self._cap = problem.prefill_token_cap
        self._now = self._held = self._active = 0
        self._free = problem.slots
        self._coming: list[tuple[int, int]] = []
        """Decode steps in which a request is through, and the request, or begins to run: -1."""
        self._stages = np.array([self._aim])
        self._tokens: dict[int, int] = {}

    def ends(self, stage_price: float, late: Callable[[], bool]) -> IntArray | None:
        """Return each request's stage, in steps from the end, shape (requests,).

        stage_price: Price of one more stage, as a multiple of its cost.
        late: Returns True if no time is left; then None is returned.
        """
        cost = self._problem.cost
        price = stage_price * max(cost.prefill_base, cost.prefill_floor) / max(cost.decode_base, 1e-12)
        ends = np.empty(self._left, dtype=np.int64)
        while self._left:
            shortest = int(self._whole[1, : self._left].min())
            while self._free and self._left and self._held + shortest <= self._capacity:
                if late():
                    return None
                place, end = self._next(price)
                decode_steps, peak, request, prompt = self._whole[:, place].tolist()
                ends[request] = end
                self._tokens[end] = self._tokens.get(end, 0) + prompt
                self._begin(request, end, decode_steps, peak)
                self._drop(place)
                if peak == shortest and self._left:
                    shortest = int(self._whole[1, : self._left].min())
            self._go_back(shortest)
        return ends

    def _next(self, price: float) -> tuple[int, int]:
        count, room = self._left, self._capacity - self._held
        decode_steps, peak, _, prompt = self._whole[:, :count]
        keys, share = self._real[:, :count]
        fits = np.flatnonzero(peak <= room)
        urgent = int(fits[-1])
        if self._now + int(decode_steps[urgent]) >= self._aim:
            return urgent, self._stage_at(self._now + int(decode_steps[urgent]), int(prompt[urgent]))
        span = self._stages - self._now
        place = np.searchsorted(decode_steps, span, side="right")[:, None] - 1 - np.arange(NEAREST)
        there = place >= 0
        place = np.where(there, place, 0)
        there &= peak[place] <= room
        if self._cap is not None:
            taken = np.array([self._tokens.get(at, 0) for at in self._stages.tolist()])
            there &= taken[:, None] + prompt[place] <= self._cap
        waste = np.where(there, (span[:, None] - decode_steps[place]) * share[place] - keys[place], np.inf)
        best = int(waste.argmin())
        first = int(fits[keys[fits].argmax()])
        if price - keys[first] < waste.flat[best]:
            return first, self._stage_at(self._now + int(decode_steps[first]), int(prompt[first]))
        return int(place.flat[best]), int(self._stages[best // NEAREST])

    def _stage_at(self, step: int, prompt: int) -> int:
        """Return the first stage from a step on with room."""
        while self._cap is not None and self._tokens.get(step, 0) + prompt > self._cap:
            step += 1
        at = int(np.searchsorted(self._stages, step))
        if at == len(self._stages) or self._stages[at] != step:
            self._stages = np.insert(self._stages, at, step)
        return step

    def _begin(self, request: int, end: int, decode_steps: int, peak: int) -> None:
        """Take a slot and memory for a request from now on."""
        heapq.heappush(self._coming, (end, request))
        self._held += peak
        self._free -= 1
        if end - decode_steps <= self._now:
            self._active += 1
        else:
            heapq.heappush(self._coming, (end - decode_steps, -1))

    def _drop(self, place: int) -> None:
        for columns in (self._whole, self._real):
            columns[:, place : self._left - 1] = columns[:, place + 1 : self._left]
        self._left -= 1

    def _go_back(self, least: int) -> None:
        """Go back to the next step with an end or with room."""
        then = self._coming[0][0]
        lacking = self._held + least - self._capacity
        if self._free and self._left and lacking > 0 and self._active:
            then = min(then, self._now - -lacking // self._active)
        self._held -= self._active * (then - self._now)
        self._now = then
        while self._coming and self._coming[0][0] <= then:
            _, request = heapq.heappop(self._coming)
            if request < 0:
                self._active += 1
            else:
                self._held -= self._gone[request]
                self._active -= 1
                self._free += 1
        self._stages = self._stages[self._stages > then]
        if not len(self._stages):
            self._stages = np.array([max(self._aim, then + 1)])

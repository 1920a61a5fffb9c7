"""
Schedules built from their end, where KV memory is scarce: backwards, what a request holds only shrinks.

From its last step back to its first a request frees a token each step, so that one which fits now fits on.
Memory stays full up to the smallest request that waits, where a construction forwards has to keep room for
what grows. Requests that run back to the same decode step share a prefill stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.bounds.least_counts import least_counts

NEAREST = 4
"""Requests looked at for each prefill stage that there is: the longest ones that fit before it."""

FIRST = ((3.0, 1.0, 1.0), (3.0, 1.0, 0.0), (1.0, 1.0, 1.0), (3.0, 0.5, 1.0), (1.0, 1.0, 0.0), (8.0, 1.0, 1.0))
"""Settings tried first: weight, and shares in it of length and of memory."""

FIRST_OF_SLOTS = (10.0, 1.0, 0.0)
"""The very first where slots are scarcer than memory."""

STEP, END_STEP, STAGE_STEP = 0.3, 0.005, 0.3
"""How far a change moves the shares, the end aimed at and the price of a stage."""


@dataclass(frozen=True, slots=True, eq=False)
class _Settings:
    """
    What decides a construction.

    weight: Decode steps of full memory that the first of all requests may waste more than the last.
    shares: Of length, memory at the end and prompt in a request's rank, shape (3,).
    noise: Added to the rank, in decode steps, shape (requests,).
    end: Decode steps aimed at, in the fewest there could be.
    stage: Price of a stage, in times of its own.
    """

    weight: float
    shares: FloatArray
    noise: FloatArray
    end: float
    stage: float

    def changed(self, rng: np.random.Generator) -> _Settings:
        """Return them with a few changed a little."""
        kind, changed = rng.random(), self
        if kind < 0.5:
            weight = self.weight * float(np.exp(STEP * rng.normal()))
            end = max(0.9, self.end + END_STEP * rng.normal())
            stage = self.stage * float(np.exp(STAGE_STEP * rng.normal()))
            changed = _Settings(weight, self.shares + STEP * rng.normal(size=3), self.noise, end, stage)
        if kind > 0.3:
            count = len(self.noise)
            touched = rng.random(count) < rng.choice([2 / count, 0.05, 0.3, 1.0])
            by = rng.choice([0.1, 0.3, 1.0]) * rng.normal(size=count)
            changed = replace(changed, noise=np.where(touched, self.noise + by, self.noise))
        return changed


class BackwardSearch:
    """
    Searches the settings of backward constructions by random changes.

    problem: The problem scheduled, with a KV capacity; requests of no decode step go last.
    rng: Draws the changes.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self._problem, self._rng = problem, rng
        self._running = np.flatnonzero(problem.decode_steps > 0)
        decode_steps, peak = problem.decode_steps[self._running], problem.kv_peak[self._running]
        prompts = problem.prompt_tokens[self._running]
        self._rank = np.stack((decode_steps / decode_steps.max(), peak / peak.max(), prompts / peak.max()))
        self._fewest = least_counts(problem).decode_steps
        nothing = np.zeros(len(decode_steps))
        first = (FIRST_OF_SLOTS, *FIRST) if slots_are_scarcer(problem) else FIRST
        self._first = [
            _Settings(weight, np.array([*shares, 0.0]), nothing, 1.0, 1.0) for weight, *shares in first
        ]
        self._best, self._least, self._steps = self._first[0], np.inf, 0

    def step(self, late: Callable[[], bool] = lambda: False) -> Schedule | None:
        """Return the schedule of the next settings, or None once it is late, asked before each request."""
        begins = self._steps < len(self._first)
        settings = self._first[self._steps] if begins else self._best.changed(self._rng)
        self._steps += 1
        schedule = self._schedule(settings, late)
        if schedule is None:
            return None
        makespan = schedule.makespan(self._problem)
        if makespan <= self._least:
            self._best, self._least = settings, makespan
        return schedule

    def _schedule(self, settings: _Settings, late: Callable[[], bool]) -> Schedule | None:
        problem, running = self._problem, self._running
        keys = settings.weight * (settings.shares @ self._rank) + settings.noise
        construction = _Construction(problem, running, keys, round(settings.end * self._fewest))
        back = construction.ends(settings.stage, late)
        return None if back is None else schedule_backwards(problem, running, back)


def slots_are_scarcer(problem: Problem) -> bool:
    """Return whether slots that are never free would hold less than the KV capacity on average."""
    assert problem.kv_capacity is not None
    slot_steps = int(problem.decode_steps.sum())
    return problem.kv_token_steps * problem.slots < slot_steps * problem.kv_capacity


def schedule_backwards(problem: Problem, running: IntArray, back: IntArray) -> Schedule:
    """
    Return the schedule in which requests start some steps before the end, all others in stages behind them.

    running: The requests that take a decode step at least, shape (running,).
    back: Decode steps from the start of each to the end of them all, counted back, shape (running,).
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


def backward_schedule(problem: Problem) -> Schedule | None:
    """Return the schedule of the settings that are mostly best, or None where no request takes a step."""
    if not (problem.decode_steps > 0).any():
        return None
    return BackwardSearch(problem, np.random.default_rng(0)).step()


def _stages_of(problem: Problem, requests: IntArray) -> IntArray:
    """Return stages of requests that take no decode step, in the order given, as full as the limits allow."""
    caps = [cap for cap in (problem.prefill_token_cap, problem.kv_capacity) if cap is not None]
    most = min(caps, default=int(problem.prompt_tokens.sum()))
    stages, stage, count, tokens = [], 0, 0, 0
    for prompt in problem.prompt_tokens[requests].tolist():
        if count == problem.slots or tokens + prompt > most:
            stage, count, tokens = stage + 1, 0, 0
        count, tokens = count + 1, tokens + prompt
        stages.append(stage)
    return np.array(stages, dtype=np.int64)


class _Construction:
    """
    One construction, in decode steps counted back from the end.

    requests: Those to serve, each of a decode step at least.
    keys: Decode steps of full memory that each may waste, to go before those that waste less, shape
        (requests,).
    end: Decode steps aimed at: requests that would need more if they began any later go first.
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
        """
        Return the decode step, counted back, in which each request's prefill stage comes, shape (requests,).

        stage_price: What a stage more costs, in times of its own cost.
        late: Whether there is no time left, asked before each request; then None is returned.
        """
        cost = self._problem.cost
        price = stage_price * max(cost.prefill_base, cost.prefill_floor) / max(cost.decode_base, 1e-12)
        ends = np.empty(self._left, dtype=np.int64)
        while self._left:
            least = int(self._whole[1, : self._left].min())
            while self._free and self._left and self._held + least <= self._capacity:
                if late():
                    return None
                place, end = self._next(price)
                decode_steps, peak, request, prompt = self._whole[:, place].tolist()
                ends[request] = end
                self._tokens[end] = self._tokens.get(end, 0) + prompt
                self._begin(request, end, decode_steps, peak)
                self._drop(place)
                if peak == least and self._left:
                    least = int(self._whole[1, : self._left].min())
            self._go_back(least)
        return ends

    def _next(self, price: float) -> tuple[int, int]:
        """Return the place of the request that goes next, and when its stage comes, counted back."""
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
        """Return the first decode step from this one on whose stage has room for a prompt, as a stage."""
        while self._cap is not None and self._tokens.get(step, 0) + prompt > self._cap:
            step += 1
        at = int(np.searchsorted(self._stages, step))
        if at == len(self._stages) or self._stages[at] != step:
            self._stages = np.insert(self._stages, at, step)
        return step

    def _begin(self, request: int, end: int, decode_steps: int, peak: int) -> None:
        """Take a slot and memory for a request from now on, though it may run only a little later."""
        heapq.heappush(self._coming, (end, request))
        self._held += peak
        self._free -= 1
        if end - decode_steps <= self._now:
            self._active += 1
        else:
            heapq.heappush(self._coming, (end - decode_steps, -1))

    def _drop(self, place: int) -> None:
        """Take a request out of those that wait."""
        for columns in (self._whole, self._real):
            columns[:, place : self._left - 1] = columns[:, place + 1 : self._left]
        self._left -= 1

    def _go_back(self, least: int) -> None:
        """Go back to the next step in which something ends, or the smallest request that waits may fit."""
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

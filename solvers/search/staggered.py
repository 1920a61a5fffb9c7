"""Staggered starts of requests of equal length, for scarce KV memory.

Requests that begin together end together, and hold most at the end. If one stage starts fewer requests than
memory holds at first, it ends before the next ones are large. So the sizes of the stages make the schedule:
each stage starts as soon as memory and slots allow, and a search changes the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from .incumbent import Budget, SearchRun
from .params import SearchParams

MOST_STAGES = 2_000
"""Stages beyond which staggered starts are not tried: they rarely pay for so many."""

SIZES = 400
"""Sizes of stages that are tried, if requests are more."""

MOVES = 200
"""Changes of the sizes in one step of the search."""

WARMTH = 0.003
"""Share of the makespan that a change may cost at first."""


def are_equally_long(problem: Problem) -> bool:
    """Return whether memory is scarce, and all requests take as many decode steps."""
    steps = problem.decode_steps
    return problem.memory_can_run_out and bool(steps[0] > 0) and bool((steps == steps[0]).all())


class StaggeredStages:
    """Schedules of requests of equal length by the sizes of their stages.

    The requests go longest prompt first.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.kv_capacity is not None
        self._problem, self._capacity = problem, problem.kv_capacity
        self._order: IntArray = np.argsort(-problem.prompt_tokens, kind="stable")
        self._length = int(problem.decode_steps[0])
        self._held = [0, *accumulate(problem.kv_at_start[self._order].tolist())]
        self._prompts = np.append(0, np.cumsum(problem.prompt_tokens[self._order]))
        cap = problem.prefill_token_cap
        self._cap = math.inf if cap is None else cap

    def uniform(self) -> Iterator[tuple[int, ...]]:
        """Yield the sizes of stages of one size each, then with a smaller first one."""
        count = len(self._problem)
        few = range(1, min(self._problem.slots, count) + 1)
        sizes = few if len(few) <= SIZES else np.unique(np.geomspace(1, few[-1], SIZES).astype(int)).tolist()
        for size in reversed(sizes):
            whole, rest = divmod(count, size)
            if whole < MOST_STAGES:
                yield (size,) * whole + ((rest,) if rest else ())
                if rest and whole:
                    yield (rest,) + (size,) * whole
        for first in sizes:
            if first < count - first <= self._problem.slots:
                yield first, count - first

    def starts(self, sizes: Sequence[int]) -> list[int] | None:
        """Return the decode step in which each stage starts; None if one never fits."""
        length, capacity, slots = self._length, self._capacity, self._problem.slots
        starts: list[int] = []
        ends = list(accumulate(sizes))
        oldest = 0
        for k, size in enumerate(sizes):
            low, high = ends[k] - size, ends[k]
            kv_tokens = self._held[high] - self._held[low]
            if size > slots or kv_tokens + size * (length - 1) > capacity:
                return None
            if self._prompts[high] - self._prompts[low] > self._cap:
                return None
            at = starts[-1] if starts else 0
            while oldest < k and starts[oldest] + length <= at:
                oldest += 1
            number = weighted = 0
            for i in range(k - 1, oldest - 1, -1):
                number, weighted = number + sizes[i], weighted + sizes[i] * starts[i]
                # The step in which stage i holds most, with all that started since and run by then.
                last = starts[i] + length - 1
                kv_of_others = self._held[low] - self._held[low - number] + number * last - weighted
                # Until that step, each request of the new stage may draw so many tokens.
                soonest = last - (capacity - kv_of_others - kv_tokens) // size
                at = max(at, min(last + 1, soonest))
                if number + size > slots:
                    at = max(at, last + 1)
            starts.append(at)
        return starts

    def seconds(self, sizes: Sequence[int], starts: Sequence[int]) -> float:
        """Return the seconds of stages and decode steps, up to what all schedules share."""
        cost, ends = self._problem.cost, [0, *accumulate(sizes)]
        tokens = np.diff(self._prompts[ends])
        if math.isinf(self._cap):
            tokens = np.add.reduceat(tokens, np.flatnonzero(np.diff([-1, *starts])))
        prefill = float(np.sum(cost.prefill_seconds(tokens)))
        return prefill + cost.decode_base * (starts[-1] + self._length)

    def schedule(self, sizes: Sequence[int], starts: Sequence[int]) -> Schedule:
        """Return the schedule of some stages."""
        times, stage = np.unique(starts, return_inverse=True)
        if not math.isinf(self._cap):
            times, stage = np.array(starts), np.arange(len(starts))
        bin_of = np.empty(len(self._problem), dtype=np.int64)
        bin_of[self._order] = np.repeat(stage, sizes)
        end = starts[-1] + self._length
        return Schedule.from_bins(self._problem, bin_of, np.diff(np.append(times, end)))


def staggered_schedule(problem: Problem) -> Schedule | None:
    """Return the best schedule of stages of equal size, each as soon as it fits."""
    if not are_equally_long(problem):
        return None
    stages = StaggeredStages(problem)
    best = _best(stages, stages.uniform())
    return None if best is None else stages.schedule(*best[1:])


def _best(
    stages: StaggeredStages, all_sizes: Iterator[tuple[int, ...]]
) -> tuple[float, Sequence[int], list[int]] | None:
    best: tuple[float, Sequence[int], list[int]] | None = None
    for sizes in all_sizes:
        starts = stages.starts(sizes)
        if starts is not None:
            seconds = stages.seconds(sizes, starts)
            if best is None or seconds < best[0]:
                best = seconds, sizes, starts
    return best


def staggers(problem: Problem, _: SearchParams) -> bool:
    """Return whether the sizes of staggered stages are searched."""
    return are_equally_long(problem)


def anneal_stage_sizes(run: SearchRun, budget: Budget) -> None:
    """Change the sizes of staggered stages, and keep the best."""
    stages, rng = StaggeredStages(run.problem), run.rng
    best = _best(stages, stages.uniform())
    if best is None:
        return
    now = best
    while not budget.over and len(best[1]) <= MOST_STAGES:
        run.best.steps += 1
        warmth = WARMTH * max(0.0, 1.0 - budget.done) if math.isfinite(budget.done) else 0.0
        for draw in rng.random(MOVES):
            sizes = _changed(list(now[1]), rng)
            starts = stages.starts(sizes)
            if starts is None:
                continue
            seconds = stages.seconds(sizes, starts)
            if seconds <= now[0] - warmth * best[0] * math.log(max(draw, 1e-300)):
                now = seconds, sizes, starts
            if seconds < best[0]:
                best = seconds, sizes, starts
        if budget.left <= run.best.offer_seconds:
            break
    run.best.offer(stages.schedule(*best[1:]))


def _changed(sizes: list[int], rng: np.random.Generator) -> list[int]:
    """Return the sizes after requests move between stages, or a stage splits, joins or swaps."""
    kind, i = rng.random(), int(rng.integers(len(sizes)))
    if kind < 0.1 and sizes[i] > 1:
        part = int(rng.integers(1, sizes[i]))
        return [*sizes[:i], part, sizes[i] - part, *sizes[i + 1 :]]
    if kind < 0.2 and i:
        return [*sizes[: i - 1], sizes[i - 1] + sizes[i], *sizes[i + 1 :]]
    j = int(rng.integers(len(sizes)))
    if kind < 0.3:
        sizes[i], sizes[j] = sizes[j], sizes[i]
        return sizes
    moved = min(sizes[i], int(rng.geometric(0.3)))
    sizes[i] -= moved
    sizes[j] += moved
    return [size for size in sizes if size]

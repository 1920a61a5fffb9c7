"""Requests of equal length under scarce KV memory, in stages of chosen sizes."""

from __future__ import annotations

import numpy as np
import pytest
from builders import mostly_slow, problem_of

from batchbound import Limits
from batchbound.data.arrays import IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.solvers.search.staggered import StaggeredStages, are_equally_long, staggered_schedule
from batchbound.solvers.solve import solve

COST = CostModel(0.1, 1e-5, 0.01, 1e-5)
HUNDRED = Problem(Workload.from_lengths([100] * 100, [100] * 100), COST, 100, kv_capacity=18_000)


def drawn(seed: int) -> Problem:
    """Return 5 to 120 equal requests whose memory holds 1 to all of them at first, and not all at the end."""
    rng = np.random.default_rng(seed)
    count, prompt, length = int(rng.integers(5, 121)), int(rng.integers(1, 300)), int(rng.integers(2, 200))
    slots = int(rng.integers(2, count + 1))
    largest = prompt + length
    capacity = int(rng.integers(largest, max(largest + 1, min(slots, count) * largest)))
    cost = CostModel(float(rng.choice([0.004, 0.1, 1.0])), 1e-5, 0.01, 1e-5)
    cap = int(rng.integers(prompt, count * prompt + 1)) if seed % 3 == 0 else None
    work = Workload.from_lengths([prompt] * count, [length] * count)
    return Problem(work, cost, slots, kv_capacity=capacity, prefill_token_cap=cap)


def best_staggered_start(problem: Problem) -> float:
    """Try every stage size; each stage starts in the first step from which its requests fit to their end.

    Memory and slots are summed up step by step.
    """
    held_by_one = problem.kv_at_start[0] + np.arange(problem.decode_steps[0])
    best = np.inf
    for size in range(1, problem.slots + 1):
        starts = started(problem, held_by_one, size)
        if starts is None:
            continue
        bin_of = np.repeat(np.arange(len(starts)), size)[: len(problem)]
        ends = np.append(starts, starts[-1] + len(held_by_one))
        schedule = Schedule.from_bins(problem, bin_of, np.diff(ends))
        if schedule.check(problem) is None:
            best = min(best, schedule.makespan(problem))
    return best


def started(problem: Problem, held_by_one: IntArray, size: int) -> list[int] | None:
    steps, stages = len(held_by_one), -(-len(problem) // size)
    assert problem.kv_capacity is not None
    held, busy = np.zeros((stages + 1) * steps, dtype=int), np.zeros((stages + 1) * steps, dtype=int)
    starts = [0]
    for stage in range(stages):
        number = min(size, len(problem) - stage * size)
        for at in range(starts[-1], starts[-1] + steps + 1):
            then = slice(at, at + steps)
            fits = (held[then] + number * held_by_one <= problem.kv_capacity).all()
            if fits and (busy[then] + number <= problem.slots).all():
                break
        else:
            return None
        held[then] += number * held_by_one
        busy[then] += number
        starts = [at] if stage == 0 else [*starts, at]
    return starts


def test_ten_of_a_hundred_requests_start_first_where_memory_holds_ninety_at_the_end() -> None:
    for limits in (Limits(work=4), Limits(seconds=0.3)):
        found = solve(HUNDRED, limits=limits)
        # Two stages, 122 decode steps, and what all schedules share.
        assert found.makespan == pytest.approx(2 * 0.1 + 1.22 + 0.1 + 0.1)


@pytest.mark.parametrize("seed", mostly_slow(range(24), fast=range(2)))
def test_no_plan_is_above_the_best_staggered_start(seed: int) -> None:
    problem = drawn(seed)
    found = solve(problem, limits=Limits(work=2))
    assert found.makespan is not None
    assert found.makespan <= best_staggered_start(problem) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_each_stage_starts_as_soon_as_it_fits(seed: int) -> None:
    problem = drawn(3 * seed + 1)
    held_by_one = problem.kv_at_start[0] + np.arange(problem.decode_steps[0])
    for size in range(1, problem.slots + 1):
        whole, rest = divmod(len(problem), size)
        sizes = (size,) * whole + ((rest,) if rest else ())
        assert StaggeredStages(problem).starts(sizes) == started(problem, held_by_one, size)


def test_prompts_of_different_lengths_are_staggered_too() -> None:
    problem = problem_of([9, 1, 5, 5], [6, 6, 6, 6], 4, kv_capacity=30)
    schedule = staggered_schedule(problem)
    assert schedule is not None
    assert schedule.check(problem) is None


def test_completions_of_different_lengths_are_left_to_others() -> None:
    problem = problem_of([5, 5, 5], [6, 6, 7], 3, kv_capacity=20)
    assert not are_equally_long(problem)
    assert staggered_schedule(problem) is None

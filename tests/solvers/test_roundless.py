"""Requests that take no decode step are put into the stages of the others; what is proven is the optimum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.solvers.exact.enumeration import best_by_enumeration
from batchbound.solvers.exact.roundless import best_around_roundless, can_leave_out_roundless
from batchbound.solvers.result import Limits, StoppedBy

Optimum = Callable[[Problem], float]


def problem_of(prompts: list[int], outputs: list[int], capacity: int, floor: float = 0.0) -> Problem:
    cost = CostModel(2.0, 0.1, 1.0, 0.0, prefill_floor=floor)
    return Problem(
        Workload.from_lengths(np.array(prompts), np.array(outputs)),
        cost,
        2,
        kv_capacity=capacity,
        prefill_emits_first_token=True,
    )


def one_by_one(problem: Problem) -> Schedule:
    return Schedule.from_bins(problem, np.arange(len(problem)), problem.rounds)


def test_one_that_takes_no_round_shares_a_stage_with_room_for_it() -> None:
    # The two others hold too much together, so each begins alone, and beside either there is room.
    problem = problem_of([4, 5, 3], [6, 6, 1], 11)
    found = best_around_roundless(problem, Limits(), one_by_one(problem))
    assert found.stopped_by is StoppedBy.PROOF
    assert found.schedule.prefill_stages() == 2
    assert found.schedule.makespan(problem) == pytest.approx(2 * 2.0 + 12 * 0.1 + 10)


def test_without_room_nothing_is_claimed_and_the_search_by_states_goes_on(optimal_makespan: Optimum) -> None:
    # The longest prompt holds all there is.
    problem = problem_of([4, 5, 11], [6, 6, 1], 11)
    found = best_around_roundless(problem, Limits(), one_by_one(problem))
    assert found.stopped_by is StoppedBy.GAVE_UP
    assert found.bound(problem) is None
    proven = best_by_enumeration(problem, Limits(), one_by_one(problem))
    assert (proven.stopped_by, proven.argument) == (StoppedBy.PROOF, "states")
    assert proven.schedule.makespan(problem) == pytest.approx(optimal_makespan(problem))


def test_where_prompts_are_shared_nothing_is_left_out() -> None:
    # Together the two that take no round cost one prompt of 9 tokens and not two, less than is counted.
    problem = problem_of([4, 5, 9, 9], [6, 6, 1, 1], 11)
    assert can_leave_out_roundless(problem)
    group = replace(problem.workload, group=np.array([-1, -1, 0, 0])).with_shared_prompts()
    assert not can_leave_out_roundless(replace(problem, workload=group))


def test_what_it_proves_is_the_optimum(optimal_makespan: Optimum) -> None:
    proven = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        prompts, outputs = rng.integers(1, 6, 4), rng.integers(1, 7, 4)
        outputs[rng.integers(4)] = 1
        capacity = int((prompts + outputs).max() + rng.integers(0, 6))
        problem = problem_of(prompts.tolist(), outputs.tolist(), capacity, float(rng.choice([0.0, 2.4])))
        if not can_leave_out_roundless(problem):
            continue
        found = best_around_roundless(problem, Limits(), one_by_one(problem))
        assert found.schedule.check(problem) is None, seed
        if found.stopped_by is StoppedBy.PROOF:
            assert found.schedule.makespan(problem) == pytest.approx(optimal_makespan(problem)), seed
            proven += 1
    assert proven >= 10

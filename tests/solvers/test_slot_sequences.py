"""Slots packed full, and requests exchanged and reordered until many of them start together."""

from __future__ import annotations

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.solvers.exact.small import solve_small
from batchbound.solvers.search.baselines import simulated_schedule
from batchbound.solvers.search.schedule_search import search_schedule
from batchbound.solvers.search.slot_sequences import SlotSequences, packing_pays

CHEAP_STAGES = CostModel(prefill_base=1.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)


def job(decode_steps: list[int], slots: int, cost: CostModel = CHEAP_STAGES) -> Problem:
    return Problem(
        Workload.from_lengths(np.ones(len(decode_steps), dtype=int), np.array(decode_steps)), cost, slots
    )


def best_of(problem: Problem, steps: int, seed: int = 0) -> float:
    walk = SlotSequences(problem, np.random.default_rng(seed), np.inf)
    best = np.inf
    for step in range(steps):
        schedule = walk.step(step / steps)
        if schedule is not None:
            assert schedule.check(problem) is None
            assert schedule.makespan(problem) < best
            best = schedule.makespan(problem)
    return best


def test_slots_are_filled_where_longest_first_leaves_one_short() -> None:
    # Longest first: 300 + 200 + 200 and 300 + 200. Packed: 300 + 300 and 200 + 200 + 200, in 600 steps.
    problem = job([300, 300, 200, 200, 200], 2)
    longest_first = simulated_schedule(problem, "lpt", np.inf)
    assert longest_first is not None
    assert longest_first.decode_steps.sum() == 700
    assert packing_pays(problem)
    # Stages at 0, 200, 300 and 400.
    assert best_of(problem, 10) == 604.0


def test_requests_are_reordered_until_they_start_together() -> None:
    # 50 then 70 in one slot, 70 then 50 in the other: two stages, not three, once their orders agree.
    problem = job([70, 50, 70, 50], 2)
    assert best_of(problem, 10) == 122.0


def test_a_request_waits_for_a_stage_where_that_costs_less() -> None:
    # 100 and 99 end a step apart, and 50 and 48 come after them: with 150 steps in all, 48 may wait for one.
    problem = job([100, 99, 50, 48], 2, CostModel(5.0, 0.0, 1.0, 0.0))
    assert best_of(problem, 20) == 160.0


def test_requests_of_no_decode_step_are_left_to_the_other_searches() -> None:
    workload = Workload.from_lengths(np.ones(3, dtype=int), np.array([1, 201, 301]))
    assert packing_pays(Problem(workload, CHEAP_STAGES, 1))
    assert not packing_pays(Problem(workload, CHEAP_STAGES, 1, prefill_emits_first_token=True))


@pytest.mark.parametrize("seed", range(6))
def test_small_jobs_come_to_their_optimum_and_never_below_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = job(rng.integers(100, 400, 7).tolist(), int(rng.integers(2, 4)))
    exact = solve_small(problem)
    assert exact.bound(problem) is not None
    optimum = exact.schedule.makespan(problem)
    assert optimum <= best_of(problem, 60, seed) <= 1.005 * optimum


def test_the_same_seed_comes_to_the_same() -> None:
    problem = job(np.random.default_rng(3).integers(100, 900, 24).tolist(), 4)
    assert best_of(problem, 30, 5) == best_of(problem, 30, 5)


def test_dear_stages_and_large_jobs_are_left_to_the_other_searches() -> None:
    assert not packing_pays(job([3, 2, 2], 2))
    assert not packing_pays(job([100_000] * 10_001, 64))
    assert not packing_pays(job([9, 9], 2, CostModel(1.0, 0.0, 0.0, 0.0)))


def test_the_search_packs_slots_where_that_pays() -> None:
    problem = job([300, 300, 200, 200, 200], 2)
    assert search_schedule(problem, iterations=30).makespan == 604.0

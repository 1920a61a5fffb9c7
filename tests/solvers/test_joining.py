"""Few requests put one by one under scarce memory, each put off by itself to share a stage."""

from __future__ import annotations

import numpy as np
import pytest
from builders import scarce_problem

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.solvers.exact.stage_states import best_by_states
from batchbound.solvers.result import Limits
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.search.memory.joining import JoiningAnnealing

DEAR_STAGES = CostModel(prefill_base=2.0, prefill_per_token=0.1, decode_base=1.0, decode_per_slot=0.0)


def found(problem: Problem, seed: int, steps: int) -> float:
    walk, least = JoiningAnnealing(problem, np.random.default_rng(seed)), np.inf
    for step in range(steps):
        schedule = walk.step(step / steps)
        if schedule is not None:
            assert schedule.check(problem) is None, seed
            assert schedule.makespan(problem) <= least + 1e-9, "only what is better is handed back"
            least = schedule.makespan(problem)
    return least


def test_a_request_waits_where_a_stage_of_its_own_costs_more_than_the_wait() -> None:
    # Rounds 3 + 1 beside 2 + 2 fill two slots in 4, but begin in three stages of 2 s; in two they take 5.
    workload = Workload.from_lengths(np.array([1, 1, 1, 1]), np.array([3, 2, 2, 1]))
    problem = Problem(workload, DEAR_STAGES, slots=2, kv_capacity=8)
    assert np.isclose(found(problem, 0, 400), 2 * 2.0 + 4 * 0.1 + 5)


@pytest.mark.slow
def test_every_order_and_reach_gives_a_schedule_that_keeps_the_rules_and_none_beats_the_optimum() -> None:
    met = 0
    for seed in range(40):
        problem = scarce_problem(seed, cost=DEAR_STAGES, capped=seed % 3 == 0)
        best = best_by_states(problem, Limits(), ski_rental_schedule(problem)).schedule.makespan(problem)
        least = found(problem, seed, 600)
        assert least >= best - 1e-9, seed
        met += least <= best + 1e-9
    assert met > 20

"""Jobs without a decode step: requests packed into prefill stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders import UNIT

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.bounds.makespan import best_bound
from batchbound.solvers.result import Limits
from batchbound.solvers.solve import solve

BENT = CostModel(1.0, 0.1, 1.0, 0.0, prefill_bend=6.0, prefill_per_token_beyond=0.3)
FLOORED = CostModel(0.5, 0.1, 1.0, 0.0, prefill_floor=1.2)


def scored(prompts: list[int], cost: CostModel, slots: int, **limits: Any) -> Problem:
    """Return requests whose only token comes out of the prefill stage."""
    workload = Workload.from_lengths(np.array(prompts), np.ones(len(prompts), dtype=np.int64))
    return Problem(workload, cost, slots=slots, prefill_emits_first_token=True, **limits)


def planned(problem: Problem, work: int, seed: int = 0, solver: str = "search") -> float:
    """Return the seconds of a plan that keeps the rules."""
    schedule = solve(problem, solver, limits=Limits(work=work, seed=seed)).schedule
    assert schedule is not None
    assert schedule.check(problem) is None
    return schedule.makespan(problem)


def partitions(requests: int) -> Iterator[list[list[int]]]:
    """Yield every way to share requests out among stages."""
    if not requests:
        yield []
        return
    for stages in partitions(requests - 1):
        for k in range(len(stages)):
            yield [*stages[:k], [*stages[k], requests - 1], *stages[k + 1 :]]
        yield [*stages, [requests - 1]]


def least_seconds(problem: Problem) -> float:
    caps = [cap for cap in (problem.prefill_token_cap, problem.kv_capacity) if cap is not None]
    prompts, least = problem.prompt_tokens, np.inf
    for stages in partitions(len(problem)):
        tokens = [int(prompts[stage].sum()) for stage in stages]
        if max(map(len, stages)) <= problem.slots and max(tokens) <= min(caps, default=np.inf):
            least = min(least, sum(float(problem.cost.prefill_seconds(each)) for each in tokens))
    return least


@pytest.mark.parametrize(
    ("cost", "work", "solver"), [(UNIT, 60, "search"), (FLOORED, 60, "search"), (BENT, 100_000, "exact")]
)
def test_plans_are_the_best_of_all_ways_to_share_requests_out_among_stages(
    cost: CostModel, work: int, solver: str
) -> None:
    rng = np.random.default_rng(5)
    for seed in range(6):
        prompts = rng.integers(1, 12, 6).tolist()
        limits = [{}, {"kv_capacity": 16}, {"prefill_token_cap": 13}][seed % 3]
        problem = scored(prompts, cost, int(rng.integers(2, 5)), **limits)
        assert np.isclose(planned(problem, work, seed, solver), least_seconds(problem)), (
            seed,
            prompts,
            limits,
        )


def test_few_steps_and_much_to_pack_fill_stages_as_no_order_does() -> None:
    # Longest first takes 6 + 4 and 4 + 3 + 3 and leaves 2 + 2 over, 6 + 2 + 2 and 4 + 3 + 3 leave nothing.
    problem = scored([6, 4, 4, 3, 3, 2, 2, 3, 3], UNIT, 9, kv_capacity=10)
    assert planned(problem, 20) == best_bound(problem).seconds == 3.0


def test_stages_hold_no_more_requests_than_slots_however_short_these_are() -> None:
    problem = scored([90, *[1] * 20], UNIT, 4, kv_capacity=100)
    assert planned(problem, 20) == best_bound(problem).seconds == 6.0


@pytest.mark.parametrize("work", [1, 2, 7])
def test_a_step_of_work_is_enough_where_memory_is_scarce(work: int) -> None:
    workload = Workload.from_lengths(np.full(9, 8), np.array([9, 8, 7, 6, 5, 4, 3, 2, 1]))
    problem = Problem(workload, UNIT, slots=3, kv_capacity=40, prefill_emits_first_token=True)
    planned(problem, work)

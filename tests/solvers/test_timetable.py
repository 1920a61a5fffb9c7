"""The timetable search: stage times fixed ahead, and requests that end just before one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.bounds.makespan import best_bound
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.search.timetable import search_timetable

COST = CostModel.paper()


def test_requests_that_end_together_share_the_next_stage() -> None:
    # 30, 20 + 10 and 20 + 10: started together, the two of 20 end together, and no slot is ever idle.
    problem = Problem(Workload.from_lengths([1] * 5, [30, 20, 10, 10, 20]), COST, slots=3)
    schedule = search_timetable(problem, iterations=300)
    assert schedule is not None
    assert schedule.check(problem) is None
    assert schedule.prefill_stages() == 2
    assert schedule.rounds.sum() == 30


def test_it_is_better_than_the_ski_rental_rule_within_memory() -> None:
    problem = Problem(generate("table3", 0, 300), COST, 40, kv_capacity=16_000)
    schedule = search_timetable(problem, iterations=200)
    assert schedule is not None
    assert schedule.check(problem) is None
    assert schedule.kv_tokens(problem).max() <= 16_000
    ruled = min(ski_rental_schedule(problem, patience=patience).makespan(problem) for patience in (0.5, 1.0))
    assert schedule.makespan(problem) < ruled


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=14),
    st.integers(1, 4),
    st.sampled_from([None, 75, 120]),
    st.sampled_from([None, 30, 50]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_schedule_keeps_the_rules_and_stays_above_the_bound(
    lengths: list[tuple[int, int]], slots: int, capacity: int | None, cap: int | None, first: bool
) -> None:
    prompts, answers = zip(*lengths, strict=True)
    problem = Problem(
        Workload.from_lengths(prompts, answers),
        COST,
        slots,
        kv_capacity=capacity,
        prefill_token_cap=cap,
        prefill_emits_first_token=first,
    )
    found: list[Schedule] = []
    best = search_timetable(problem, iterations=20, on_found=found.append)
    for schedule in found:
        assert schedule.check(problem) is None
        assert schedule.makespan(problem) >= best_bound(problem).seconds * (1 - 1e-12)
    makespans = [schedule.makespan(problem) for schedule in found]
    assert makespans == sorted(makespans, reverse=True)
    assert best is (found[-1] if found else None)


def test_the_same_seed_and_steps_give_the_same_schedule() -> None:
    problem = Problem(generate("table3", 1, 60), COST, 8, kv_capacity=3000)
    one, other = (search_timetable(problem, iterations=40, seed=5) for _ in range(2))
    assert one is not None
    assert other is not None
    assert np.array_equal(one.bin_of, other.bin_of)
    assert np.array_equal(one.rounds, other.rounds)


def test_a_timetable_never_shrinks_to_nothing() -> None:
    problem = Problem(Workload.from_lengths([1], [1]), COST, 1)
    for seed in range(20):
        schedule = search_timetable(problem, iterations=30, seed=seed)
        assert schedule is not None
        assert schedule.check(problem) is None


def test_rounds_that_cost_nothing_are_left_to_others() -> None:
    free = CostModel(1.0, 0.0, 0.0, 0.0)
    assert search_timetable(Problem(Workload.from_lengths([1], [2]), free, 1), iterations=1) is None


def test_it_needs_a_limit() -> None:
    with pytest.raises(ValueError, match="needs a limit"):
        search_timetable(Problem(Workload.from_lengths([1], [2]), COST, 1))


def test_a_plan_where_memory_is_scarce_comes_from_a_timetable() -> None:
    problem = Problem(generate("table3", 0, 200), COST, 40, kv_capacity=16_000)
    plan = make_plan(problem, limits=Limits(work=30))
    timetable = search_timetable(problem, iterations=30)
    assert timetable is not None
    assert plan.makespan <= timetable.makespan(problem)
    assert plan.schedule.check(problem) is None

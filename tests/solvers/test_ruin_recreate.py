"""Requests taken out of a schedule and put back elsewhere."""

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
from batchbound.heuristics.registry import POLICIES
from batchbound.models.bounds.makespan import best_bound
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits
from batchbound.solvers.search.baselines import simulated_schedule
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.search.ruin_recreate import RuinRecreate

COST = CostModel.paper()
BENT = CostModel(0.02, 1e-4, 0.03, 1e-4, prefill_bend=30.0, prefill_per_token_beyond=1e-3)


def walked(problem: Problem, steps: int, seed: int = 0, start: Schedule | None = None) -> list[Schedule]:
    """The start of a walk, and its schedules, each the best one so far."""
    start = ski_rental_schedule(problem, patience=0.0) if start is None else start
    walk = RuinRecreate(problem, np.random.default_rng(seed), start)
    made = [walk.step(step / steps) for step in range(steps)]
    return [start, *(each.without_idle_steps(problem) for each in made if each is not None)]


def test_a_stage_is_given_up_where_its_requests_fit_another() -> None:
    # 30, 20 + 10 and 20 + 10: started together, the two of 20 end together, and two stages are enough.
    problem = Problem(Workload.from_lengths([1] * 5, [30, 20, 10, 10, 20]), COST, slots=3)
    apart = Schedule(np.array([0, 0, 1, 2, 0]), np.array([0, 1, 1, 2, 2]), np.array([20, 1, 10]))
    best = walked(problem, 300, start=apart)[-1]
    assert best.check(problem) is None
    assert best.prefill_stages() == 2
    assert best.decode_steps.sum() == 30


def test_steps_are_cut_out_where_memory_has_room() -> None:
    # Of five tokens there is room for 4 and 1: the second may start in the last decode step of the first.
    problem = Problem(Workload.from_lengths([1, 1], [4, 4]), COST, slots=2, kv_capacity=5)
    apart = Schedule(np.array([0, 1]), np.array([0, 0]), np.array([4, 4]))
    best = walked(problem, 100, start=apart)[-1]
    assert best.check(problem) is None
    assert best.decode_steps.sum() == 7


def test_a_walk_that_cut_too_much_goes_back_to_the_best_schedule() -> None:
    # In four decode steps the two of four never fit beside each other.
    problem = Problem(Workload.from_lengths([1, 1], [4, 4]), COST, slots=2, kv_capacity=5)
    apart = Schedule(np.array([0, 1]), np.array([0, 0]), np.array([4, 4]))
    walk = RuinRecreate(problem, np.random.default_rng(0), apart)
    end = int(walk._at.end)
    walk._at = walk._state(np.array([-1, end - 4]), end - 4, end)
    complete = [not (walk._at.start < 0).any() for done in range(100) if not walk.step(done / 100)]
    assert any(complete)


def test_what_memory_does_not_hold_is_put_elsewhere() -> None:
    problem = Problem(Workload.from_lengths([3] * 4, [5, 5, 5, 5]), COST, slots=4, kv_capacity=16)
    together = Schedule(np.zeros(4, np.int64), np.arange(4), np.array([5]))
    found = walked(problem, 200, start=together)[1:]
    assert together.check(problem) is not None
    assert found
    assert all(schedule.check(problem) is None for schedule in found)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=14),
    st.integers(1, 4),
    st.sampled_from([None, 75, 120]),
    st.sampled_from([None, 30, 50]),
    st.booleans(),
    st.sampled_from([COST, BENT]),
)
@settings(max_examples=60, deadline=None)
def test_every_schedule_keeps_the_rules_and_stays_above_the_bound(
    lengths: list[tuple[int, int]],
    slots: int,
    capacity: int | None,
    cap: int | None,
    first: bool,
    cost: CostModel,
) -> None:
    prompts, answers = zip(*lengths, strict=True)
    problem = Problem(
        Workload.from_lengths(prompts, answers),
        cost,
        slots,
        kv_capacity=capacity,
        prefill_token_cap=cap,
        prefill_emits_first_token=first,
    )
    if not problem.decode_steps.any():
        return
    least = best_bound(problem).seconds * (1 - 1e-12)
    for schedule in walked(problem, 30):
        assert schedule.check(problem) is None
        assert schedule.makespan(problem) >= least


def test_the_same_seed_and_steps_give_the_same_schedule() -> None:
    problem = Problem(generate("table3", 1, 60), COST, 8, kv_capacity=3000)
    one, other = (walked(problem, 60, seed=5) for _ in range(2))
    assert len(one) == len(other) > 1
    assert np.array_equal(one[-1].bin_of, other[-1].bin_of)
    assert np.array_equal(one[-1].decode_steps, other[-1].decode_steps)


def test_it_is_better_than_the_ski_rental_rule_within_memory() -> None:
    problem = Problem(generate("table3", 0, 300), COST, 40, kv_capacity=16_000)
    ruled = min(
        (ski_rental_schedule(problem, patience=patience) for patience in (0.5, 1.0)),
        key=lambda schedule: schedule.makespan(problem),
    )
    best = walked(problem, 200, start=ruled)[-1]
    assert best.makespan(problem) < 0.99 * ruled.makespan(problem)


@pytest.mark.slow
def test_a_plan_where_memory_is_scarce_is_better_than_every_rule() -> None:
    problem = Problem(generate("table3", 0, 100), COST, 20, kv_capacity=8_000)
    plan = make_plan(problem, limits=Limits(work=10))
    rules = [simulated_schedule(problem, name, np.inf) for name in POLICIES]
    assert plan.makespan < min(rule.makespan(problem) for rule in rules if rule is not None)
    assert plan.schedule.check(problem) is None


@pytest.mark.slow
def test_memory_that_could_run_out_but_does_not_costs_nothing() -> None:
    # The four that hold most hold 2,441 tokens at their ends, and what is best without a limit 2,417.
    workload = generate("table3", 0, 24)
    free, tight = Problem(workload, COST, 4), Problem(workload, COST, 4, kv_capacity=2_430)
    assert tight.memory_can_run_out
    plan = make_plan(tight, limits=Limits(work=8))
    assert plan.schedule.check(tight) is None
    assert plan.makespan <= make_plan(free, limits=Limits(work=2)).makespan

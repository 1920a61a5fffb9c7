"""The timetable search: stage times fixed ahead, and requests that end just before one."""

from __future__ import annotations

import numpy as np
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
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.search.starts import simulated_schedule
from batchbound.solvers.search.timetable import TimetableAnnealing

COST = CostModel.paper()


def annealed(problem: Problem, steps: int, seed: int = 0) -> list[Schedule]:
    """The schedules of a walk over timetables, each better than those before."""
    walk = TimetableAnnealing(problem, np.random.default_rng(seed))
    made = [walk.step(step / steps) for step in range(steps)]
    found: list[Schedule] = []
    for schedule in made:
        if schedule is not None and (not found or schedule.makespan(problem) < found[-1].makespan(problem)):
            found.append(schedule)
    return found


def search_timetable(problem: Problem, *, iterations: int, seed: int = 0) -> Schedule | None:
    found = annealed(problem, iterations, seed)
    return found[-1] if found else None


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
    for schedule in annealed(problem, 20):
        assert schedule.check(problem) is None
        assert schedule.makespan(problem) >= best_bound(problem).seconds * (1 - 1e-12)


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


def test_a_plan_where_memory_is_scarce_is_better_than_every_rule() -> None:
    problem = Problem(generate("table3", 0, 200), COST, 40, kv_capacity=16_000)
    plan = make_plan(problem, limits=Limits(work=30))
    rules = [simulated_schedule(problem, name, np.inf) for name in POLICIES]
    assert plan.makespan < min(rule.makespan(problem) for rule in rules if rule is not None)
    assert plan.schedule.check(problem) is None

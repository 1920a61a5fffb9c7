"""Small problems with every limit are solved to the optimum, and a check that shares no code agrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import limited_problem

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.bounds.prove import proven_bound
from batchbound.models.certificates.checker import verify_bound
from batchbound.solvers.exact import stage_states
from batchbound.solvers.exact.columns import first_of_equal
from batchbound.solvers.exact.stage_states import best_by_states, can_list_states
from batchbound.solvers.result import Limits, Status, StoppedBy
from batchbound.solvers.solve import solve

Optimum = Callable[[Problem], float]


def problem_of(prompts: list[int], outputs: list[int], slots: int, cost: CostModel, **more: Any) -> Problem:
    return Problem(Workload.from_lengths(prompts, outputs), cost, slots, **more)


def one_by_one(problem: Problem) -> Schedule:
    return Schedule.from_bins(problem, np.arange(len(problem)), problem.decode_steps)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(5))
def test_it_finds_the_optimum_with_every_limit_from_the_worst_start(
    batch: int, optimal_makespan: Optimum
) -> None:
    for seed in range(40 * batch, 40 * batch + 40):
        problem = limited_problem(seed)
        optimum = optimal_makespan(problem)
        found = best_by_states(problem, Limits(), one_by_one(problem))
        assert found.stopped_by is StoppedBy.PROOF
        assert found.schedule.check(problem) is None, seed
        assert found.schedule.makespan(problem) == pytest.approx(optimum), seed
        bound = found.bound(problem)
        assert bound is not None
        assert bound.seconds == pytest.approx(optimum), seed
        assert verify_bound(problem, bound) is None, seed
        assert proven_bound(problem, 0.05).seconds <= optimum + 1e-9, seed


def test_a_bound_a_little_above_the_optimum_is_refuted(optimal_makespan: Optimum) -> None:
    refuted = 0
    for seed in range(40):
        problem = limited_problem(seed, most=5)
        bound = best_by_states(problem, Limits(), one_by_one(problem)).bound(problem)
        assert bound is not None
        if bound.seconds == 0:
            continue
        more = 1e-6 * bound.seconds
        terms = {**bound.terms, "decode steps": bound.terms["decode steps"] + more}
        violation = verify_bound(problem, replace(bound, seconds=bound.seconds + more, terms=terms))
        assert violation is not None, seed
        assert (violation.rule, violation.message) == ("states", "a schedule takes less")
        refuted += 1
    assert refuted >= 30


def test_a_request_waits_without_an_end_until_it_is_small_enough_beside_another(
    optimal_makespan: Optimum,
) -> None:
    # The first one holds 6 to 11 tokens in its six steps, the longer one 3 to 11 in nine. Begun together
    # they hold 11 + 8 in the sixth round; begun one decode step later, where no request ends, 11 + 7.
    problem = problem_of([6, 3], [6, 9], 2, CostModel(1.0, 0.0, 1.0, 0.0), kv_capacity=18)
    found = best_by_states(problem, Limits(), one_by_one(problem))
    assert found.schedule.makespan(problem) == optimal_makespan(problem) == 2 + 10
    assert found.schedule.starts[found.schedule.bin_of].tolist() == [0, 1]


@pytest.mark.slow
def test_six_requests_within_a_tight_memory_are_solved_and_proven_by_the_default_solver(
    optimal_makespan: Optimum,
) -> None:
    cost = CostModel(1.0, 0.1, 1.0, 0.1, prefill_floor=4.0, prefill_bend=6.0, prefill_per_token_beyond=0.2)
    problem = problem_of([3, 5, 2, 6, 4, 2], [6, 2, 7, 3, 5, 4], 3, cost, kv_capacity=22, prefill_token_cap=9)
    found = solve(problem, limits=Limits(seconds=30.0))
    assert found.status is Status.OPTIMAL
    assert found.makespan == pytest.approx(optimal_makespan(problem))
    assert found.repeatable is not None
    assert found.repeatable.seconds == pytest.approx(found.makespan)
    assert verify_bound(problem, found.repeatable) is None


@pytest.mark.slow
def test_limits_end_it_with_the_best_schedule_so_far() -> None:
    rng = np.random.default_rng(3)
    prompts, outputs = rng.integers(1, 9, 14).tolist(), rng.integers(1, 12, 14).tolist()
    problem = problem_of(prompts, outputs, 4, CostModel(1.0, 0.0, 1.0, 0.0), kv_capacity=35)
    start = one_by_one(problem)
    one, other = (best_by_states(problem, Limits(work=200_000), start) for _ in range(2))
    assert one.stopped_by is StoppedBy.WORK
    assert one.bound(problem) is None
    assert one.schedule.check(problem) is None
    assert one.schedule.makespan(problem) == other.schedule.makespan(problem) < start.makespan(problem)
    assert best_by_states(problem, Limits(seconds=0.2), start).stopped_by is StoppedBy.TIME


def test_many_states_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_states, "MOST_STATES", 100)
    monkeypatch.setattr(stage_states, "BEAMS", ())
    problem = problem_of([5] * 7, [3, 4, 6, 7, 8, 9, 11], 3, CostModel(1.0, 0.0, 1.0, 0.0), kv_capacity=40)
    assert best_by_states(problem, Limits(), one_by_one(problem)).stopped_by is StoppedBy.GAVE_UP


def test_what_has_too_many_states_is_known_beforehand() -> None:
    cost = CostModel.paper()
    assert can_list_states(problem_of([1] * 24, [1] * 24, 4, cost))
    assert not can_list_states(problem_of([1] * 24, [1] * 24, 8, cost))
    assert not can_list_states(problem_of([1] * 25, [1] * 25, 2, cost))


def test_more_requests_than_are_tabled_and_no_way_left_to_be_better() -> None:
    problem = problem_of([1] * 16, [3] * 15 + [5], 4, CostModel(1.0, 0.0, 1.0, 0.0))
    found = best_by_states(problem, Limits(), one_by_one(problem))
    assert found.stopped_by is StoppedBy.PROOF
    assert best_by_states(problem, Limits(), found.schedule).schedule is found.schedule


def test_waits_looked_at_together_lead_to_the_states_of_waits_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = 0
    for seed in range(30):
        problem = limited_problem(seed)
        together = best_by_states(problem, Limits(), one_by_one(problem))
        with monkeypatch.context() as patched:
            patched.setattr(stage_states, "WAITS_AT_ONCE", 1)
            apart = best_by_states(problem, Limits(), one_by_one(problem))
        assert together.steps == apart.steps, seed
        assert together.schedule.makespan(problem) == apart.schedule.makespan(problem), seed
        waited += problem.memory_can_run_out
    assert waited


def test_of_equal_rows_the_first_of_the_lowest_rank_is_kept() -> None:
    columns = [np.array([7, 1, 7, 7, 1, 7]), np.array([2, 5, 2, 3, 5, 2])]
    found = first_of_equal(columns, np.array([4.0, 9.0, 3.0, 8.0, 9.0, 3.0]))
    assert sorted(found.tolist()) == [1, 2, 3]

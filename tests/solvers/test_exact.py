"""The exact search finds the optimum, and says when it has proven it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders import mostly_slow

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.formulations.full_model import UnsupportedProblemError
from batchbound.solvers.exact.small import solve_small
from batchbound.solvers.result import Limits, Status, StoppedBy
from batchbound.solvers.solve import solve

Optimum = Callable[[Problem], float]
PAPER = CostModel.paper()
EXACT = "exhaustive search"


def problem_of(decode_steps: list[int], slots: int, cost: CostModel = PAPER, **more: Any) -> Problem:
    return Problem(Workload.from_lengths([10] * len(decode_steps), decode_steps), cost, slots, **more)


def one_by_one(problem: Problem) -> Schedule:
    return Schedule.from_bins(problem, np.arange(len(problem)), problem.decode_steps)


def tiny_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    decode_steps = rng.integers(1, 9, int(rng.integers(1, 8))).tolist()
    base, decode = float(rng.choice([0.0, 0.5, 1.0, 3.0])), float(rng.choice([0.5, 1.0]))
    return problem_of(decode_steps, int(rng.integers(1, 4)), CostModel(base, 0.01, decode, 0.02))


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(2))
def test_it_finds_the_optimum_of_tiny_problems_from_the_worst_start_and_a_check_agrees(
    batch: int, optimal_makespan: Optimum
) -> None:
    for seed in range(25 * batch, 25 * batch + 25):
        problem = tiny_problem(seed)
        found = solve_small(problem, start=one_by_one(problem))
        assert found.stopped_by is StoppedBy.PROOF
        assert found.schedule.check(problem) is None
        optimum = optimal_makespan(problem)
        assert found.schedule.makespan(problem) == pytest.approx(optimum), seed
        bound = found.bound(problem)
        assert bound is not None
        assert verify_bound(problem, bound) is None, seed


@pytest.mark.parametrize("seed", mostly_slow(range(12), fast=(0, 1, 2)))
def test_requests_of_one_token_join_stages_of_an_optimum_of_the_others(
    seed: int, optimal_makespan: Optimum
) -> None:
    steps = [1, 1, *np.random.default_rng(seed).integers(2, 7, 4).tolist()]
    limits = {"kv_capacity": 34, "prefill_emits_first_token": True}
    problem = problem_of(steps, 3, CostModel(2.0, 0.01, 1.0, 0.02), **limits)
    found = solve_small(problem)
    # In three jobs no stage of the optimum found has room, so states are searched.
    assert found.argument == ("states" if seed in (2, 3, 11) else "orders")
    assert found.stopped_by is StoppedBy.PROOF
    assert found.schedule.check(problem) is None
    assert found.schedule.makespan(problem) == pytest.approx(optimal_makespan(problem))


@pytest.mark.parametrize("seed", mostly_slow(range(10), fast=(0, 1, 2)))
def test_its_result_is_optimal_with_a_bound_to_match(seed: int, optimal_makespan: Optimum) -> None:
    problem = tiny_problem(seed)
    found = solve(problem, "exact", limits=Limits())
    assert (found.status, found.stopped_by) == (Status.OPTIMAL, StoppedBy.PROOF)
    assert found.schedule is not None
    assert found.schedule.check(problem) is None
    assert found.makespan == pytest.approx(optimal_makespan(problem))
    assert found.bound is not None
    assert found.bound.seconds == pytest.approx(found.makespan)
    assert verify_bound(problem, found.bound) is None


def test_cp_sat_agrees_on_seven_requests() -> None:
    problem = Problem(generate("table3", 0, 7), PAPER, 3)
    ours = solve(problem, "exact", limits=Limits())
    theirs = solve(problem, "slot-free:cp-sat", limits=Limits(seconds=3600.0))
    assert ours.status is theirs.status is Status.OPTIMAL
    assert ours.makespan == pytest.approx(theirs.makespan)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "slots"), [(10, 3), (16, 4)])
def test_the_papers_small_sizes_are_proven(count: int, slots: int) -> None:
    problem = Problem(generate("table3", 0, count), PAPER, slots)
    found = solve(problem, "exact", limits=Limits(seconds=3600.0))
    assert found.status is Status.OPTIMAL
    assert found.bound is not None
    assert found.bound.source == EXACT
    assert sum(found.bound.terms.values()) == pytest.approx(found.makespan)
    assert verify_bound(problem, found.bound) is None


@pytest.mark.slow
def test_a_work_limit_ends_it_with_a_schedule_and_a_bound_that_holds() -> None:
    problem = Problem(generate("table3", 0, 14), PAPER, 5)
    one, other = (solve(problem, "exact", limits=Limits(work=700)) for _ in range(2))
    assert (one.status, one.stopped_by) == (Status.FEASIBLE, StoppedBy.WORK)
    assert one.schedule is not None
    assert one.schedule.check(problem) is None
    assert one.bound is not None
    assert one.bound.source != EXACT
    assert one.makespan == other.makespan


def test_a_time_limit_ends_it() -> None:
    problem = Problem(generate("table3", 0, 16), PAPER, 4)
    # Over before the first of the 2,516 sets of requests is looked at.
    found = solve(problem, "exact", limits=Limits(seconds=1e-9))
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.TIME)


def test_what_is_too_much_to_try_is_refused() -> None:
    arrivals = Workload(np.array(["a"]), np.array([3]), np.array([2]), arrival=np.array([1.0]))
    with pytest.raises(UnsupportedProblemError, match="cannot take arrival times"):
        solve_small(Problem(arrivals, PAPER, 1))
    capped = Problem(generate("table3", 0, 100), PAPER, 20, prefill_token_cap=2000)
    with pytest.raises(UnsupportedProblemError, match="100 requests on 20 slots"):
        solve_small(capped)


@pytest.mark.slow
def test_the_search_proves_what_is_small() -> None:
    problem = Problem(generate("table3", 0, 10), PAPER, 3)
    found = solve(problem, limits=Limits(seconds=60.0))
    assert (found.solver, found.status, found.stopped_by) == ("search", Status.OPTIMAL, StoppedBy.PROOF)
    assert found.bound is not None
    assert found.bound.source == EXACT
    capped = Problem(generate("table3", 0, 8), PAPER, 3, prefill_token_cap=200)
    assert solve(capped, limits=Limits(seconds=60.0)).status is Status.OPTIMAL


def test_equal_requests_are_ordered_once() -> None:
    problem = problem_of([2] * 23 + [1], slots=2)
    found = solve(problem, "exact", limits=Limits())
    assert found.schedule is not None
    assert found.status is Status.OPTIMAL
    assert found.bound is not None
    assert verify_bound(problem, found.bound) is None

"""Both exact searches find the optimum of small problems, and say when they have proven it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import limited_problem, mostly_slow

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.bounds.prove import proven_bound
from batchbound.models.certificates.checker import verify_bound
from batchbound.solvers.exact.compiled_search import (
    EXACT,
    can_list_orders,
    can_list_states,
    search_exactly,
)
from batchbound.solvers.exact.outcome import Argument
from batchbound.solvers.exact.small import solve_small
from batchbound.solvers.result import Limits, Status, StoppedBy
from batchbound.solvers.solve import solve

Optimum = Callable[[Problem], float]


def problem_of(prompts: list[int], outputs: list[int], slots: int, cost: CostModel, **more: Any) -> Problem:
    return Problem(Workload.from_lengths(prompts, outputs), cost, slots, **more)


def one_by_one(problem: Problem) -> Schedule:
    return Schedule.from_bins(problem, np.arange(len(problem)), problem.decode_steps)


def scarce_problem(seed: int, count: int, stage: float = 4.0) -> Problem:
    """Return long requests on three slots, with memory for two of the largest."""
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(1, 60, count), rng.integers(10, 60, count)
    peaks = np.sort(prompts + outputs)
    cost = CostModel(stage, 0.01, 1.0, 0.0)
    return Problem(Workload.from_lengths(prompts, outputs), cost, 3, kv_capacity=int(peaks[-2:].sum()))


@pytest.mark.parametrize("batch", mostly_slow(range(4), fast=[0]))
def test_every_stage_from_every_state_finds_the_optimum_with_every_limit(
    batch: int, optimal_makespan: Optimum
) -> None:
    for seed in range(40 * batch, 40 * batch + 40):
        problem = limited_problem(seed, most=5)
        found = search_exactly(problem, "states", Limits(), one_by_one(problem))
        assert found.stopped_by is StoppedBy.PROOF
        assert found.schedule.check(problem) is None, seed
        assert found.schedule.makespan(problem) == pytest.approx(optimal_makespan(problem)), seed


def test_every_order_from_the_end_finds_the_optimum(optimal_makespan: Optimum) -> None:
    proven = 0
    for seed in range(300):
        problem = limited_problem(seed, most=5)
        if not can_list_orders(problem):
            continue
        found = search_exactly(problem, "orders", Limits(), one_by_one(problem))
        assert found.stopped_by is StoppedBy.PROOF
        assert found.schedule.check(problem) is None, seed
        assert found.schedule.makespan(problem) == pytest.approx(optimal_makespan(problem)), seed
        proven += 1
    assert proven >= 20


def stages_worth_waiting_for(seed: int) -> Problem:
    """Return a few requests whose stages take as long as some decode steps."""
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(2, 5))
    prompts, outputs = rng.integers(1, 6, 4), rng.integers(2, 7, 4)
    peaks = np.sort(prompts + outputs - 1)
    capacity = int(rng.integers(peaks[-1], peaks[-slots:].sum() + 1))
    cost = CostModel(float(rng.choice([0.5, 3.0, 12.0])), 0.0, 1.0, 0.0)
    return problem_of(prompts.tolist(), outputs.tolist(), slots, cost, kv_capacity=capacity)


def test_requests_wait_for_others_to_share_a_stage(optimal_makespan: Optimum) -> None:
    compared = 0
    for seed in range(40):
        problem = stages_worth_waiting_for(seed)
        if not can_list_orders(problem):
            continue
        found = search_exactly(problem, "orders", Limits(), one_by_one(problem))
        assert found.stopped_by is StoppedBy.PROOF
        assert found.schedule.makespan(problem) == pytest.approx(optimal_makespan(problem)), seed
        compared += 1
    assert compared >= 20


@pytest.mark.parametrize("argument", ["states", "orders"])
def test_a_request_waits_without_an_end_until_it_is_small_enough_beside_another(argument: Argument) -> None:
    # The first one holds 6 to 11 tokens in its six steps, the longer one 3 to 11 in nine. Begun together
    # they hold 11 + 8 in the sixth step; begun one decode step later, where no request ends, 11 + 7.
    problem = problem_of([6, 3], [6, 9], 2, CostModel(1.0, 0.0, 1.0, 0.0), kv_capacity=18)
    found = search_exactly(problem, argument, Limits(), one_by_one(problem))
    assert (found.stopped_by, found.schedule.makespan(problem)) == (StoppedBy.PROOF, 2 + 10)
    assert found.schedule.starts[found.schedule.bin_of].tolist() == [0, 1]


@pytest.mark.parametrize("argument", ["states", "orders"])
def test_requests_share_a_stage_as_far_as_memory_allows(argument: Argument) -> None:
    # All three hold 21 tokens in their third step. Of two the shorter one's last step is in time: with the
    # one of nine steps the one of four, then, from its end on, the one of three: 11 + 7 tokens in the last.
    problem = problem_of([5, 5, 5], [3, 4, 9], 3, CostModel(30.0, 0.0, 1.0, 0.0), kv_capacity=18)
    found = search_exactly(problem, argument, Limits(), one_by_one(problem))
    assert (found.stopped_by, found.schedule.prefill_stages()) == (StoppedBy.PROOF, 2)
    assert found.schedule.makespan(problem) == 60 + 9


def test_both_agree_on_long_requests_and_narrow_passes_prove_the_same() -> None:
    narrow = replace(EXACT, beam=2.0, wide_beam=4.0, width=8.0, widening=2.0, set_rows=20.0, improved=0.0)
    for seed in range(6):
        problem = scarce_problem(seed, 6, stage=[4.0, 25.0][seed % 2])
        start = one_by_one(problem)
        by_states = search_exactly(problem, "states", Limits(), start)
        for params in (EXACT, narrow):
            by_orders = search_exactly(problem, "orders", Limits(), start, params)
            assert by_states.stopped_by is by_orders.stopped_by is StoppedBy.PROOF
            assert by_orders.schedule.makespan(problem) == pytest.approx(by_states.schedule.makespan(problem))


def test_a_bound_a_little_above_the_optimum_is_refuted() -> None:
    refuted = 0
    for seed in range(40):
        problem = limited_problem(seed, most=5)
        bound = search_exactly(problem, "states", Limits(), one_by_one(problem)).bound(problem)
        assert bound is not None
        assert verify_bound(problem, bound) is None
        assert proven_bound(problem, 0.02).seconds <= bound.seconds + 1e-9
        if bound.seconds == 0:
            continue
        more = 1e-6 * bound.seconds
        terms = {**bound.terms, "decode steps": bound.terms["decode steps"] + more}
        violation = verify_bound(problem, replace(bound, seconds=bound.seconds + more, terms=terms))
        assert violation is not None, seed
        assert (violation.rule, violation.message) == ("states", "a schedule takes less")
        refuted += 1
    assert refuted >= 30


def test_six_requests_within_a_tight_memory_are_solved_and_proven_by_the_default_solver(
    optimal_makespan: Optimum,
) -> None:
    cost = CostModel(1.0, 0.1, 1.0, 0.1, prefill_floor=4.0, prefill_bend=6.0, prefill_per_token_beyond=0.2)
    problem = problem_of([3, 5, 2, 6, 4, 2], [6, 2, 7, 3, 5, 4], 3, cost, kv_capacity=22, prefill_token_cap=9)
    found = solve(problem, limits=Limits(seconds=60.0))
    assert found.status is Status.OPTIMAL
    assert found.makespan == pytest.approx(optimal_makespan(problem))
    assert found.repeatable is not None
    assert found.repeatable.seconds == pytest.approx(found.makespan)
    assert verify_bound(problem, found.repeatable) is None


def test_five_requests_whose_decode_steps_cost_almost_nothing_come_to_an_end() -> None:
    cost = CostModel(300.0, 0.0, 1e-7, 10.0, decode_per_kv_token=0.01, prefill_bend=3.0)
    problem = problem_of([2, 2, 2, 1, 1], [2, 4, 6, 9, 6], 4, cost, kv_capacity=15, prefill_token_cap=4)
    for argument in ("states", "orders"):
        found = search_exactly(problem, argument, Limits(work=2_000_000), one_by_one(problem))
        assert found.stopped_by is StoppedBy.PROOF


def test_long_requests_are_proven_and_a_checker_repeats_it_where_it_can() -> None:
    problem = scarce_problem(2, 4)
    found = solve_small(problem, Limits(), one_by_one(problem))
    bound = found.bound(problem)
    assert (found.stopped_by, found.argument) == (StoppedBy.PROOF, "states")
    assert bound is not None
    assert verify_bound(problem, bound) is None
    alone = search_exactly(problem, "orders", Limits(), one_by_one(problem))
    claimed = alone.bound(problem)
    assert claimed is not None
    assert (claimed.source, claimed.certificate["kind"]) == ("exhaustive search", "solver")
    assert claimed.seconds == pytest.approx(bound.seconds)


@pytest.mark.parametrize("argument", ["states", "orders"])
def test_limits_end_it_with_the_best_schedule_so_far(argument: Argument) -> None:
    problem = scarce_problem(0, 11)
    start = one_by_one(problem)
    one, other = (search_exactly(problem, argument, Limits(work=20_000), start) for _ in range(2))
    assert one.stopped_by is StoppedBy.WORK
    assert one.bound(problem) is None
    assert one.schedule.check(problem) is None
    assert one.schedule.makespan(problem) == other.schedule.makespan(problem)
    assert search_exactly(problem, argument, Limits(seconds=1e-6), start).stopped_by is StoppedBy.TIME
    little = replace(EXACT, bytes=1.0)
    assert search_exactly(problem, argument, Limits(), start, little).stopped_by is StoppedBy.FINISHED


def test_a_schedule_that_is_the_best_is_handed_back_itself() -> None:
    problem = problem_of([1] * 16, [3] * 15 + [5], 4, CostModel(1.0, 0.0, 1.0, 0.0))
    found = search_exactly(problem, "states", Limits(), one_by_one(problem))
    assert found.stopped_by is StoppedBy.PROOF
    assert search_exactly(problem, "states", Limits(), found.schedule).schedule is found.schedule


def test_what_they_do_not_take_is_known_beforehand() -> None:
    cost, problem = CostModel.paper(), scarce_problem(0, 6)
    assert can_list_states(problem_of([1] * 24, [1] * 24, 4, cost))
    assert not can_list_states(problem_of([1] * 24, [1] * 24, 8, cost))
    assert not can_list_states(problem_of([1] * 25, [1] * 25, 2, cost))
    assert can_list_orders(problem)
    assert not can_list_orders(replace(problem, kv_capacity=None))
    assert not can_list_orders(replace(problem, cost=CostModel(1.0, 0.0, 0.0, 0.1)))
    assert not can_list_orders(scarce_problem(0, 15))

"""Small problems under scarce memory, solved back from the end, have the optimum of an exhaustive search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from builders import limited_problem

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.certificates.checker import verify_bound
from batchbound.solvers.exact.backward_dp import (
    SECONDS_A_SET,
    _EndSearch,
    best_by_backward_dp,
    can_search_backward,
)
from batchbound.solvers.exact.end_states import over_of, request_of
from batchbound.solvers.exact.least_steps import Shapes, least_steps
from batchbound.solvers.exact.outcome import LimitReachedError
from batchbound.solvers.exact.small import solve_small
from batchbound.solvers.result import Limits, StoppedBy

Optimum = Callable[[Problem], float]


def problem_of(prompts: list[int], outputs: list[int], slots: int, cost: CostModel, capacity: int) -> Problem:
    return Problem(Workload.from_lengths(prompts, outputs), cost, slots, kv_capacity=capacity)


def one_by_one(problem: Problem) -> Schedule:
    return Schedule.from_bins(problem, np.arange(len(problem)), problem.decode_steps)


def long_problem(seed: int, count: int) -> Problem:
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(1, 60, count), rng.integers(10, 60, count)
    peaks = np.sort(prompts + outputs)
    cost = CostModel(4.0, 0.01, 1.0, 0.0)
    return Problem(Workload.from_lengths(prompts, outputs), cost, 3, kv_capacity=int(peaks[-2:].sum()))


def test_what_it_proves_is_the_optimum(optimal_makespan: Optimum) -> None:
    proven = 0
    for seed in range(300):
        problem = limited_problem(seed, most=5)
        if not can_search_backward(problem):
            continue
        found = best_by_backward_dp(problem, Limits(), one_by_one(problem))
        optimum = optimal_makespan(problem)
        assert found.schedule.check(problem) is None, seed
        assert found.schedule.makespan(problem) >= optimum - 1e-9, seed
        if found.stopped_by is StoppedBy.PROOF:
            assert found.schedule.makespan(problem) == pytest.approx(optimum), seed
            proven += 1
    assert proven >= 20


def test_passes_that_follow_few_states_first_prove_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = list[int | None]()
    run = _EndSearch.run

    def counted(search: _EndSearch, beam: int | None, width: int | None = None, every: bool = False) -> bool:
        passes.append(width)
        return run(search, beam, width, every)

    problems = [long_problem(seed, 6) for seed in range(6)]
    expected = [best_by_backward_dp(problem, Limits(), one_by_one(problem)) for problem in problems]
    monkeypatch.setattr("batchbound.solvers.exact.backward_dp.BEAM", 2)
    monkeypatch.setattr("batchbound.solvers.exact.backward_dp.WIDTH", 4)
    monkeypatch.setattr(_EndSearch, "run", counted)
    for problem, exact in zip(problems, expected, strict=True):
        found = best_by_backward_dp(problem, Limits(), one_by_one(problem))
        assert found.stopped_by is exact.stopped_by is StoppedBy.PROOF
        assert found.schedule.makespan(problem) == pytest.approx(exact.schedule.makespan(problem))
    assert passes.count(4) == len(problems)
    assert 16 in passes


def shared_stages(seed: int) -> Problem:
    """Return a few requests whose stages take as long as some steps, so that waiting for others pays."""
    rng = np.random.default_rng(seed)
    count, slots = 4, int(rng.integers(2, 5))
    prompts, outputs = rng.integers(1, 6, count), rng.integers(2, 7, count)
    peaks = np.sort(prompts + outputs - 1)
    capacity = int(rng.integers(peaks[-1], peaks[-slots:].sum() + 1))
    cost = CostModel(float(rng.choice([0.5, 3.0, 12.0])), 0.0, 1.0, 0.0)
    return problem_of(prompts.tolist(), outputs.tolist(), slots, cost, capacity)


def test_it_proves_optima_of_stages_worth_waiting_for(optimal_makespan: Optimum) -> None:
    proven = 0
    for seed in range(25):
        problem = shared_stages(seed)
        if not can_search_backward(problem):
            continue
        found = best_by_backward_dp(problem, Limits(), one_by_one(problem))
        if found.stopped_by is StoppedBy.PROOF:
            assert found.schedule.makespan(problem) == pytest.approx(optimal_makespan(problem)), seed
            proven += 1
    assert proven >= 15


def test_a_request_waits_without_an_end_until_it_is_small_enough_beside_another() -> None:
    # The first one holds 6 to 11 tokens in its six steps, the longer one 3 to 11 in nine. Begun together
    # they hold 11 + 8 in the sixth round; begun one decode step later, where no request ends, 11 + 7.
    problem = problem_of([6, 3], [6, 9], 2, CostModel(1.0, 0.0, 1.0, 0.0), 18)
    found = best_by_backward_dp(problem, Limits(), one_by_one(problem))
    assert (found.stopped_by, found.schedule.makespan(problem)) == (StoppedBy.PROOF, 2 + 10)
    assert found.schedule.starts[found.schedule.bin_of].tolist() == [0, 1]


def test_requests_share_a_stage_as_far_as_memory_allows() -> None:
    # All three hold 21 tokens in their third round. Of two the shorter one's last step is in time: with the
    # one of nine steps the one of four, then, from its end on, the one of three: 11 + 7 tokens in the last.
    problem = problem_of([5, 5, 5], [3, 4, 9], 3, CostModel(30.0, 0.0, 1.0, 0.0), 18)
    found = best_by_backward_dp(problem, Limits(), one_by_one(problem))
    assert (found.stopped_by, found.schedule.prefill_stages()) == (StoppedBy.PROOF, 2)
    assert found.schedule.makespan(problem) == 60 + 9


def test_the_fewest_steps_of_each_set_are_those_of_its_best_order() -> None:
    shapes = Shapes(np.array([9, 6]), np.array([3, 6]), 2, 18)
    assert least_steps(shapes).tolist() == [0, 9, 6, 10]
    assert least_steps(replace(shapes, slots=1)).tolist() == [0, 9, 6, 15]
    assert least_steps(replace(shapes, capacity=22)).tolist() == [0, 9, 6, 9]


def test_the_fewest_steps_of_many_requests_are_at_least_those_of_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = long_problem(1, 6)
    shapes = Shapes(problem.decode_steps, problem.kv_at_start, problem.slots, problem.kv_capacity or 0)
    exact = least_steps(shapes)
    monkeypatch.setattr("batchbound.solvers.exact.least_steps.MOST_ROWS", 20)
    few = least_steps(shapes)
    assert (few <= exact).all()
    assert 0 < few[-1] < exact[-1]


def test_the_steps_of_those_that_fit_late_are_counted_from_then_on() -> None:
    # Round by decode step, nothing that waits fits beside what is under way before it is said to.
    problem = long_problem(3, 7)
    search = _EndSearch(problem, one_by_one(problem), None, None)
    search.run(40)
    shapes, compared = search.shapes, 0
    for states in search.kept[1:-1]:
        for row in range(0, len(states), 3):
            over, who = over_of(states.slots[:, row]), request_of(states.slots[:, row])
            for request in np.flatnonzero((int(states.waiting[row]) >> np.arange(7)) & 1):
                at = int(states.now[row])
                while True:
                    live = over > at
                    held = int((live * (shapes.first[who] + over - 1 - at)).sum())
                    if live.sum() < problem.slots and held + shapes.peaks[request] <= shapes.capacity:
                        break
                    at += 1
                assert states.soonest[request, row] == at
                compared += 1
    assert compared > 100
    soonest = np.array([[4], [0], [9]], dtype=np.int32)
    late = _EndSearch(long_problem(3, 3), one_by_one(long_problem(3, 3)), None, None)
    alone = late.sets.least
    assert late._steps_from(soonest) == max(9 + alone[0b100], 4 + alone[0b101])


def test_long_requests_under_scarce_memory_are_proven_and_what_a_checker_can_follow_verifies() -> None:
    problem = long_problem(2, 4)
    found = solve_small(problem, Limits(), one_by_one(problem))
    bound = found.bound(problem)
    assert (found.stopped_by, found.argument) == (StoppedBy.PROOF, "states")
    assert bound is not None
    assert verify_bound(problem, bound) is None
    ended = best_by_backward_dp(problem, Limits(), one_by_one(problem))
    assert ended.schedule.makespan(problem) == pytest.approx(bound.seconds)


def test_what_no_checker_can_follow_is_the_solvers_word() -> None:
    problem = long_problem(0, 5)
    found = best_by_backward_dp(problem, Limits(), one_by_one(problem))
    bound = found.bound(problem)
    assert bound is not None
    assert (bound.source, bound.certificate["kind"]) == ("every order from the end", "solver")
    assert bound.seconds == pytest.approx(found.schedule.makespan(problem))


def test_states_whose_rest_no_slots_can_share_out_in_time_are_not_followed() -> None:
    prompts = [64, 130, 175, 189, 189, 76, 195, 36, 114, 100, 143]
    outputs = [43, 137, 72, 7, 95, 120, 88, 173, 186, 50, 160]
    problem = problem_of(prompts, outputs, 4, CostModel(2.0, 0.005, 1.0, 0.02), 936)
    found = best_by_backward_dp(problem, Limits(work=600_000), one_by_one(problem))
    assert found.stopped_by is StoppedBy.PROOF


def test_limits_end_it_with_the_best_schedule_so_far() -> None:
    problem = long_problem(0, 11)
    start = one_by_one(problem)
    found = best_by_backward_dp(problem, Limits(work=20_000), start)
    assert found.stopped_by is StoppedBy.WORK
    assert found.bound(problem) is None
    assert found.schedule.check(problem) is None
    assert best_by_backward_dp(problem, Limits(seconds=1e-6), start).stopped_by is StoppedBy.TIME


def test_sets_are_not_listed_beyond_a_limit_nor_where_that_takes_all_of_it() -> None:
    problem = long_problem(0, 12)
    with pytest.raises(LimitReachedError):
        _EndSearch(problem, one_by_one(problem), 0.0, None)
    assert can_search_backward(problem, 2**12 * SECONDS_A_SET)
    assert not can_search_backward(problem, 2**11 * SECONDS_A_SET)


def test_what_it_does_not_take_is_known_beforehand() -> None:
    problem = long_problem(0, 6)
    assert can_search_backward(problem)
    assert not can_search_backward(replace(problem, kv_capacity=None))
    assert not can_search_backward(replace(problem, cost=CostModel(1.0, 0.0, 0.0, 0.1)))
    assert not can_search_backward(long_problem(0, 15))

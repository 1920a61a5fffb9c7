"""Requests put one by one, counted back from the end, where memory is scarce."""

from __future__ import annotations

import numpy as np
from builders import STEPS_ALONE, scarce_problem

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.solvers.exact.stage_states import best_by_states
from batchbound.solvers.result import Limits
from batchbound.solvers.search.memory.insertion import InsertionAnnealing
from batchbound.solvers.search.memory.request_profile import RequestProfile
from batchbound.solvers.search.schedule_search import search_schedule


def first_fit(problem: Problem, put: list[tuple[int, int]], request: int, least: int) -> int:
    """The first end from some step on, counted back, at which a request fits beside (request, end)s."""
    assert problem.kv_capacity is not None
    decode_steps, peak = problem.decode_steps.tolist(), problem.kv_peak.tolist()
    end = least
    while True:
        for time in range(end, end + decode_steps[request]):
            held = [peak[other] - time + at for other, at in put if at <= time < at + decode_steps[other]]
            if len(held) >= problem.slots or sum(held) + peak[request] - time + end > problem.kv_capacity:
                break
        else:
            return end
        end += 1


def test_each_is_put_where_it_first_fits_or_where_it_shares_a_stage_within_its_reach() -> None:
    for seed in range(150):
        problem, rng = scarce_problem(seed), np.random.default_rng(seed)
        profile, put, begins = RequestProfile(problem), list[tuple[int, int]](), set[int]()
        for request in np.flatnonzero(problem.decode_steps).tolist():
            decode_steps, reach = int(problem.decode_steps[request]), int(rng.choice([0, 3, 100]))
            end = least = first_fit(problem, put, request, 0)
            for begin in sorted(begins) if reach else ():
                at = begin - decode_steps
                if least <= at <= least + reach and first_fit(problem, put, request, at) == at:
                    end = at
                    break
            found = profile.put(decode_steps, int(problem.kv_peak[request]), 1, reach)
            assert found == end, (seed, request)
            put.append((request, end))
            begins.add(end + decode_steps)
            assert profile.decode_steps == max(begins)
            profile = profile.copy()


def test_what_a_change_leaves_as_it_was_is_as_if_all_were_put_anew() -> None:
    for seed in range(40):
        problem = scarce_problem(seed, capped=seed % 3 == 0)
        walk = InsertionAnnealing(problem, np.random.default_rng(seed))
        for step in range(60):
            walk.step(step / 60)
            profile = RequestProfile(problem)
            for request in walk._order:
                decode_steps, peak, prompt = walk._requests[request]
                assert walk._ends[request] == profile.put(decode_steps, peak, prompt, walk._reach), (
                    seed,
                    step,
                )


def test_two_requests_overlap_as_far_as_memory_lets_them() -> None:
    # Each holds 1 to 4 tokens. Of five there is room for 4 and 1, then the first has ended: a step is saved.
    workload = Workload.from_lengths(np.array([1, 1]), np.array([4, 4]))
    problem = Problem(workload, STEPS_ALONE, slots=2, kv_capacity=5)
    schedule = InsertionAnnealing(problem, np.random.default_rng(0)).step(0.0)
    assert schedule is not None
    assert schedule.check(problem) is None
    assert schedule.makespan(problem) == 7.0


def test_every_order_gives_a_schedule_that_keeps_the_rules() -> None:
    cost = CostModel(prefill_base=0.5, prefill_per_token=0.1, decode_base=1.0, decode_per_slot=0.1)
    for seed in range(60):
        problem = scarce_problem(seed, cost=cost, capped=seed % 3 == 0)
        walk = InsertionAnnealing(problem, np.random.default_rng(seed))
        for step in range(20):
            schedule = walk.step(step / 20)
            assert schedule is None or schedule.check(problem) is None, seed


def test_some_order_needs_the_fewest_steps_that_there_are() -> None:
    for seed in range(25):
        problem = scarce_problem(seed)
        walk = InsertionAnnealing(problem, np.random.default_rng(seed))
        found = [schedule for step in range(400) if (schedule := walk.step(step / 400)) is not None]
        proven = best_by_states(problem, Limits(), found[0])
        assert found[-1].makespan(problem) == proven.schedule.makespan(problem), seed


def test_the_search_serves_requests_of_no_step_too() -> None:
    # The two that take decode steps, 3 and 2, hold too much together; the others are prefilled behind them.
    workload = Workload.from_lengths(np.array([3, 2, 4, 2]), np.array([4, 1, 3, 1]))
    problem = Problem(workload, STEPS_ALONE, slots=3, kv_capacity=8, prefill_emits_first_token=True)
    assert problem.memory_can_run_out
    found = search_schedule(problem, iterations=200)
    assert found.schedule.check(problem) is None
    assert found.makespan == 5.0

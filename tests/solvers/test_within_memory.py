"""Stage times served within a KV capacity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.solvers.search.schedule_search import search_schedule
from batchbound.solvers.search.stages.within_memory import _Exchanges, served_within_memory

COST = CostModel(0.004, 2e-5, 0.012, 2e-5)


def job(seed: int, requests: int = 80, slots: int = 8, share: float = 0.62) -> Problem:
    """Return a job whose slots are scarcer than its memory, which can run out all the same."""
    rng = np.random.default_rng(seed)
    workload = Workload.from_lengths(rng.integers(5, 40, requests), rng.integers(20, 200, requests))
    problem = Problem(workload, COST, slots)
    peaks = np.sort(problem.kv_peak)[-slots:]
    return replace(problem, kv_capacity=int(share * peaks.sum()))


def stage_times(problem: Problem, more: float = 0.12, apart: int = 12) -> np.ndarray:
    """Return stages evenly apart, over more decode steps than slots that are never free would need."""
    least = problem.decode_steps.sum() / problem.slots
    return np.arange(0, (1.0 + more) * least + apart, apart).astype(np.int64)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_served_keeps_slots_and_every_request_whatever_memory_does(seed: int) -> None:
    problem = job(seed)
    found = served_within_memory(problem, stage_times(problem), 5.0, np.random.default_rng(0))
    assert found is not None
    assert found.check(replace(problem, kv_capacity=None)) is None


def test_memory_that_the_longest_first_would_overrun_suffices_with_other_requests_between_the_stages() -> (
    None
):
    problem = job(0)
    longest_first = np.argsort(-problem.decode_steps, kind="stable")[: problem.slots]
    assert problem.kv_peak[longest_first].sum() > problem.kv_capacity
    found = served_within_memory(problem, stage_times(problem), 5.0, np.random.default_rng(0))
    assert found is not None
    assert found.check(problem) is None


def test_stages_too_near_for_the_longest_request_serve_nothing() -> None:
    problem = job(0)
    assert served_within_memory(problem, np.array([0, 10, 20]), 5.0, np.random.default_rng(0)) is None


def test_a_last_stage_beyond_the_longest_request_is_no_obstacle() -> None:
    # Whatever starts at 0 or 11 is through before the end: no request holds anything right before it.
    workload = Workload.from_lengths([1] * 6, [1, 11, 11, 1, 11, 11])
    problem = Problem(workload, COST, 3, kv_capacity=19)
    found = served_within_memory(problem, np.array([0, 11, 23]), 5.0, np.random.default_rng(0))
    assert found is not None
    assert found.check(replace(problem, kv_capacity=None)) is None


def test_too_few_slots_at_these_times_serve_nothing() -> None:
    problem = job(0)
    longest = int(problem.decode_steps.max())
    assert served_within_memory(problem, np.array([0, longest]), 5.0, np.random.default_rng(0)) is None


def test_two_requests_change_places_where_one_holds_too_much() -> None:
    # Three decode steps each: the two large ones run together at first, 20 tokens and more where 15 fit.
    start, room, decode_steps = np.array([0, 0, 3, 3]), np.full(4, 3), np.full(4, 3)
    first = np.array([10, 10, 1, 1])
    walk = _Exchanges(start, room, decode_steps, first, 15)
    assert walk.short == (20 - 15) + (22 - 15) + (24 - 15)
    walk.run(np.random.default_rng(0))
    assert walk.short == 0
    assert sorted(walk.start.tolist()) == [0, 0, 3, 3]
    assert walk.start[0] != walk.start[1]
    assert start.tolist() == [0, 0, 3, 3]


def test_requests_change_places_only_where_each_has_the_time() -> None:
    # The small one needs four decode steps and the large ones have three: memory stays short.
    start, room = np.array([0, 0, 3]), np.array([3, 3, 4])
    walk = _Exchanges(start, room, np.array([3, 3, 4]), np.array([10, 10, 1]), 15)
    before = walk.short
    walk.run(np.random.default_rng(0))
    assert walk.short == before
    assert walk.start.tolist() == start.tolist()


def test_a_search_under_scarce_memory_uses_them_and_is_the_same_for_the_same_seed_and_work() -> None:
    problem = job(1, requests=40)
    first, second = (search_schedule(problem, iterations=30, seed=3) for _ in range(2))
    assert first.schedule.check(problem) is None
    assert first.makespan == second.makespan

"""Beam search for few requests, put in the order of their ends where memory is scarce."""

from __future__ import annotations

import numpy as np
import pytest
from builders import STEPS_ALONE, scarce_problem

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.solvers.exact.stage_states import best_by_states
from batchbound.solvers.result import Limits
from batchbound.solvers.search.memory.beam import BeamSearch, beam_pays
from batchbound.solvers.search.schedule_search import search_schedule

DEAR_STAGES = CostModel(prefill_base=5.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)


def job(
    prompts: list[int],
    outputs: list[int],
    capacity: int,
    *,
    cost: CostModel = STEPS_ALONE,
    cap: int | None = None,
) -> Problem:
    workload = Workload.from_lengths(np.array(prompts), np.array(outputs))
    return Problem(workload, cost, slots=2, kv_capacity=capacity, prefill_token_cap=cap)


def chats(count: int, slots: int, seed: int) -> Problem:
    """Return chats with memory for two fifths of what the largest, one a slot, come to."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(200), 0.8, count), 1, 3000).astype(np.int64)
    workload = Workload.from_lengths(prompts, 1 + rng.gamma(1.5, 150, count).astype(np.int64))
    cost = CostModel(0.004, 2e-5, 0.012, 2e-5)
    peaks = np.sort(Problem(workload, cost, slots).kv_peak)
    return Problem(workload, cost, slots, kv_capacity=max(int(0.4 * peaks[-slots:].sum()), int(peaks[-1])))


def found_in(problem: Problem, steps: int) -> list[Schedule]:
    beam = BeamSearch(problem, np.random.default_rng(0))
    return [schedule for _ in range(steps) if (schedule := beam.step()) is not None]


def test_two_requests_overlap_as_far_as_memory_lets_them() -> None:
    # Each holds 1 to 4 tokens. Of five there is room for 4 and 1, then the first has ended: a step is saved.
    problem = job([1, 1], [4, 4], 5)
    assert found_in(problem, 2)[-1].makespan(problem) == 7.0


def test_one_waits_to_share_a_stage_where_stages_are_dear() -> None:
    problem = job([1, 1], [2, 4], 100, cost=DEAR_STAGES)
    schedule = found_in(problem, 2)[-1]
    assert schedule.prefill_stages() == 1
    assert schedule.makespan(problem) == 9.0


def test_a_stage_takes_no_more_than_the_token_cap() -> None:
    problem = job([3, 3], [4, 4], 100, cost=DEAR_STAGES, cap=5)
    schedule = found_in(problem, 2)[-1]
    assert schedule.check(problem) is None
    assert schedule.prefill_stages() == 2


@pytest.mark.parametrize("capped", [False, True])
def test_every_schedule_keeps_the_rules(capped: bool) -> None:
    cost = CostModel(prefill_base=0.5, prefill_per_token=0.1, decode_base=1.0, decode_per_slot=0.1)
    for seed in range(40):
        problem = scarce_problem(seed, cost=cost, capped=capped)
        for schedule in found_in(problem, 60):
            assert schedule.check(problem) is None, seed


def test_each_schedule_is_better_than_the_last() -> None:
    problem = chats(40, 4, 1)
    makespans = [schedule.makespan(problem) for schedule in found_in(problem, 600)]
    assert len(makespans) > 1
    assert makespans == sorted(makespans, reverse=True)


def test_hardly_any_small_job_is_left_with_more_steps_than_it_needs() -> None:
    late = 0
    for seed in range(25):
        problem = scarce_problem(seed)
        found = found_in(problem, 120)[-1]
        proven = best_by_states(problem, Limits(), found)
        late += found.makespan(problem) > proven.schedule.makespan(problem)
    assert late <= 1


def test_many_requests_or_slots_are_left_to_others() -> None:
    assert beam_pays(chats(100, 16, 0))
    assert not beam_pays(chats(1000, 16, 0))
    assert not beam_pays(chats(300, 64, 0))


@pytest.mark.slow
def test_the_search_is_no_later_than_the_first_beam() -> None:
    problem = chats(60, 4, 0)
    first = found_in(problem, 60)[0]
    assert search_schedule(problem, iterations=1500).makespan <= first.makespan(problem)

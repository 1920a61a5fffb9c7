"""Prefill stages given up where their requests fit in at others."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.solvers.search.backward import backward_schedule
from batchbound.solvers.search.drop_stages import drop_stages

COST = CostModel(1.0, 0.0, 1.0, 0.0)


def test_a_request_moves_to_a_stage_that_has_a_slot_for_it() -> None:
    # The short one begins alone in decode step 2, but may as well begin with the long one.
    problem = Problem(Workload.from_lengths([1, 1], [6, 2]), COST, slots=2)
    merged = drop_stages(problem, Schedule.from_bins(problem, [0, 1], [2, 4]))
    assert merged.bin_of.tolist() == [0, 0]
    assert merged.decode_steps.tolist() == [6]


def test_memory_and_the_token_cap_keep_a_stage() -> None:
    workload = Workload.from_lengths([5, 5], [6, 2])
    # Together they would prefill 10 tokens, and hold 12 in their second round.
    scarce = Problem(workload, COST, slots=2, kv_capacity=11)
    capped = Problem(workload, COST, slots=2, prefill_token_cap=9)
    for problem in (scarce, capped):
        schedule = Schedule.from_bins(problem, [0, 1], [6, 2])
        assert drop_stages(problem, schedule).prefill_stages() == 2


def test_with_time_for_it_a_stage_of_many_requests_is_given_up() -> None:
    problem = Problem(Workload.from_lengths([1] * 10, [6] * 4 + [2] * 6), COST, slots=10)
    schedule = Schedule.from_bins(problem, [0] * 4 + [1] * 6, [2, 4])
    assert drop_stages(problem, schedule).prefill_stages() == 2
    assert drop_stages(problem, schedule, lambda: True, wide=True).prefill_stages() == 2
    assert drop_stages(problem, schedule, wide=True).prefill_stages() == 1


def test_no_stage_is_given_up_where_there_is_no_time() -> None:
    problem = Problem(Workload.from_lengths([1, 1], [6, 2]), COST, slots=2)
    schedule = Schedule.from_bins(problem, [0, 1], [2, 4])
    assert drop_stages(problem, schedule, lambda: True).prefill_stages() == 2
    assert drop_stages(problem, schedule).prefill_stages() == 1


def test_a_stage_of_which_one_request_finds_no_other_is_left_as_it_was() -> None:
    problem = Problem(Workload.from_lengths([1] * 4, [6, 2, 2, 2]), COST, slots=2)
    schedule = Schedule.from_bins(problem, [0, 0, 1, 2], [2, 2, 2])
    merged = drop_stages(problem, schedule)
    assert merged.check(problem) is None
    assert merged.decode_steps.tolist() == [2, 2, 2]


@given(st.integers(2, 40), st.integers(1, 8), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_nothing_gets_worse_and_every_rule_is_kept(
    count: int, slots: int, seed: int, capped: bool, emits: bool
) -> None:
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(1, 30, count), rng.integers(1, 40, count)
    peaks = np.sort(prompts + outputs)[::-1]
    problem = Problem(
        Workload.from_lengths(prompts, outputs),
        CostModel(0.5, 0.01, 1.0, 0.1),
        slots,
        kv_capacity=max(int(0.5 * peaks[:slots].sum()), int(peaks[0])),
        prefill_token_cap=int(prompts.max() * 2) if capped else None,
        prefill_emits_first_token=emits,
    )
    if not problem.decode_steps.any():
        return
    made = backward_schedule(problem)
    assert made is not None
    made = made.without_idle_steps(problem)
    merged = drop_stages(problem, made)
    assert merged.check(problem) is None
    assert merged.prefill_stages() <= made.prefill_stages()
    assert merged.makespan(problem) <= made.makespan(problem) + 1e-9

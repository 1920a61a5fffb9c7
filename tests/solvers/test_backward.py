"""Schedules built from their end: they keep every rule, and fill memory better than forwards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.bounds.makespan import best_bound
from batchbound.solvers.search.backward import backward_schedule
from batchbound.solvers.search.constructive import ski_rental_schedule


def scarce(count: int, slots: int, seed: int, share: float = 0.4) -> Problem:
    """Return a job whose memory holds a share of what its largest requests, one a slot, come to."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(4.0, 0.8, count), 1, 1000).astype(np.int64)
    outputs = np.clip(rng.gamma(1.5, 60, count), 1, 600).astype(np.int64)
    workload, cost = Workload.from_lengths(prompts, outputs), CostModel(0.004, 2e-5, 0.012, 2e-5)
    peaks = np.sort(prompts + outputs)[::-1]
    return Problem(workload, cost, slots, kv_capacity=max(int(share * peaks[:slots].sum()), int(peaks[0])))


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 10**6),
    st.booleans(),
    st.none() | st.integers(0, 400),
)
def test_every_schedule_keeps_every_rule(
    count: int, slots: int, seed: int, emits: bool, over: int | None
) -> None:
    drawn = scarce(count, slots, seed)
    longest = int(drawn.prompt_tokens.max())
    problem = Problem(
        drawn.workload,
        drawn.cost,
        slots,
        kv_capacity=drawn.kv_capacity,
        prefill_token_cap=None if over is None else longest + over,
        prefill_emits_first_token=emits,
    )
    if not problem.decode_steps.any():
        assert backward_schedule(problem) is None
        return
    schedule = backward_schedule(problem)
    assert schedule is not None
    assert schedule.without_idle_steps(problem).check(problem) is None


def test_what_frees_memory_step_by_step_lets_the_next_one_in() -> None:
    # Each holds 1, 2, 3, then 4 tokens, and there is room for 5: one may begin in the last step of another.
    # So they begin in decode steps 0, 3 and 6, and the last one ends with round 10.
    problem = Problem(
        Workload.from_lengths([1] * 3, [4] * 3), CostModel(0.0, 0.0, 1.0, 0.0), slots=2, kv_capacity=5
    )
    schedule = backward_schedule(problem)
    assert schedule is not None
    assert schedule.check(problem) is None
    assert int(schedule.decode_steps.sum()) == 10


@pytest.mark.parametrize("seed", range(3))
def test_scarce_memory_is_filled_better_than_forwards(seed: int) -> None:
    problem = scarce(300, 16, seed)
    backward = backward_schedule(problem)
    assert backward is not None
    bound = best_bound(problem)
    gap = bound.gap(backward.makespan(problem))
    assert gap < 0.08
    assert gap < bound.gap(ski_rental_schedule(problem).makespan(problem))


def test_a_construction_ends_with_the_time() -> None:
    asked = list[int]()

    def late_at_third_request() -> bool:
        asked.append(1)
        return len(asked) == 3

    assert backward_schedule(scarce(40, 4, 0), late_at_third_request) is None
    assert len(asked) == 3

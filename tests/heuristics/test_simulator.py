"""The simulator's clock, tokens and slots, by hand and against the cost of a schedule."""

from __future__ import annotations

import math

import numpy as np
import pytest
from builders import UNIT, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.simulator import Simulator

COST = CostModel(1.0, 0.5, 2.0, 0.25, decode_per_kv_token=0.125)


def test_a_job_of_two_requests_by_hand() -> None:
    simulator = Simulator(problem_of([4, 2], [2, 3], 2, COST))
    stage, done = simulator.prefill([0, 1], [1, 0])
    assert (stage.kind, stage.start, stage.end, stage.tokens, done) == ("prefill", 0.0, 4.0, 6, [])
    # Two decode steps until the first is done: 6 and then 8 tokens of keys and values.
    stage, done = simulator.decode(5, math.inf)
    assert (stage.decode_steps, stage.active, stage.tokens, stage.kv_tokens, done) == (2, 2, 4, 14, [0])
    assert stage.seconds == pytest.approx(2 * 2.5 + 0.125 * 14)
    stage, done = simulator.decode(5, math.inf)
    assert (stage.decode_steps, stage.active, stage.kv_tokens, done) == (1, 1, 4, [1])
    assert simulator.time == pytest.approx(4.0 + 6.75 + 2.25 + 0.5)


def test_a_burst_ends_at_the_steps_asked_for_and_after_the_time_given() -> None:
    simulator = Simulator(problem_of([1], [9], 1, UNIT))
    simulator.prefill([0], [0])
    assert simulator.decode(2, math.inf)[0].decode_steps == 2
    assert simulator.decode(5, until=5.0)[0].decode_steps == 2, "the second ends at five"
    assert simulator.decode(5, until=5.5)[0].decode_steps == 1, "at least one, though it is late already"


def test_true_lengths_decide_when_a_request_is_done() -> None:
    simulator = Simulator(problem_of([1, 1], [9, 9], 2, UNIT), np.array([2, 1]))
    simulator.prefill([0, 1], [0, 1])
    assert simulator.decode(9, math.inf)[1] == [1]
    assert simulator.decode(9, math.inf)[1] == [0]


def test_a_request_whose_only_token_is_that_of_prefill_is_done_at_once() -> None:
    simulator = Simulator(problem_of([1, 1], [1, 2], 1, UNIT, prefill_emits_first_token=True))
    assert simulator.prefill([0], [0])[1] == [0]
    assert simulator.prefill([1], [0])[1] == []
    assert simulator.decode(3, math.inf)[1] == [1]


@pytest.mark.parametrize("lengths", [[1], [0, 2], [1.5, 2.0], [[1, 2]]])
def test_true_lengths_are_a_whole_number_for_each_request(lengths: list[float]) -> None:
    with pytest.raises(ValueError, match="output_tokens are not 2 whole numbers of at least one"):
        simulate(problem_of([1, 1], [2, 2], 2), "lpt", np.array(lengths))


def test_an_evicted_request_is_prefilled_with_what_it_had() -> None:
    simulator = Simulator(problem_of([4], [3], 1, COST))
    simulator.prefill([0], [0])
    simulator.decode(2, math.inf)
    simulator.evict([0])
    stage, _ = simulator.prefill([0], [0])
    assert stage.tokens == 6
    stage, done = simulator.decode(3, math.inf)
    assert (stage.decode_steps, stage.kv_tokens, done) == (1, 6, [0])


def test_waiting_never_sets_the_clock_back() -> None:
    simulator = Simulator(problem_of([1], [1], 1, UNIT))
    simulator.wait(3.0)
    simulator.wait(1.0)
    assert simulator.time == 3.0
    assert simulator.describe()["name"] == "simulator"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(["fcfs", "lpt", "lpt-ski"]),
)
def test_a_simulated_job_takes_what_its_schedule_costs(
    lengths: list[tuple[int, int]], slots: int, first: bool, policy: str
) -> None:
    prompts, outputs = zip(*lengths, strict=True)
    problem = problem_of(prompts, outputs, slots, COST, prefill_emits_first_token=first)
    trace = simulate(problem, policy_named(policy, problem))
    schedule = schedule_of(trace)
    assert schedule.check(problem) is None
    assert trace.makespan == pytest.approx(schedule.makespan(problem))
    assert trace.tokens.tolist() == list(outputs)
    assert sum(stage.kv_tokens for stage in trace.stages if stage.kind == "decode") == problem.kv_token_steps

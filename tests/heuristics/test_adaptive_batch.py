"""The adaptive batch size: as many as fit, fewer past a threshold, more again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.heuristics.queues.adaptive_batch import AdaptiveBatch, smallest_first
from batchbound.heuristics.simulate import simulate

UNIT = CostModel(0.0, 0.0, 1.0, 0.0)


def test_as_many_run_as_predicted_memory_allows() -> None:
    # Each comes to hold 5 + 5 tokens; 30 leave room for three of the eight.
    problem = Problem(Workload.from_lengths([5] * 8, [5] * 8), UNIT, 8, kv_capacity=30)
    trace = simulate(problem, AdaptiveBatch(problem, threshold=1.0))
    assert trace.evictions == 0
    assert max(stage.active for stage in trace.stages) == 3


def test_the_batch_shrinks_when_answers_outgrow_their_predictions_and_grows_again() -> None:
    problem = Problem(Workload.from_lengths([10] * 12, [5] * 12), CostModel.paper(), 12, kv_capacity=150)
    trace = simulate(problem, AdaptiveBatch(problem), np.full(12, 40))
    active = [stage.active for stage in trace.stages if stage.kind == "decode"]
    assert trace.evictions > 0
    lowest = active.index(min(active[:-1]))
    assert max(active[:lowest]) > active[lowest] < max(active[lowest:])
    held = [stage.kv_tokens / stage.decode_steps for stage in trace.stages if stage.kind == "decode"]
    assert max(held) <= 150


def test_the_smallest_go_first() -> None:
    problem = Problem(Workload.from_lengths([9, 1, 5], [9, 1, 5]), UNIT, 1)
    assert smallest_first(problem).tolist() == [1, 2, 0]
    assert simulate(problem, AdaptiveBatch(problem)).finished.tolist() == [15, 1, 6]


def test_shares_out_of_order_are_refused() -> None:
    problem = Problem(generate("table3", 0, 5), UNIT, 2)
    with pytest.raises(ValueError, match="not in order"):
        AdaptiveBatch(problem, threshold=0.5, resume=0.8)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=20
    ),
    capacity=st.integers(40, 90),
    first=st.booleans(),
)
def test_every_answer_comes_once_and_memory_is_kept_to(
    lengths: list[tuple[int, int, int]], capacity: int, first: bool
) -> None:
    prompts, predicted, truth = np.array(lengths).T
    problem = Problem(
        Workload.from_lengths(prompts, predicted),
        CostModel.paper(),
        6,
        kv_capacity=capacity,
        prefill_emits_first_token=first,
    )
    trace = simulate(problem, AdaptiveBatch(problem), truth)
    assert trace.tokens.tolist() == truth.tolist()
    for stage in trace.stages:
        if stage.kind == "decode":
            assert stage.kv_tokens / stage.decode_steps <= capacity

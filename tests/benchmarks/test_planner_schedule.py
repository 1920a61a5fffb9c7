"""A served job as a schedule of the planner's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_schedule import serving_schedule

from batchbound.data.costs.cost import CostModel
from batchbound.data.costs.iteration_cost import MixedCost
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.serving.baselines import Vllm
from batchbound.heuristics.serving.econoserve.sizes import EconoServeSizes
from batchbound.heuristics.serving.registry import ServingOptions, serving_policy
from batchbound.heuristics.serving.simulation import simulate_serving

UNIT = MixedCost(1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, swap_per_token=0.5, transfer_per_token=0.25)
"""Every iteration takes a second."""
EXACT = EconoServeSizes(padding=0.0, reserved=0.0, buffer=0.0, forward_size=100)


@pytest.mark.parametrize("name", ["orca", "multires", "sync-coupled", "econoserve-d", "econoserve"])
@given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_an_uninterrupted_job_is_a_schedule_the_planner_accepts(
    name: str, lengths: list[tuple[int, int]]
) -> None:
    requests = Workload.from_lengths(*(list(column) for column in zip(*lengths, strict=True)))
    policy = serving_policy(name, ServingOptions(21, 20, EXACT))
    run = simulate_serving(requests, policy, UNIT, 50, block_tokens=1)
    problem = Problem(requests, CostModel.paper(), 12, kv_capacity=50, prefill_emits_first_token=True)
    schedule = serving_schedule(run, problem)
    assert schedule is not None
    assert schedule.check(problem) is None
    assert len(schedule.active(problem)) <= int((run.decodes > 0).sum())


def test_requests_without_decode_steps_have_a_stage_for_each_iteration() -> None:
    requests = Workload.from_lengths([1, 1, 4, 9, 9, 9, 9, 9], [1] * 8)
    run = simulate_serving(
        requests, serving_policy("sync-coupled", ServingOptions(21, 20, EXACT)), UNIT, 50, block_tokens=1
    )
    problem = Problem(requests, CostModel.paper(), 12, kv_capacity=50, prefill_emits_first_token=True)
    schedule = serving_schedule(run, problem)
    assert schedule is not None, "51 tokens in one stage would not fit"
    assert schedule.bins == len(set(run.finished.tolist()))


def test_a_prompt_that_fitted_in_chunks_alone_is_no_schedule() -> None:
    requests = Workload.from_lengths([3, 5, 7, 7, 7, 9], [7, 5, 1, 3, 3, 4])
    policy = serving_policy("pipelined", ServingOptions(21, 20, EXACT))
    run = simulate_serving(requests, policy, UNIT, 50, block_tokens=1)
    problem = Problem(requests, CostModel.paper(), 12, kv_capacity=50, prefill_emits_first_token=True)
    assert run.preempted.sum() == 0
    assert serving_schedule(run, problem) is None


def test_an_interrupted_job_is_no_schedule() -> None:
    requests = Workload.from_lengths([4, 4], [6, 6])
    run = simulate_serving(requests, Vllm(watermark=0.0), UNIT, 10, block_tokens=1)
    problem = Problem(requests, CostModel.paper(), 2, kv_capacity=10, prefill_emits_first_token=True)
    assert serving_schedule(run, problem) is None

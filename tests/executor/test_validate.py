"""Simulating mixed iterations, and judging the simulation against measured runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.costs.layer_profile import LayerProfile, ModelShape, Operation
from batchbound.data.files.disk import InputError
from batchbound.data.problem import Problem
from batchbound.data.readers.measured_run import read_vllm_run
from batchbound.data.readers.profile_readers import read_layer_profiles
from batchbound.data.workload import Workload
from batchbound.executor.profiling.validate import validate_run, validate_trace
from batchbound.executor.serving.mixed_iterations import MixedPolicyError, simulate_iterations
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.serving.chunked_prefill import ChunkedPrefill, Iteration, MixedState
from batchbound.heuristics.serving.kv_blocks import BlockPool
from batchbound.heuristics.simulate import simulate
from batchbound.models.exegpt.layer_cost import LayerCost


def _one_second(contexts: Sequence[int], chunks: Sequence[tuple[int, int]], drawn: int) -> float:
    assert drawn <= len(contexts) + len(chunks)
    return 1.0


def test_a_prompt_longer_than_the_budget_is_encoded_in_chunks() -> None:
    workload = Workload.from_lengths([250], [3])
    trace = simulate_iterations(workload, ChunkedPrefill(100, 4), _one_second, BlockPool(None))
    assert [stage.kind for stage in trace.stages] == ["prefill"] * 3 + ["decode"] * 2
    assert [stage.tokens for stage in trace.stages] == [100, 100, 50, 1, 1]
    assert trace.first_token.tolist() == [3.0]
    assert trace.finished.tolist() == [5.0]


def test_running_requests_come_before_waiting_ones() -> None:
    workload = Workload.from_lengths([10, 95], [4, 1])
    trace = simulate_iterations(workload, ChunkedPrefill(100, 4), _one_second, BlockPool(None))
    # 10 and 90 of 95; then one decode and the 5 left.
    assert [stage.tokens for stage in trace.stages] == [100, 6, 1, 1]
    assert trace.finished.tolist() == [4.0, 2.0]


def test_no_more_requests_run_than_sequences_allow() -> None:
    workload = Workload.from_lengths([10, 10, 10], [2, 2, 2])
    trace = simulate_iterations(workload, ChunkedPrefill(100, 2), _one_second, BlockPool(None))
    assert trace.finished.tolist() == [2.0, 2.0, 4.0]


def test_an_iteration_decided_ahead_sees_a_finished_request_one_iteration_late() -> None:
    workload = Workload.from_lengths([10, 10], [1, 1])
    at_once = simulate_iterations(workload, ChunkedPrefill(100, 1), _one_second, BlockPool(16, 16))
    assert at_once.finished.tolist() == [1.0, 2.0]
    ahead = simulate_iterations(
        Workload.from_lengths([10, 10, 10], [1, 2, 1]),
        ChunkedPrefill(100, 3),
        _one_second,
        BlockPool(32),
        ahead=True,
    )
    # The third needs the block of the first, which is free only when the second iteration has started.
    assert ahead.finished.tolist() == [1.0, 2.0, 3.0]


def test_the_request_admitted_last_is_put_back_when_blocks_run_out() -> None:
    workload = Workload.from_lengths([16, 16], [20, 20])
    pool = BlockPool(48, 16, reuse=False)
    trace = simulate_iterations(workload, ChunkedPrefill(100, 4), _one_second, pool)
    assert trace.evictions == 1
    assert trace.finished[0] == 20.0
    assert trace.finished[1] > 20.0
    assert trace.tokens.tolist() == [20, 20]


def test_a_request_put_back_takes_its_own_blocks_up_again() -> None:
    pool = BlockPool(64, 16)
    assert pool.grow(0, 40)
    pool.release(0, tokens=40)
    assert pool.grow(1, 20)  # the untouched block, and the one only partly filled
    assert pool.cached_tokens(0, 41) == 32
    assert pool.grow(1, 40)
    assert pool.cached_tokens(0, 41) == 16
    assert pool.resume(0, 41) == 16
    assert pool.free == 0


def test_one_token_is_computed_even_if_all_blocks_are_still_there() -> None:
    pool = BlockPool(64, 16)
    pool.grow(0, 32)
    pool.release(0, tokens=32)
    assert pool.cached_tokens(0, 32) == 16


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 90), st.sampled_from(("grow", "free", "back"))),
        max_size=30,
    )
)
def test_no_block_is_lost_or_made(actions: list[tuple[int, int, str]]) -> None:
    pool = BlockPool(10 * 8, 8)
    tokens = dict.fromkeys(range(5), 0)
    for request, amount, action in actions:
        if action == "grow":
            if pool.held(request) == 0:
                tokens[request] = pool.resume(request, tokens[request] + amount + 1)
            if pool.grow(request, tokens[request] + amount):
                tokens[request] += amount
        else:
            pool.release(request, tokens=tokens[request] if action == "back" else 0)
        assert pool.free + sum(pool.held(each) for each in range(5)) == pool.blocks
        assert sum(count for _, count in pool._freed) == pool.free


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(8, 64),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
def test_every_request_gets_all_its_tokens(
    lengths: list[tuple[int, int]], budget: int, sequences: int, ahead: bool, reuse: bool
) -> None:
    workload = Workload.from_lengths(*zip(*lengths, strict=True))
    pool = BlockPool(96, 8, reuse=reuse)
    trace = simulate_iterations(workload, ChunkedPrefill(budget, sequences), _one_second, pool, ahead=ahead)
    assert (trace.tokens == workload.output_tokens).all()
    assert (trace.finished >= trace.first_token).all()
    assert (trace.finished <= trace.makespan).all()


def test_a_policy_that_does_nothing_is_refused() -> None:
    def idle(state: MixedState) -> Iteration:
        return Iteration()

    with pytest.raises(MixedPolicyError, match="nothing is run while 1 requests are unserved"):
        simulate_iterations(Workload.from_lengths([1], [1]), idle, _one_second, BlockPool(None))


def test_a_policy_that_takes_blocks_there_are_not_is_refused() -> None:
    def greedy(state: MixedState) -> Iteration:
        return Iteration([(state.waiting[0], 100)])

    with pytest.raises(MixedPolicyError, match="no blocks"):
        simulate_iterations(Workload.from_lengths([100], [1]), greedy, _one_second, BlockPool(32))


def test_a_trace_at_its_own_costs_has_no_error() -> None:
    cost = CostModel(0.02, 0.001, 0.03, 0.002, decode_per_kv_token=1e-5)
    problem = Problem(Workload.from_lengths([5, 9, 7], [4, 2, 6]), cost, 2)
    trace = simulate(problem, policy_named("fcfs", problem))
    same = validate_trace(trace, cost)
    assert all(abs(metric.error) < 1e-9 for metric in same.metrics.values())
    assert same.order_correlation == pytest.approx(1.0)
    doubled = CostModel(0.04, 0.002, 0.06, 0.004, decode_per_kv_token=2e-5)
    assert validate_trace(trace, doubled).metrics["makespan_s"].error == pytest.approx(1.0)


def _run_folder(folder: Path) -> Path:
    folder.mkdir()
    meta = {"model": "m", "engine_kwargs": {"max_num_seqs": 4, "max_num_batched_tokens": 64}}
    (folder / "meta.json").write_text(json.dumps(meta))
    rows = [
        {"request_id": f"r{i}", "input_toks": 20, "output_toks": 3 + i, "queued_ts": 5.0 + i}
        | {"first_token_ts": 5.5 + i, "last_token_ts": 9.0 + i}
        for i in range(3)
    ]
    (folder / "requests.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return folder


def test_a_measured_run_is_replayed_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ModelShape("m", 2, 8, 2, 2, 4, 16, 32)
    dense = Operation("dense", "both", ("tokens",), np.array([[1.0], [64.0]]), np.array([0.01, 0.02]))
    LayerProfile(shape, "toy", 0.0, 1, (dense,), "made up").save(tmp_path / "profile.json")
    words = [
        "validate",
        str(_run_folder(tmp_path / "toy-m")),
        "--profile",
        str(tmp_path / "profile.json"),
        "--json",
    ]
    assert main(words) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["requests"] == 3
    assert value["metrics"]["makespan_s"]["measured"] == pytest.approx(6.0)
    # The last prompt arrives after 2 s and takes one iteration, its answer four more.
    first = 2 * (0.01 + 0.01 * 19 / 63)
    assert value["metrics"]["makespan_s"]["simulated"] == pytest.approx(2.0 + first + 4 * 0.02, abs=1e-3)


def test_a_run_without_a_number_is_refused_by_line_and_field(tmp_path: Path) -> None:
    folder = _run_folder(tmp_path / "toy-m")
    with (folder / "requests.jsonl").open("a") as stream:
        stream.write('{"input_toks": 1, "output_toks": null}\n')
    with pytest.raises(InputError, match=r"line 4, field 'output_toks': None is not a number"):
        read_vllm_run(folder)


@pytest.mark.parametrize(
    ("within", "name"),
    [("engine_kwargs", "max_num_seqs"), ("kv_cache", "block_size"), ("kv_cache", "num_kv_tokens")],
)
def test_a_size_of_a_run_that_is_none_is_named(within: str, name: str, tmp_path: Path) -> None:
    folder = _run_folder(tmp_path / "toy-m")
    meta = json.loads((folder / "meta.json").read_text())
    meta[within] = {**meta.get(within, {}), name: -1}
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(InputError, match=rf"meta.json, field '{within}.{name}': -1 is not at least 1"):
        read_vllm_run(folder)


def test_a_vllm_run_without_a_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(_run_folder(tmp_path / "toy-m"))]) == 2
    assert "--profile" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["RTX4090", "RTXPRO6000"])
def test_the_simulation_is_within_five_percent_of_a_measured_vllm_run(device: str, public_data: Path) -> None:
    folder = public_data / "vllm_runs" / f"{device}-Llama-3.1-8B"
    profile = read_layer_profiles(public_data / "layer_profiles" / f"{device}-Llama-3.1-8B-tp1")
    validation = validate_run(read_vllm_run(folder), LayerCost(profile))
    assert abs(validation.metrics["makespan_s"].error) < 0.05
    assert abs(validation.metrics["tokens_per_s"].error) < 0.05
    assert abs(validation.metrics["tpot_mean_s"].error) < 0.05
    assert validation.order_correlation > 0.99

"""vLLM's iterations, simulated, and the simulation judged against measured runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.files.disk import InputError
from batchbound.data.problem import Problem
from batchbound.data.readers.measured_run import read_vllm_run
from batchbound.data.readers.profile_readers import read_layer_profiles
from batchbound.data.workload import Workload
from batchbound.executor.profiling.validate import validate_run, validate_trace
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.serving.chunked_prefill import ChunkedPrefill
from batchbound.heuristics.serving.device import DeviceBatch
from batchbound.heuristics.serving.kv_ledger import KvLedger, KvLedgerError
from batchbound.heuristics.serving.policy import ServingPolicy, ServingState, ServingStep
from batchbound.heuristics.serving.simulation import ServingError, ServingRun, serve_on_device
from batchbound.heuristics.simulate import simulate


class OneSecond:
    """A device whose every iteration takes a second."""

    def run(self, work: DeviceBatch) -> float:
        """Return the second."""
        assert len(work.decodes) <= work.drawn <= len(work.decodes) + len(work.prefill)
        return 1.0


def replayed(
    requests: Workload,
    policy: ServingPolicy,
    capacity: int = 10_000,
    *,
    block_tokens: int = 16,
    reuse: bool = True,
    ahead: bool = False,
) -> ServingRun:
    ledger = KvLedger(capacity, len(requests), block_tokens, reuse=reuse)
    return serve_on_device(requests, policy, OneSecond(), ledger, ahead=ahead)


def test_a_prompt_longer_than_the_budget_is_encoded_in_chunks() -> None:
    run = replayed(Workload.from_lengths([250], [3]), ChunkedPrefill(100, 4))
    assert run.prompt_tokens.tolist() == [100, 100, 50, 0, 0]
    assert run.decodes.tolist() == [0, 0, 0, 1, 1]
    assert run.first_token.tolist() == [3.0]
    assert run.finished.tolist() == [5.0]


def test_running_requests_come_before_waiting_ones() -> None:
    run = replayed(Workload.from_lengths([10, 95], [4, 1]), ChunkedPrefill(100, 4))
    # 10 and 90 of 95; then one decode and the 5 left.
    assert (run.prompt_tokens + run.decodes).tolist() == [100, 6, 1, 1]
    assert run.finished.tolist() == [4.0, 2.0]


def test_no_more_requests_run_than_sequences_allow() -> None:
    run = replayed(Workload.from_lengths([10, 10, 10], [2, 2, 2]), ChunkedPrefill(100, 2))
    assert run.finished.tolist() == [2.0, 2.0, 4.0]


def test_fewer_tokens_than_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens an iteration are fewer than 4 sequences"):
        ChunkedPrefill(3, 4)


def test_an_iteration_decided_ahead_sees_a_finished_request_one_iteration_late() -> None:
    at_once = replayed(Workload.from_lengths([10, 10], [1, 1]), ChunkedPrefill(100, 1), 16)
    assert at_once.finished.tolist() == [1.0, 2.0]
    requests = Workload.from_lengths([10, 10, 10], [1, 2, 1])
    # The third needs the block of the first, which is free only when the second iteration has started.
    assert replayed(requests, ChunkedPrefill(100, 3), 32, ahead=True).finished.tolist() == [1.0, 2.0, 3.0]
    assert replayed(requests, ChunkedPrefill(100, 3), 32).finished.tolist() == [1.0, 2.0, 2.0]


def test_an_iteration_decided_ahead_does_not_see_who_came_meanwhile() -> None:
    requests = replace(Workload.from_lengths([4, 4], [9, 1]), arrival=np.array([0.0, 0.5]))
    assert replayed(requests, ChunkedPrefill(100, 2)).finished.tolist() == [9.0, 2.0]
    assert replayed(requests, ChunkedPrefill(100, 2), ahead=True).finished.tolist() == [9.0, 3.0]


def test_the_request_admitted_last_is_put_back_when_blocks_run_out() -> None:
    requests = Workload.from_lengths([16, 16], [20, 20])
    run = replayed(requests, ChunkedPrefill(100, 4), 48, reuse=False)
    assert run.preempted.tolist() == [0, 1]
    assert run.finished[0] == 20.0
    assert run.finished[1] > 20.0
    # The second and its 17th token are computed anew.
    assert run.prompt_tokens.sum() == 16 + 16 + 17


def test_a_request_put_back_takes_its_own_blocks_up_again() -> None:
    ledger = KvLedger(64, 2, 16, reuse=True)
    assert ledger.grow(0, 40)
    ledger.release(0, tokens=40)
    assert ledger.grow(1, 20)  # the untouched block, and the one only partly filled
    assert ledger.cached_tokens(0, 41) == 32
    assert ledger.grow(1, 40)
    assert ledger.cached_tokens(0, 41) == 16
    assert ledger.resume(0, 41) == 16
    assert (ledger.free, ledger.room.tolist()) == (0, [16, 48])


def test_one_token_is_computed_even_if_all_blocks_are_still_there() -> None:
    ledger = KvLedger(64, 1, 16, reuse=True)
    ledger.grow(0, 32)
    ledger.release(0, tokens=32)
    assert ledger.cached_tokens(0, 32) == 16


def test_a_ledger_that_hands_blocks_out_by_their_content_lends_none() -> None:
    ledger = KvLedger(64, 2, 16, reuse=True)
    ledger.grow(0, 32)
    with pytest.raises(KvLedgerError, match="cannot be lent"):
        ledger.lend(0, 1, start=16, tokens=16)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 90), st.sampled_from(("grow", "free", "back"))),
        max_size=30,
    )
)
def test_no_block_is_lost_or_made(actions: list[tuple[int, int, str]]) -> None:
    ledger = KvLedger(10 * 8, 5, 8, reuse=True)
    tokens = dict.fromkeys(range(5), 0)
    for request, amount, action in actions:
        if action == "grow":
            if request not in ledger.own:
                tokens[request] = ledger.resume(request, tokens[request] + amount + 1)
            if ledger.grow(request, tokens[request] + amount):
                tokens[request] += amount
        else:
            ledger.release(request, tokens=tokens[request] if action == "back" else 0)
        ledger.check(np.arange(5), ledger.room)
        assert ledger._freed is not None
        assert sum(blocks for _, blocks in ledger._freed._queue) == ledger.free


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
    requests = Workload.from_lengths(*zip(*lengths, strict=True))
    policy = ChunkedPrefill(budget, sequences)
    run = replayed(requests, policy, 96, block_tokens=8, reuse=reuse, ahead=ahead)
    assert (run.tokens == requests.output_tokens).all()
    assert (run.finished >= run.first_token).all()
    assert (run.prompt_tokens + run.decodes).max() <= budget


def test_a_policy_that_takes_up_what_nobody_gave_back_is_refused() -> None:
    def greedy(state: ServingState) -> ServingStep:
        return ServingStep(prefill=[(0, 1)], resume=[(0, 16)])

    with pytest.raises(ServingError, match="takes up 16 tokens that it has no room for"):
        replayed(Workload.from_lengths([17], [1]), greedy)


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
    with pytest.raises(InputError, match=r"line 4, field 'output_toks': None is not a whole number"):
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


def test_a_trace_with_a_request_that_never_finished_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = Problem(Workload.from_lengths([2, 2], [2, 3]), CostModel(0.0, 1.0, 0.0, 1.0), 2)
    trace = simulate(problem, policy_named("fcfs", problem))
    replace(trace, finished=np.array([trace.finished[0], np.nan])).save(tmp_path / "trace.jsonl")
    assert main(["validate", str(tmp_path / "trace.jsonl"), "--cost", "paper"]) == 2
    assert "one that never finished" in capsys.readouterr().err


@pytest.mark.parametrize("device", mostly_slow(["RTX4090", "RTXPRO6000"], fast=["RTXPRO6000"]))
def test_the_simulation_is_within_five_percent_of_a_measured_vllm_run(device: str, public_data: Path) -> None:
    folder = public_data / "vllm_runs" / f"{device}-Llama-3.1-8B"
    profile = read_layer_profiles(public_data / "layer_profiles" / f"{device}-Llama-3.1-8B-tp1")
    validation = validate_run(read_vllm_run(folder), profile)
    assert abs(validation.metrics["makespan_s"].error) < 0.05
    assert abs(validation.metrics["tokens_per_s"].error) < 0.05
    assert abs(validation.metrics["tpot_mean_s"].error) < 0.05
    assert validation.order_correlation > 0.99

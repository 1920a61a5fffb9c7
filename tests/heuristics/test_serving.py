"""Serving requests as they arrive, in the simulator, by every policy."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.costs.iteration_cost import MixedCost, read_distserve_cost
from batchbound.data.files.disk import InputError
from batchbound.data.workload import Workload, numbered_ids
from batchbound.heuristics.serving.baselines import MultiRes, Sarathi, Vllm
from batchbound.heuristics.serving.econoserve.sizes import EconoServeSizes
from batchbound.heuristics.serving.kv_ledger import KvLedgerError
from batchbound.heuristics.serving.max_allocation import Orca, ShortestRemaining
from batchbound.heuristics.serving.policy import ServingState, ServingStep
from batchbound.heuristics.serving.registry import SERVING_POLICIES, ServingOptions, serving_policy
from batchbound.heuristics.serving.simulation import (
    EXECUTING,
    PAUSED,
    WAITING,
    ServingError,
    ServingRun,
    simulate_serving,
)

UNIT = MixedCost(
    prefill_base=1.0,
    prefill_per_token=0.0,
    prefill_per_pair=0.0,
    few_base=1.0,
    few_per_request=0.0,
    few_per_kv_token=0.0,
    many_base=0.0,
    many_per_request=0.0,
    many_per_kv_token=0.0,
    swap_per_token=0.5,
)
"""Every iteration takes a second."""


def workload(prompts: list[int], answers: list[int], arrival: list[float] | None = None) -> Workload:
    count = len(prompts)
    times = np.zeros(count) if arrival is None else np.array(arrival)
    deadline = times + 10.0
    return Workload(numbered_ids(count), np.array(prompts), np.array(answers), times, deadline=deadline)


def serve(requests: Workload, policy: object, capacity: int, **options: object) -> ServingRun:
    return simulate_serving(requests, policy, UNIT, capacity, **options)  # type: ignore[arg-type]


def test_a_prompt_yields_the_first_token_and_each_iteration_another() -> None:
    run = serve(workload([3], [4]), Orca(8), 8, block_tokens=1)
    assert (run.first_token[0], run.finished[0], run.tokens[0]) == (1.0, 4.0, 4)
    assert run.prompt_tokens.tolist() == [3, 0, 0, 0]
    assert run.held.tolist() == [3, 4, 5, 6]


def test_time_is_split_into_waiting_executing_and_paused() -> None:
    # Room for one sequence of 8: the second waits for the first, which a shorter third interrupts.
    requests = workload([2, 2, 2], [5, 5, 1], [0.0, 0.0, 1.5])
    run = serve(requests, ShortestRemaining(8), 8, block_tokens=1)
    # Two iterations, 3 tokens out (1.5 s) beside the third's prompt, back (1.5 s), and 3 more tokens.
    assert run.spent[0].tolist() == [0.0, 2.0 + 1.5 + 3.0, 0.0, 2.5]
    assert run.spent[2, WAITING] == 0.5
    assert run.preempted.tolist() == [1, 0, 0]
    assert run.spent.sum(1) == pytest.approx(run.finished - requests.arrival)


def test_orca_promises_the_longest_sequence_and_batches_few() -> None:
    run = serve(workload([1] * 20, [3] * 20), Orca(10, batch=8), 100, block_tokens=1)
    assert run.decodes.max() == 8
    assert run.promised.max() == 80


def test_vllm_runs_prompts_alone_and_swaps_the_youngest_out() -> None:
    run = serve(workload([4, 4], [6, 6]), Vllm(watermark=0.0), 10, block_tokens=1)
    assert not np.any((run.prompt_tokens > 0) & (run.decodes > 0))
    assert run.preempted.tolist() == [0, 1]
    assert run.spent[1, PAUSED] > 0
    assert run.failures > 0


def test_sarathi_chunks_prompts_beside_generated_tokens() -> None:
    run = serve(workload([2, 10], [8, 2]), Sarathi(4, watermark=0.0), 100, block_tokens=1)
    assert (run.decodes + run.prompt_tokens).max() == 4
    assert run.prompt_tokens.tolist()[:4] == [4, 3, 3, 2]


def test_multires_takes_what_is_nearest_to_what_is_left() -> None:
    # 8 of 12 tokens of memory and 4 of 4 of the iteration are free: the middle request needs just that.
    requests = workload([2, 4, 1], [2, 4, 1])
    run = serve(requests, MultiRes(4), 8, block_tokens=1)
    assert np.argmin(run.spent[:, WAITING]) == 1


@pytest.mark.parametrize("name", SERVING_POLICIES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_policy_serves_everyone_in_full_and_never_holds_too_much(
    name: str, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 12))
    lengths = st.lists(st.integers(1, 20), min_size=count, max_size=count)
    prompts, answers = data.draw(lengths), data.draw(lengths)
    predicted = np.array(data.draw(lengths))
    arrival = data.draw(st.lists(st.floats(0, 30), min_size=count, max_size=count))
    block = data.draw(st.sampled_from([1, 4, 8]))
    capacity = data.draw(st.integers(48, 120))
    requests = workload(prompts, answers, arrival)
    shares = st.sampled_from([0.0, 0.15, 0.6])
    sizes = EconoServeSizes(padding=data.draw(shares), reserved=data.draw(shares), buffer=data.draw(shares))
    options = ServingOptions(40, data.draw(st.integers(13, 40)), sizes)

    def go() -> ServingRun:
        policy = serving_policy(name, options)
        return serve(requests, policy, capacity, block_tokens=block, predicted=predicted)

    run = go()
    assert np.array_equal(run.tokens, requests.output_tokens)
    assert run.held.max() <= run.capacity
    assert run.promised.max() <= run.capacity
    assert run.held.max() <= run.promised.max()
    assert int(run.completed.sum()) == count
    assert run.spent.sum(1) == pytest.approx(run.finished - requests.arrival)
    again = go()
    for column in ("first_token", "finished", "spent", "held", "promised", "decodes"):
        assert np.array_equal(getattr(run, column), getattr(again, column))


class Idle:
    def __call__(self, state: ServingState) -> ServingStep:
        return ServingStep()


class Greedy:
    """Starts everyone's prompt without asking for room."""

    def __call__(self, state: ServingState) -> ServingStep:
        return ServingStep(prefill=[(request, state.lacks(request)) for request in state.arrived])


class Impatient:
    """Starts answers whose prompts are not done."""

    def __call__(self, state: ServingState) -> ServingStep:
        return ServingStep(start=state.arrived)


def test_a_policy_that_leaves_someone_unserved_is_found() -> None:
    with pytest.raises(ServingError, match="1 requests are unserved"):
        serve(workload([1], [1]), Idle(), 8, block_tokens=1)


def test_a_policy_that_asks_for_no_room_is_found() -> None:
    with pytest.raises(KvLedgerError, match="holds 3 tokens and may hold 0"):
        serve(workload([3], [2]), Greedy(), 8, block_tokens=1)


def test_an_answer_does_not_start_before_its_prompt_is_done() -> None:
    with pytest.raises(ServingError, match="cannot generate yet"):
        serve(workload([3], [2]), Impatient(), 8, block_tokens=1)


def test_requests_that_come_prefilled_need_no_prompt() -> None:
    run = serve(
        workload([4, 4], [3, 3], [0.0, 1.0]),
        Vllm(received=True, watermark=0.0),
        20,
        prefilled=True,
        block_tokens=1,
    )
    assert run.prompt_tokens.sum() == 0
    assert run.tokens.tolist() == [3, 3]
    assert run.spent[:, EXECUTING].min() > 0


def test_an_iteration_costs_what_its_lines_say() -> None:
    cost = MixedCost(1.0, 0.1, 0.01, 2.0, 0.0, 0.001, 0.0, 0.5, 0.001)
    assert cost.seconds(0, 0) == 0.0
    assert cost.seconds(2, 100) == pytest.approx(2.1)
    assert cost.seconds(10, 100) == pytest.approx(5.1)
    assert cost.seconds(0, 0, 10, 100) == pytest.approx(1.0 + 1.0 + 1.0)
    assert cost.seconds(2, 100, 20, 400) == pytest.approx(1.0 + 2.2 + 0.1 + 4.0)
    assert cost.seconds(10, 100, 1, 1) == pytest.approx(5.1 + 0.01)
    # Six tokens beside many: 1.0 + 1.6 + 0.1 as prompts; sixteen in the linear layers as if generated, 2.1.
    few = MixedCost(1.0, 0.1, 0.01, 2.0, 0.0, 0.001, 0.0, 0.0, 0.001)
    assert few.seconds(10, 100, 6, 36) == pytest.approx(2.1 + 0.36)


def test_a_prompt_token_costs_no_more_than_a_generated_one() -> None:
    cost = MixedCost(18.1, 0.102, 0.0, 19.9, 0.0385, 0.0, 7.2, 0.158, 0.0)
    for decodes in (1, 20, 80, 107, 200, 500):
        alone = cost.seconds(decodes, 0)
        for prompt in (1, 19, 64, 512):
            assert alone <= cost.seconds(decodes, 0, prompt) <= cost.seconds(decodes + prompt, 0)
    assert cost.seconds(80, 0, 512) == pytest.approx(18.1 + 0.102 * 592)


def test_distserves_coefficients_are_read_in_seconds(tmp_path: Path) -> None:
    file = tmp_path / "fits.json"
    entry = {
        "prefill": [18, 0.1, -1e-9],
        "decoding_smallbs": [20, 1e-3, 0.04],
        "decoding_largebs": [7, 1e-3, 0.2],
    }
    file.write_text(json.dumps({"m": {"1": entry}}))
    cost = read_distserve_cost(file, "m", 1, swap_per_token=1e-5)
    assert [cost.prefill_base, cost.few_per_request] == pytest.approx([0.018, 4e-5])
    assert [cost.prefill_per_pair, cost.swap_per_token] == [0.0, 1e-5]
    with pytest.raises(InputError, match="the model is missing"):
        read_distserve_cost(file, "n", 1)
    with pytest.raises(InputError, match="the tensor parallel degree is missing"):
        read_distserve_cost(file, "m", 2)
    file.write_text(json.dumps({"m": {"1": {**entry, "prefill": [18, None, 0]}}}))
    with pytest.raises(InputError, match=r"field 'm.1.prefill': is not three numbers"):
        read_distserve_cost(file, "m", 1)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="no serving policy is called 'nobody'"):
        serving_policy("nobody")


def test_opt_13b_on_an_a100_takes_what_distserve_fitted(public_data: Path) -> None:
    file = public_data / "distserve" / "profiler-a100-80g.distserve.json"
    cost = read_distserve_cost(file, "facebook/opt-13b", 1)
    # 18.1 ms + 0.1019 ms a token + 7.1e-6 ms a pair; 19.9 ms + 0.0385 ms a request + 0.00063 ms a token held.
    assert cost.seconds(0, 0, 512, 512**2) == pytest.approx(0.0722, abs=1e-4)
    assert cost.seconds(40, 10_000) == pytest.approx(0.0277, abs=1e-4)
    # Many requests are bound by computing: 7.2 ms + 0.158 ms a request, and what they read.
    assert cost.seconds(200, 10_000) == pytest.approx(0.0446, abs=1e-4)


FITS = {
    "m": {"1": {"prefill": [18, 0.1, 0], "decoding_smallbs": [20, 0, 0.04], "decoding_largebs": [7, 0, 0.2]}}
}


@pytest.mark.parametrize("policy", ["vllm", "econoserve", "distserve"])
def test_serve_prints_the_figures_of_a_policy(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fits.json").write_text(json.dumps(FITS))
    words = ["serve", "alpaca:0:40", "--cost", str(tmp_path / "fits.json"), "--model", "m"]
    words += ["--kv-capacity", "1000", "--policy", policy, "--swap", "1e-4"]
    assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["slo_satisfaction"]) == (40, None)
    parts = ("waiting", "execution", "queueing", "preemption")
    assert sum(figures[name] for name in parts) == pytest.approx(figures["completion"])
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "completion" in printed
    assert "slo" not in printed


def served_table(tmp_path: Path, *lines: str) -> list[str]:
    """Write a table of requests and return the command that serves it."""
    (tmp_path / "fits.json").write_text(json.dumps(FITS))
    table = tmp_path / "requests.csv"
    table.write_text("\n".join((*lines, "")))
    cost = ["--cost", str(tmp_path / "fits.json"), "--model", "m", "--kv-capacity", "1000"]
    return ["serve", str(table), *cost]


def test_slo_satisfaction_is_of_the_requests_with_a_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    due = ("a,9,9,1e6", "b,9,9,1e-6", "c,9,9,", "d,9,9,")
    assert main(served_table(tmp_path, "id,input_tokens,output_tokens,deadline", *due)) == 0
    assert "slo satisfaction                    0.5" in capsys.readouterr().out


def test_there_is_no_time_between_tokens_where_each_completion_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = served_table(tmp_path, "id,input_tokens,output_tokens", "a,9,1", "b,7,1")
    assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["between_tokens"], figures["between_tokens_p95"]) == (None, None)


OPTIONS = {
    **{"--length-error": "1", "--swap": "1e-3", "--transfer": "1e-3", "--forward-size": "100"},
    **{"--longest": "2900", "--padding": "0.5", "--reserved": "0.3", "--buffer": "0.4"},
}


@pytest.mark.parametrize("policy", mostly_slow([*SERVING_POLICIES, "distserve"], fast=("vllm", "distserve")))
def test_an_option_is_refused_just_where_it_changes_nothing(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fits.json").write_text(json.dumps(FITS))
    words = ["serve", "sharegpt:0:24", "--cost", str(tmp_path / "fits.json"), "--model", "m", "--json"]
    words += ["--kv-capacity", "3000", "--policy", policy]

    def figures(*more: str) -> dict[str, float] | None:
        if main([*words, *more]) == 2:
            assert f"{more[-2]} has no effect with --policy {policy}" in capsys.readouterr().err
            return None
        found = json.loads(capsys.readouterr().out)
        return {name: value for name, value in found.items() if name not in ("scheduling", "decision")}

    # Where the lengths predicted are promised, memory is short only as these are wrong.
    wrong: tuple[str, ...] = ()
    without = figures()
    for option, value in OPTIONS.items():
        found = figures(*wrong, option, value)
        assert found != without, option
        if option == "--length-error" and found is not None:
            wrong, without = (option, value), found


@pytest.mark.parametrize("policy", ["vllm", "distserve"])
def test_serve_says_what_does_not_fit(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fits.json").write_text(json.dumps(FITS))
    words = ["serve", "sharegpt:0:40", "--cost", str(tmp_path / "fits.json"), "--model", "m"]
    assert main([*words, "--kv-capacity", "100", "--policy", policy]) == 2
    assert "Check --kv-capacity" in capsys.readouterr().err


def test_serving_on_a_model_names_what_it_lacks_where_torch_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "batchbound.executor.serving.engine", raising=False)
    assert main(["serve", "alpaca:0:2", "--kv-capacity", "99", "--engine", "tiny:llama"]) == 2
    assert "run `pip install '.[engine]'`" in capsys.readouterr().err

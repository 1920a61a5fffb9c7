"""``batchbound search``, the plan it writes, and the policy behind it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.exegpt.dynamic_batch import DynamicBatch
from batchbound.heuristics.exegpt.round_robin import RoundRobinAllocation
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.simulate import simulate
from batchbound.models.exegpt.whole_model_profile import whole_model_profile
from batchbound.models.iterations.layer_cost import LayerCost


@pytest.mark.parametrize(
    "cost",
    [
        CostModel.paper(),
        CostModel(0.01, 1e-4, 0.02, 1e-4, 0.05, 1e-7),
        CostModel(0.01, 1e-4, 0.02, 1e-4, 0.05, 1e-7, prefill_bend=300.0, prefill_per_token_beyond=2e-4),
        CostModel(0.01, 1e-4, 0.02, 1e-4, prefill_bend=300.0, prefill_per_token_beyond=2e-4),
        CostModel(0.01, 0.0, 0.02, 1e-4, 0.05, 1e-7, prefill_bend=3000.0, prefill_per_token_beyond=2e-4),
    ],
)
def test_a_whole_model_profile_costs_what_the_cost_model_says(cost: CostModel) -> None:
    composed = LayerCost(whole_model_profile(cost, "test"))
    for tokens in (10, 350, 500, 3100, 4000):
        assert sum(composed.encode(1, tokens)) == pytest.approx(cost.prefill_seconds(tokens), rel=1e-6)
    for active, context in ((1, 50), (30, 700)):
        expected = cost.decode_seconds(active, active * context)
        assert sum(composed.decode(active, context)) == pytest.approx(expected, rel=1e-6)


def test_prompts_are_encoded_every_so_many_steps() -> None:
    problem = Problem(Workload.from_lengths([5] * 6, [4] * 6), CostModel.paper(), 6)
    policy = RoundRobinAllocation(2, DynamicBatch(2, 5.0, None))
    trace = simulate(problem, policy)
    assert [(stage.kind, stage.active, stage.decode_steps) for stage in trace.stages] == [
        ("prefill", 2, 0),
        ("decode", 2, 2),
        ("prefill", 2, 0),
        ("decode", 4, 2),
        ("prefill", 2, 0),
        ("decode", 4, 2),
        ("decode", 2, 2),
    ]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=15),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(42, 120)),
)
def test_whatever_the_lengths_the_plan_breaks_no_rule(
    lengths: list[tuple[int, int]], decode_steps: int, batch: int, slots: int, capacity: int | None
) -> None:
    workload = Workload.from_lengths(*zip(*lengths, strict=True))
    problem = Problem(workload, CostModel.paper(), slots, kv_capacity=capacity)
    policy = RoundRobinAllocation(
        decode_steps, DynamicBatch(batch, float(np.mean([a for a, _ in lengths])), 8.0)
    )
    schedule = schedule_of(simulate(problem, policy))
    assert schedule.check(problem) is None


def test_a_search_prints_a_table_and_writes_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"
    words = ["search", "exegpt-S:0:300", "--slots", "64", "--latency-bound", "8", "--json", "--frontier"]
    assert main([*words, "-o", str(target)]) == 0
    value = json.loads(capsys.readouterr().out)
    best = value["configurations"][0]
    assert best["strategy"] == "RRA"
    assert best["latency_s"] <= 8
    assert best["decode_batch"] <= 64
    assert best["evaluated"] < best["grid"]
    rates = [point["requests_per_s"] for point in value["frontier"]]
    assert rates == sorted(rates)
    plan = Plan.load(target)
    assert plan.maker.solver.startswith("exegpt-rra B_E=")
    assert len(plan.problem) == 300


def test_after_a_drift_the_decode_steps_alone_are_searched(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", "exegpt-S:0:300", "--slots", "64", "--latency-bound", "8", "--json"]
    assert main([*words, "--encode-batch", "20"]) == 0
    best = json.loads(capsys.readouterr().out)["configurations"][0]
    assert best["encode_batch"] == 20
    assert main([*words, "--encode-batch", "20", "--latency-margin", "0.2"]) == 0
    careful = json.loads(capsys.readouterr().out)["configurations"][0]
    assert careful["encode_batch"] == 20
    assert careful["latency_s"] <= 0.8 * 8
    assert careful["requests_per_s"] <= best["requests_per_s"]
    assert main([*words, "--latency-margin", "1"]) == 2


def test_no_configuration_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "exegpt-S:0:100", "--latency-bound", "0.01"]) == 1
    assert "RRA" in capsys.readouterr().out


def test_a_roofline_is_named_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 1000}
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config))
    words = ["search", "exegpt-S:0:200", "--roofline", "a40", "--model-config", str(path), "--devices", "2"]
    link = ["--link-bandwidth", "2", "--link-latency", "500"]
    assert main([*words, *link, "--most-encode-batch", "32"]) == 0
    captured = capsys.readouterr()
    assert "not measured" in captured.err
    assert "link given: 2 GB/s, 500 us" in captured.err
    assert "WAA-C" in captured.out


def test_a_roofline_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "exegpt-S:0:100", "--roofline", "a40"]) == 2
    assert "--model-config" in capsys.readouterr().err


def test_a_decode_batch_that_nobody_measured_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured_to(sequences: int) -> str:
        decode = {(1,): 0.010, (sequences,): 0.010 + 0.0001 * sequences}
        points, seconds = np.array(list(decode)), np.array(list(decode.values()))
        operations = (
            Operation("layer", "encode", ("tokens",), np.array([[0], [100]]), np.array([0.0, 0.02])),
            Operation("layer", "decode", ("sequences",), points, seconds),
        )
        shape = ModelShape("tiny", 1, 8, 1, 1, 8, 8, 8)
        path = tmp_path / f"{sequences}.json"
        LayerProfile(shape, "here", 1e9, 1, operations, "made up").save(path)
        return str(path)

    def said(path: str) -> str:
        words = ["search", "exegpt-S:0:300", "--latency-bound", "8", "--encode-batch", "16"]
        assert main([*words, "--profile", path]) == 0
        return capsys.readouterr().err

    assert "the profile was measured with 4 at most: its figures are extrapolated" in said(measured_to(4))
    assert "extrapolated" not in said(measured_to(4000))


@pytest.mark.parametrize("option", [["--slots", "64"], ["--cost", "cost.json"]])
def test_what_layer_profiles_leave_without_an_effect_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole_model_profile(CostModel.paper(), "test").save("layers.json")
    Path("cost.json").write_text(
        '{"batchbound_cost": 1, "cost": {"prefill_base": 0.01, "prefill_per_token": 0, "decode_base": 0.01,'
        ' "decode_per_slot": 0}}'
    )
    words = ["search", "exegpt-S:0:300", "--profile", "layers.json", "--latency-bound", "8", *option]
    assert main(words) == 2
    said = f"{option[0]} has no effect on a search with layer profiles. Leave it out."
    assert said in capsys.readouterr().err


def test_one_sentence_names_the_configuration_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", "exegpt-S:0:300", "--slots", "64", "--latency-bound", "8"]
    assert main([*words, "--json", "--frontier"]) == 0
    value = json.loads(capsys.readouterr().out)
    best = value["configurations"][0]
    assert f"Take RRA: {best['encode_batch']} prompts at a time" in value["advice"]
    whole = best["ttft_s"] + best["tpot_s"] * value["latency_length"]
    assert whole == pytest.approx(best["latency_s"])
    assert 0 < best["ttft_s"] < best["latency_s"]
    rates = [point["requests_per_s"] for point in value["frontier"]]
    assert all(high > 1.01 * low for low, high in pairwise(rates[:-1]))
    assert main(words) == 0
    said = capsys.readouterr().out
    assert value["advice"] in said
    assert "B_E: prompts per encoding phase" in said


def test_targets_for_the_first_token_and_those_after_it_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 1000}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    words = ["search", "exegpt-S:0:200", "--roofline", "a40", "--model-config", str(tmp_path / "tiny.json")]
    words += ["--devices", "2", "--most-encode-batch", "24", "--json", "--frontier"]

    def found(*bounds: str) -> dict[str, list[dict[str, float]]]:
        assert main([*words, *bounds]) == 0
        return dict(json.loads(capsys.readouterr().out))

    free = found()
    best, beyond = free["configurations"][0], free["frontier"][-1]["requests_per_s"]
    quick = found("--ttft-bound", str(best["ttft_s"] / 2), "--tpot-bound", str(best["tpot_s"] / 2))
    for each in quick["configurations"]:
        if "ttft_s" in each:
            assert each["ttft_s"] <= best["ttft_s"] / 2
            assert each["tpot_s"] <= best["tpot_s"] / 2
    assert 0 < quick["configurations"][0]["requests_per_s"] < beyond
    assert quick["frontier"][-1]["requests_per_s"] == quick["configurations"][0]["requests_per_s"]
    # A target that all keep to changes nothing but what is looked at.
    same = found("--ttft-bound", "1000")["configurations"][0]
    assert same["requests_per_s"] >= best["requests_per_s"]
    assert same["requests_per_s"] == pytest.approx(best["requests_per_s"], rel=0.01)
    assert main([*words, "--ttft-bound", "1e-9"]) == 1
    assert "meets a TTFT of 1e-09 s, at any latency" in capsys.readouterr().out


def test_a_bound_that_nothing_meets_is_answered_with_the_least_latency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["search", "exegpt-S:0:300", "--slots", "64", "--json"]
    assert main([*words, "--latency-bound", "0.01", "--frontier"]) == 1
    value = json.loads(capsys.readouterr().out)
    least = value["frontier"][0]["latency_s"]
    assert f"the least possible is {least:.3f} s" in value["advice"]
    assert main([*words, "--latency-bound", str(1.001 * least)]) == 0
    assert capsys.readouterr().out

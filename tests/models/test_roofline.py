"""Estimates from a device's rates: by hand, as a composed profile, beside measured points."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import roofline_error
from measured_points import KNOWN_MODELS, read_aiconfigurator

from batchbound.cli import main
from batchbound.data.costs.link import Link
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.files.disk import InputError
from batchbound.models.exegpt.roofline import (
    ERROR_BAR,
    ROOFLINE_DEVICES,
    Efficiency,
    Roofline,
    RooflineDevice,
)
from batchbound.models.iterations.layer_cost import LayerCost

SHAPE = ModelShape("m", 3, 8, 4, 2, 2, 16, 32)
DEVICE = RooflineDevice("toy", 1000.0, 100.0, 1e6, 4000.0)
FULL = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


def test_a_step_reads_the_weights_and_the_keys_or_computes_longer() -> None:
    attention, feed_forward, norms = 8 * 2 * (2 * 4 + 2 * 2), 3 * 8 * 16, 2 * 8
    layer = 2 * (attention + feed_forward + norms) / 100
    keys = 5 * 7 * (2 * 2 * 2 * 2) / 100
    head = 2 * 32 * 8 / 100
    # Five tokens compute 10 operations a weight, 0.01 s, in the 0.02 s that reading it takes.
    assert Roofline(SHAPE, DEVICE, 1, FULL).decode_step(5, 7) == pytest.approx(3 * (layer + keys) + head)
    many = Roofline(SHAPE, DEVICE, 1, FULL).layer_seconds(np.array([50.0]), prompts=False)
    assert many[0] == pytest.approx(2 * 50 * (attention + feed_forward + norms) / 1000)


def test_prompts_that_make_up_for_those_who_end_share_an_iteration_with_the_others() -> None:
    line = Roofline(SHAPE, DEVICE, 1, FULL)
    weights = SHAPE.token_values
    pairs = SHAPE.prompt_pair_flops * 100 * 50 / 1000
    # In every second iteration a prompt: 105 tokens are computed where 5 wait for the weights to be read.
    beside = line.tpot(5, 100, 10) - line.decode_step(5, 105)
    assert beside == pytest.approx(3 * 0.5 * (2 * 105 * weights / 1000 - 2 * weights / 100 + pairs))
    # Four prompts in each: the weights are read once for all of them.
    beside = line.tpot(40, 100, 10) - line.decode_step(40, 105)
    alone = 2 * 40 * weights / 1000
    assert beside == pytest.approx(3 * (2 * 440 * weights / 1000 - alone + 4 * pairs))
    # A short prompt costs nothing where reading takes longer than computing both.
    short = line.tpot(1, 2, 10) - line.decode_step(1, 7)
    assert short == pytest.approx(3 * 0.1 * SHAPE.prompt_pair_flops * 2 * 1 / 1000)


def test_kernels_of_a_layer_are_those_of_its_parts() -> None:
    known = {name: shape.kernels for name, shape in KNOWN_MODELS.items()}
    assert known["Llama-3.1-70B"] == 9
    assert known["Qwen3-32B"] == 10
    assert known["gpt-oss-120b"] == 13
    assert known["MiniMax-M2.5"] == 14
    assert known["DeepSeek-V3"] == pytest.approx(14 + 7 * 58 / 61)
    of = replace(FULL, weights=np.inf, decoding=np.inf, kernel=1e-3)
    line = Roofline(SHAPE, DEVICE, 1, of)
    assert line.layer_seconds(np.ones(1), prompts=False)[0] == pytest.approx(9e-3)


def test_squares_of_a_norm_over_all_heads_are_one_more_collective_of_a_layer() -> None:
    of = replace(FULL, collective=0.5)
    plain, across = (
        Roofline(shape, DEVICE, 2, of, Link("l", 10.0, 0.0, "made up")).all_reduce_seconds(np.array([3.0]))[0]
        for shape in (SHAPE, replace(SHAPE, head_norm=True, norm_across=True))
    )
    assert plain == pytest.approx(2 * (0.5 + 3 * 8 * 2 / 10))
    assert across - plain == pytest.approx(0.5 + 3 * 8 / 10)


def test_the_profile_composes_to_the_estimated_step() -> None:
    for name, degree in (("Llama-3.1-8B-Instruct", 1), ("MiniMax-M2.5", 4), ("DeepSeek-V3", 8)):
        line = Roofline(KNOWN_MODELS[name], ROOFLINE_DEVICES["b200"], degree)
        composed = LayerCost(line.profile())
        for sequences, context in ((8, 512), (64, 2048)):
            assert composed.iteration(sequences, context, []) == pytest.approx(
                line.decode_step(sequences, context), rel=0.01
            )


def test_a_profile_of_a_roofline_says_how_far_off_it_may_be() -> None:
    profile = Roofline(SHAPE, DEVICE).profile()
    assert not profile.measured
    assert f"{ERROR_BAR[0]:.2f} to {ERROR_BAR[1]:.2f} times the measured" in profile.source


def test_a_slower_link_makes_shared_layers_slower() -> None:
    times = [
        Roofline(SHAPE, DEVICE, 2, FULL, Link("l", bandwidth, 0.0, "made up")).decode_step(4, 8)
        for bandwidth in (10.0, 20.0)
    ]
    assert times[0] - times[1] == pytest.approx(3 * 2 * 4 * 8 * 2 * (1 / 10 - 1 / 20))


def test_fewer_bits_are_multiplied_at_their_own_rate() -> None:
    assert [DEVICE.flops_at(bits) for bits in (16, 8, 4)] == [1000.0, 4000.0, 1000.0]


def _write(path: Path, rows: list[str]) -> Path:
    head = "backend,model_path,system,gemm_quant_mode,moe_quant_mode,isl,osl,batch_size,tp_size,"
    path.write_text(head + "attention_dp_size,silicon_ttft_ms,silicon_tpot_ms\n" + "\n".join(rows) + "\n")
    return path


def test_points_are_read_with_what_is_left_out_and_why(tmp_path: Path) -> None:
    good = "vllm,Qwen/Qwen3-32B,h100_sxm,fp8,fp8,1024,128,8,2,1,100,20"
    rows = [
        good,
        good.replace("Qwen3-32B", "Odd"),
        good.replace(",2,1,", ",64,1,"),
        good.replace(",1,100", ",4,100"),
    ]
    points, left_out = read_aiconfigurator(_write(tmp_path / "p.csv", rows))
    assert [(each.model, each.degree, each.tpot) for each in points] == [("Qwen3-32B", 2, 0.02)]
    assert (points[0].shape.feed_forward_bytes, points[0].shape.multiply_bits) == (1.0, 8)
    assert sorted(left_out.values()) == [1, 1, 1]
    with pytest.raises(InputError, match="column 'batch_size'"):
        read_aiconfigurator(_write(tmp_path / "q.csv", [good.replace(",8,2,", ",many,2,")]))


def test_rates_of_an_own_device_are_taken_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 1000}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    rates = {"name": "mine", "flops": 1e14, "bandwidth": 1e12, "memory": 2e10}
    (tmp_path / "rates.json").write_text(json.dumps(rates))
    words = ["search", "exegpt-S:0:100", "--model-config", str(tmp_path / "tiny.json"), "--encode-batch", "4"]
    assert main([*words, "--device-rates", str(tmp_path / "rates.json")]) == 0
    assert "on mine, estimated from its rates, not measured" in capsys.readouterr().err
    (tmp_path / "rates.json").write_text(json.dumps(rates | {"flops": -1}))
    assert main([*words, "--device-rates", str(tmp_path / "rates.json")]) == 2
    assert "flops of 'mine' is -1" in capsys.readouterr().err


@pytest.mark.slow
def test_estimates_of_models_and_devices_left_out_hold_their_error_bar(public_data: Path) -> None:
    result = roofline_error.main([str(public_data / "aiconfigurator" / "measured_points.csv")])
    assert 0.85 <= result["median"] <= 1.15
    assert 0.80 <= result["held"] <= 0.95
    assert result["bar"] == pytest.approx(list(ERROR_BAR), abs=0.01)


def test_the_fitted_terms_are_those_of_the_estimate(tmp_path: Path) -> None:
    row = "vllm,MiniMaxAI/MiniMax-M2.5,b200_sxm,fp8,fp8,1024,512,32,4,1,100,20"
    points, _ = read_aiconfigurator(_write(tmp_path / "p.csv", [row]))
    of = replace(FULL, weights=0.7, keys=0.5, encoding=0.4, kernel=3e-6, collective=3e-6, link=0.3)
    found = roofline_error.terms(points).log_error(np.log([max(x, 1e-12) for x in _values(of)]), np.arange(1))
    line = Roofline(points[0].shape, ROOFLINE_DEVICES["b200"], 4, of)
    assert found[0] == pytest.approx(np.log(line.tpot(32, 1024, 512) / 0.02), abs=1e-3)


def _values(of: Efficiency) -> list[float]:
    return [getattr(of, name) for name in Efficiency.__dataclass_fields__]

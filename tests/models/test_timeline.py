"""Section 6 of ExeGPT: completion, batch sizes and timelines, against hand calculations and sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.lengths.distributions import LengthDistribution
from batchbound.data.lengths.pair import LengthPair
from batchbound.data.workload import Workload
from batchbound.heuristics.exegpt.dynamic_batch import DynamicBatch
from batchbound.models.exegpt.completion import Occupancy
from batchbound.models.exegpt.configuration import Cluster, ExecConfig, Strategy
from batchbound.models.exegpt.roofline import ROOFLINE_DEVICES, Efficiency, Roofline
from batchbound.models.exegpt.seconds_table import SecondsTable
from batchbound.models.exegpt.timeline import Timeline
from batchbound.models.iterations.layer_cost import LayerCost

LENGTHS = LengthDistribution(1, np.array([0.1, 0.0, 0.3, 0.2, 0.0, 0.1, 0.3]))
SHAPE = ModelShape("m", 4, 64, 4, 2, 16, 128, 256)


def _profile(degree: int = 1) -> LayerCost:
    """Return a model whose layer takes 1 ms + 0.1 ms a prompt token, or 1 ms + 0.2 ms a decoding sequence."""
    share = 1 / degree
    tokens = Operation("dense", "encode", ("tokens",), _column(0, 1e4), share * np.array([1e-3, 1e-3 + 1.0]))
    decode = Operation(
        "dense", "decode", ("sequences",), _column(0, 1e4), share * np.array([1e-3, 1e-3 + 2.0])
    )
    return LayerCost(LayerProfile(SHAPE, "toy", 0.0, degree, (tokens, decode), "made up"))


def _column(*values: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64).reshape(-1, 1)


def _fixed(inputs: int, outputs: int) -> LengthPair:
    return LengthPair(LengthDistribution.empirical([inputs]), LengthDistribution.empirical([outputs]))


def test_with_one_step_a_phase_the_decode_batch_is_the_mean_length_times_the_encode_batch() -> None:
    occupancy = Occupancy(LengthPair(LengthDistribution.empirical([10]), LENGTHS), 1)
    assert occupancy.queries.tolist() == pytest.approx([LENGTHS.mean])


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9))
def test_the_decode_batch_is_what_sampling_finds(decode_steps: int) -> None:
    lengths = LENGTHS.sample(np.random.default_rng(decode_steps), 20_000)
    phases = -(-lengths // decode_steps)
    occupancy = Occupancy(LengthPair(LengthDistribution.empirical([10]), LENGTHS), decode_steps)
    assert occupancy.queries[0] == pytest.approx(phases.mean(), rel=0.02)
    last = np.array([np.mean((lengths - 1) % decode_steps == step) for step in range(decode_steps)])
    drops = -np.diff(np.append(occupancy.queries, occupancy.queries[0] - 1))
    assert drops == pytest.approx(last, abs=0.02)


def test_an_answer_of_fixed_length_holds_known_tokens() -> None:
    occupancy = Occupancy(_fixed(10, 4), 2)
    # In the first iteration of a phase decode the 1st and the 3rd token, in the second the 2nd and the 4th.
    assert occupancy.queries.tolist() == [2, 2]
    assert occupancy.tokens.tolist() == [11 + 13, 12 + 14]


def test_the_cycle_of_one_device_is_the_sum_of_its_phases() -> None:
    timeline = Timeline({1: _profile()}, Cluster(1), _fixed(10, 4))
    reached = timeline(ExecConfig(Strategy.RRA, 5, decode_steps=2))
    encode, decode = 4 * (1e-3 + 50 * 1e-4), 4 * (1e-3 + 10 * 2e-4)
    assert reached.decode_batch == 10
    assert reached.throughput == pytest.approx(5 / (encode + 2 * decode))
    # Two phases, each of one encoding and two iterations.
    assert reached.latency == pytest.approx(2 * (encode + 2 * decode))


def test_devices_that_share_a_layer_hold_a_single_head_of_keys_each() -> None:
    shape = replace(SHAPE, kv_heads=1)
    costs = {
        degree: LayerCost(replace(_profile(degree).profile, shape=shape, tensor_parallel=degree))
        for degree in (1, 2)
    }
    timeline = Timeline(costs, Cluster(4), _fixed(10, 4))
    apart, shared = (
        timeline(ExecConfig(Strategy.RRA, 8, tensor_degree=2, tensor_groups=groups)) for groups in (0, 2)
    )
    weights = shape.weight_bytes / 4
    assert shared.device_bytes - weights == pytest.approx(2 * (apart.device_bytes - weights))


def test_a_pipeline_waits_where_encoding_is_slower_than_decoding() -> None:
    timeline = Timeline({1: _profile()}, Cluster(2), _fixed(10, 4))
    reached = timeline(ExecConfig(Strategy.RRA, 10, decode_steps=4))
    hop = timeline.cluster.link_latency
    encode, decode = 2 * (1e-3 + 50 * 1e-4) + hop, 2 * (1e-3 + 5 * 2e-4) + hop
    cycle = 2 * encode + 4 * 2 * decode + (encode - decode)
    assert reached.throughput == pytest.approx(10 / cycle, rel=1e-3)


def test_waa_encodes_and_decodes_at_the_slower_sides_pace() -> None:
    timeline = Timeline({1: _profile()}, Cluster(2), _fixed(10, 4))
    reached = timeline(ExecConfig(Strategy.WAA_C, 5))
    encode, decode = 4 * (1e-3 + 50 * 1e-4), 4 * (1e-3 + 20 * 2e-4)
    assert reached.throughput == pytest.approx(5 / max(encode, decode), rel=0.01)
    assert reached.stages == (1, 1)


def test_a_decode_batch_that_hardly_drifts_is_met_at_many_sizes() -> None:
    # Decoding takes 4 ms + 0.8 ms a sequence, and 32 iterations a request: 25.6 ms of each alone.
    spread = LengthDistribution.with_moments("normal", 32, 13, 1, 80)
    sizes = []
    for prompt in (66, 80, 120):
        lengths = LengthPair(LengthDistribution.empirical([prompt]), spread)
        reached = Timeline({1: _profile()}, Cluster(2), lengths)(ExecConfig(Strategy.WAA_C, 8))
        sizes.append(reached.decode_batch / (8 * lengths.outputs.mean))
        # Neither side is faster than it can be.
        assert reached.throughput <= 8 / reached.encode_seconds * (1 + 1e-9)
    # Between the planned batch and the one that slow encoders leave there is every other.
    assert 1 > sizes[0] > sizes[1] > sizes[2] > 0


@settings(deadline=None, max_examples=20)
@given(st.integers(10, 120), st.integers(1, 40))
def test_what_a_waa_batch_says_of_its_row_holds(prompt: int, at: int) -> None:
    lengths = LengthPair(
        LengthDistribution.with_moments("normal", prompt, 0.4 * prompt, 1, 300),
        LengthDistribution.with_moments("normal", 32, 13, 1, 80),
    )
    row = Timeline({1: _profile()}, Cluster(3), lengths).waa_row(ExecConfig(Strategy.WAA_C, 8), 40)
    assert row is not None
    latency, throughput = row.reach(np.arange(1, 41))
    probe = row.probe(1, at)
    # To the last bit: alone as among others.
    assert (probe.latency, probe.throughput) == (latency[at - 1], throughput[at - 1])
    assert probe.least_latency <= latency[at - 1 :].min() * (1 + 1e-9)
    assert probe.most_throughput >= throughput[:at].max() * (1 - 1e-9)


def test_a_decode_batch_is_kept_to_its_plan_only_where_encoders_can() -> None:
    # Decoding the planned 80 takes 4 ms + 64 ms, and encoding 10 prompts 4 ms + 4 ms a token.
    config = ExecConfig(Strategy.WAA_C, 10)
    assert Timeline({1: _profile()}, Cluster(2), _fixed(15, 8)).waa_planned(config) == pytest.approx(80)
    assert Timeline({1: _profile()}, Cluster(2), _fixed(17, 8)).waa_planned(config) is None


def test_waa_needs_two_devices() -> None:
    timeline = Timeline({1: _profile()}, Cluster(1), _fixed(10, 4))
    assert math.isinf(timeline(ExecConfig(Strategy.WAA_C, 5)).latency)


def test_micro_batches_shorten_the_latency_and_cost_throughput() -> None:
    timeline = Timeline({1: _profile()}, Cluster(4), _fixed(10, 40))
    whole = timeline(ExecConfig(Strategy.WAA_C, 5, micro_batches=1))
    parts = timeline(ExecConfig(Strategy.WAA_C, 5, micro_batches=3))
    assert parts.latency < whole.latency
    assert parts.throughput <= whole.throughput


def test_a_configuration_that_does_not_fit_has_no_latency() -> None:
    weights = SHAPE.weight_bytes
    tight = Timeline({1: _profile()}, Cluster(1, device_bytes=1.2 * weights), _fixed(10, 4))
    assert math.isfinite(tight(ExecConfig(Strategy.RRA, 1, decode_steps=4)).latency)
    assert math.isinf(tight(ExecConfig(Strategy.RRA, 500, decode_steps=4)).latency)
    # Under WAA a decoder-only model is there twice.
    two = Timeline({1: _profile()}, Cluster(2, device_bytes=0.8 * weights), _fixed(10, 4))
    assert math.isfinite(two(ExecConfig(Strategy.RRA, 1, decode_steps=4)).latency)
    assert math.isinf(two(ExecConfig(Strategy.WAA_M, 1)).latency)


def test_an_encoder_decoder_model_is_not_stored_twice_under_waa() -> None:
    shape = ModelShape("m", 4, 64, 4, 2, 16, 128, 256, encoder_layers=4)
    both = LayerProfile(shape, "toy", 0.0, 1, _profile().profile.operations, "made up")
    timeline = Timeline({1: LayerCost(both)}, Cluster(2), _fixed(10, 4))
    assert timeline(ExecConfig(Strategy.WAA_C, 1)).device_bytes < shape.weight_bytes


def test_tensor_parallel_devices_make_one_stage() -> None:
    timeline = Timeline({1: _profile(), 2: _profile(2)}, Cluster(4), _fixed(10, 4))
    assert timeline(ExecConfig(Strategy.RRA, 8, 4, tensor_degree=2, tensor_groups=1)).stages == (3, 3)
    assert timeline(ExecConfig(Strategy.RRA, 8, 4, tensor_degree=2, tensor_groups=2)).stages == (2, 2)


def test_an_iteration_runs_unless_every_query_is_done() -> None:
    occupancy = Occupancy(_fixed(10, 4), 6)
    # Four iterations run for sure, and two never do.
    assert np.exp(occupancy.idle) == pytest.approx([0, 0, 0, 0, 1, 1])
    half = LengthPair(LengthDistribution.empirical([10]), LengthDistribution.empirical([1, 2]))
    assert np.exp(3 * Occupancy(half, 2).idle) == pytest.approx([0, 1 / 8])


@given(st.integers(0, 1000))
def test_below_seconds_lie_what_never_falls_and_what_never_saves_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    knots, contexts = np.array([0.0, 1.0, 3.0, 4.0, 9.0]), np.array([0.0, 5.0])
    seconds = rng.random((5, 2))
    seconds[0] = 0.0
    table = SecondsTable(knots, contexts, seconds)
    sequences = np.linspace(0.1, 9.0, 40)
    exact, least, saved = table.bounded(sequences, table.place(np.full(40, 2.0))).T
    assert exact == pytest.approx(table(sequences, np.full(40, 2.0)))
    assert (least <= exact + 1e-12).all()
    assert (saved <= exact + 1e-12).all()
    assert (np.diff(least) >= -1e-12).all()
    assert (np.diff(saved / sequences) <= 1e-12).all()


def test_the_encoding_batch_shrinks_when_its_prompts_are_long() -> None:
    size = DynamicBatch(4, 10.0, None, threshold=0.1)
    assert size.size(np.array([20, 20, 20, 20, 20]), 0) == 2
    assert size.size(np.array([5] * 20), 0) >= 8


def test_the_encoding_batch_grows_when_the_decode_batch_drifts_down() -> None:
    waiting = np.array([10] * 200)
    assert DynamicBatch(40, 10.0, 100.0, threshold=0.1).size(waiting, 60) == 40
    # 30 below what is let pass, 40 of 100 replaced each time: 12 more.
    assert DynamicBatch(40, 10.0, 100.0, threshold=0.1).size(waiting, 20) == 52
    assert DynamicBatch(40, 10.0, 100.0, threshold=0.1).size(waiting, 100) == 28


def test_no_batch_is_adjusted_away_from_its_plan() -> None:
    # 35 of 40 tokens are nearer than 47.
    assert DynamicBatch(4, 10.0, None).size(np.array([8, 9, 9, 9, 12]), 0) == 4
    # 46 of 40 tokens are nearer than 30.
    assert DynamicBatch(4, 10.0, None).size(np.array([10, 10, 10, 16]), 0) == 4
    # After twelve short prompts no batch is left empty to make up for them.
    batch = DynamicBatch(4, 10.0, None)
    assert [batch.size(np.full(12, 3), 0), batch.size(np.full(12, 10), 0)] == [12, 4]


def test_correlated_lengths_are_measured() -> None:
    workload = Workload.from_lengths([10, 20, 30, 40], [1, 2, 3, 4])
    pair = LengthPair.observed(workload)
    assert pair.correlation == pytest.approx(1.0)
    # Those that decode a 3rd token have inputs of 30 and 40.
    assert pair.surviving_input().tolist() == pytest.approx([25, 30, 35, 40])
    assert LengthPair.observed(workload, independent=True).surviving_input().tolist() == [25] * 4


def test_a_roofline_says_that_it_is_not_measured() -> None:
    profile = Roofline(SHAPE, ROOFLINE_DEVICES["a100-80gb"]).profile()
    assert not profile.measured
    assert "not measured" in profile.source


def test_a_roofline_decode_reads_every_weight_once() -> None:
    shape = ModelShape("8b", 32, 4096, 32, 8, 128, 14336, 128256)
    device = ROOFLINE_DEVICES["a100-80gb"]
    peak = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    profile = Roofline(shape, device, 1, peak).profile()
    seconds = LayerCost(profile).iteration(1, 100, [])
    weights = shape.weight_bytes - shape.vocabulary * shape.hidden * shape.bytes_per_value
    assert seconds == pytest.approx(weights / device.bandwidth, rel=0.1)
    long = LayerCost(profile).iteration(0, 0, [(2048, 0)])
    flops = 2 * 2048 * shape.layers * shape.token_values
    assert long == pytest.approx(flops / device.flops, rel=0.15)
    assert math.isfinite(long)

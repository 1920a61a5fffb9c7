"""Sampled requests under RRA and WAA, and the timeline's expectations beside them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from exegpt_phases import PhaseRun, simulate_phases

from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.lengths.distributions import LengthDistribution
from batchbound.data.lengths.pair import LengthPair
from batchbound.models.exegpt.configuration import Cluster, ExecConfig, Strategy
from batchbound.models.exegpt.timeline import Timeline
from batchbound.models.iterations.layer_cost import LayerCost

SHAPE = ModelShape("m", 4, 64, 4, 2, 16, 128, 256)


def _profile() -> LayerCost:
    """Return a model whose layer takes 1 ms + 0.1 ms a prompt token, or 1 ms + 0.2 ms a decoding sequence."""
    at = np.array([[0.0], [1e4]])
    tokens = Operation("dense", "encode", ("tokens",), at, np.array([1e-3, 1e-3 + 1.0]))
    decode = Operation("dense", "decode", ("sequences",), at, np.array([1e-3, 1e-3 + 2.0]))
    return LayerCost(LayerProfile(SHAPE, "toy", 0.0, 1, (tokens, decode), "made up"))


def _fixed(inputs: int, outputs: int) -> LengthPair:
    return LengthPair(LengthDistribution.empirical([inputs]), LengthDistribution.empirical([outputs]))


@pytest.mark.parametrize(
    ("strategy", "prompt", "batch", "decode_steps", "devices"),
    [(Strategy.RRA, 60, 24, 10, 2), (Strategy.RRA, 60, 24, 10, 4), (Strategy.WAA_C, 20, 6, 1, 2)],
)
def test_the_timeline_agrees_with_sampled_requests(
    strategy: Strategy, prompt: int, batch: int, decode_steps: int, devices: int
) -> None:
    pair = LengthPair(
        LengthDistribution.with_moments("normal", prompt, 0.4 * prompt, 1, 128),
        LengthDistribution.with_moments("normal", 32, 13, 1, 80),
    )
    timeline = Timeline({1: _profile()}, Cluster(devices), pair)
    config = ExecConfig(strategy, batch * devices, decode_steps)
    run = simulate_phases(timeline, config, requests=3000, seed=1)
    reached = timeline(config)
    assert reached.throughput == pytest.approx(run.throughput, rel=0.03)
    phases = decode_steps if strategy is Strategy.RRA else None
    assert reached.latency == pytest.approx(run.latency_near(timeline.longest, phases), rel=0.03)


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        (ExecConfig(Strategy.RRA, 5, 2), 1),
        (ExecConfig(Strategy.WAA_C, 5), 2),
        (ExecConfig(Strategy.WAA_C, 5), 4),
    ],
)
def test_requests_of_one_length_are_simulated_at_the_pace_of_the_timeline(
    config: ExecConfig, devices: int
) -> None:
    timeline = Timeline({1: _profile()}, Cluster(devices), _fixed(40, 8))
    run = simulate_phases(timeline, config, requests=200)
    assert run.throughput == pytest.approx(timeline(config).throughput, rel=0.01)
    assert run.iterations.tolist() == [8] * 200


def test_the_latency_of_a_length_counts_every_micro_batch_alike() -> None:
    lengths = np.array([10, 10, 9, 9, 10])
    latency = np.array([2.0, 2.0, 1.5, 1.5, 4.0])
    part = np.array([0, 0, 0, 0, 1])
    run = PhaseRun(1.0, latency, lengths, part, np.zeros(1), np.zeros(1))
    # Most requests are in the first micro-batch; there an answer of 10 takes 2 seconds.
    assert run.latency_near(10) == pytest.approx(3.0)
    # An answer of 11 takes a phase more where they are 10 iterations long: nothing here tells of it.
    assert math.isnan(run.latency_near(11, 10))

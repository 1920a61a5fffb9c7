"""Static and iteration-level batching, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from exegpt_baselines import IterationBatching, StaticBatching, best_within

from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.lengths.distributions import LengthDistribution
from batchbound.data.lengths.pair import LengthPair
from batchbound.models.exegpt.configuration import Cluster
from batchbound.models.exegpt.timeline import Timeline
from batchbound.models.iterations.layer_cost import LayerCost

SHAPE = ModelShape("m", 4, 64, 4, 2, 16, 128, 256)
BATCHES = np.array([1, 4])


def _timeline(outputs: list[int]) -> Timeline:
    at = np.array([[0.0], [1e4]])
    encode = Operation("dense", "encode", ("tokens",), at, np.array([1e-3, 1e-3 + 1.0]))
    decode = Operation("dense", "decode", ("sequences",), at, np.array([1e-3, 1e-3 + 2.0]))
    costs = {1: LayerCost(LayerProfile(SHAPE, "toy", 0.0, 1, (encode, decode), "made up"))}
    lengths = LengthPair(LengthDistribution.empirical([10]), LengthDistribution.empirical(outputs))
    return Timeline(costs, Cluster(1), lengths)


def test_a_static_batch_decodes_until_its_longest_answer_is_done() -> None:
    latency, throughput = StaticBatching(_timeline([2, 4]), 1).reach(BATCHES)
    encode = 4 * (1e-3 + BATCHES * 10 * 1e-4)
    decode = 4 * (1e-3 + BATCHES * 2e-4)
    # All of a batch of four are short once in 16 times.
    iterations = np.array([3, 4 - 2 / 16])
    assert latency == pytest.approx(encode + 4 * decode)
    assert throughput == pytest.approx(BATCHES / (encode + iterations * decode))


def test_an_iteration_that_encodes_takes_the_decodes_along() -> None:
    timeline = _timeline([4])
    latency, throughput = IterationBatching(timeline, 1).reach(BATCHES)
    decode = 4 * (1e-3 + BATCHES * 2e-4)
    mixed = 4 * (1e-3 + (10 + BATCHES) * 1e-4)
    share = BATCHES / 4
    seconds = (1 - share) * decode + share * mixed
    assert throughput == pytest.approx(share / seconds)
    assert latency == pytest.approx(3 * seconds + mixed)


def test_the_best_is_within_the_bound() -> None:
    latency, throughput = np.array([1.0, 2.0, math.inf]), np.array([5.0, 7.0, 9.0])
    assert best_within(latency, throughput, 1.5) == (1.0, 5.0, 0)
    assert best_within(latency, throughput, math.inf) == (2.0, 7.0, 1)
    assert best_within(latency, throughput, 0.5) is None

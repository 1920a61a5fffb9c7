"""Re-planning for lengths that drifted (ExeGPT, section 7.6)."""

from __future__ import annotations

import math

import pytest

from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.lengths.distributions import LengthDistribution
from batchbound.data.lengths.pair import LengthPair
from batchbound.models.exegpt.configuration import Cluster, ExecConfig, Strategy
from batchbound.models.exegpt.roofline import ROOFLINE_DEVICES, Roofline
from batchbound.models.exegpt.timeline import Timeline
from batchbound.models.iterations.layer_cost import LayerCost
from batchbound.solvers.exegpt.execution_search import search
from batchbound.solvers.exegpt.replan import replan

LLAMA = ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)
DEVICE = ROOFLINE_DEVICES["a100-80gb"]
COSTS = {1: LayerCost(Roofline(LLAMA, DEVICE).profile())}


def _timeline(mean: float, devices: int) -> Timeline:
    outputs = LengthDistribution.with_moments("normal", mean, 20, 1, 160)
    inputs = LengthDistribution.with_moments("normal", 128, 40, 1, 256)
    return Timeline(COSTS, Cluster(devices, DEVICE.memory), LengthPair(inputs, outputs))


def _best(timeline: Timeline, strategy: Strategy, bound: float) -> ExecConfig:
    config = search(timeline, strategy, 1, bound, encode_batches=(1, 64)).config
    assert config is not None
    return config


def test_rra_meets_the_bound_again_by_its_iterations_alone() -> None:
    planned, observed = _timeline(60, 2), _timeline(90, 2)
    config = _best(planned, Strategy.RRA, 4.0)
    assert observed(config).latency > 4.0
    plan = replan(planned, observed, config, 4.0)
    assert plan.config is not None
    assert plan.performance is not None
    assert plan.performance.latency <= 4.0
    assert plan.reload_seconds == 0
    assert plan.config.encode_batch == config.encode_batch
    assert plan.config.decode_steps > config.decode_steps


def test_without_drift_rra_keeps_its_configuration() -> None:
    timeline = _timeline(60, 2)
    config = _best(timeline, Strategy.RRA, 4.0)
    plan = replan(timeline, timeline, config, 4.0)
    assert plan.performance is not None
    assert plan.performance.throughput >= plan.unchanged.throughput


def test_waa_loads_weights_where_devices_change_sides() -> None:
    planned, observed = _timeline(40, 8), _timeline(120, 8)
    config = _best(planned, Strategy.WAA_C, math.inf)
    plan = replan(planned, observed, config, math.inf, encode_batches=(1, 64))
    assert plan.config is not None
    before, after = planned(config).stages, observed(plan.config).stages
    assert before != after
    # Until then the devices stay on their sides.
    assert plan.unchanged.stages == before
    # The fewer side's devices load the most, each its part of a copy of the weights.
    assert plan.reload_seconds == pytest.approx(LLAMA.weight_bytes / min(after) / 20e9)


def test_where_nothing_meets_the_bound_there_is_no_configuration() -> None:
    timeline = _timeline(60, 2)
    config = _best(timeline, Strategy.WAA_C, math.inf)
    plan = replan(timeline, timeline, config, 1e-3, encode_batches=(1, 16))
    assert (plan.config, plan.performance, plan.reload_seconds) == (None, None, 0)

"""New configurations for changed lengths, and the cost of the change."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ...models.exegpt.configuration import ExecConfig, Performance, Strategy
from ...models.exegpt.timeline import Timeline
from ...models.exegpt.workload_aware_row import WorkloadAwareRow
from .execution_search import search


@dataclass(frozen=True, slots=True)
class Replan:
    """Result of a replanning.

    config, performance: New configuration; None if none in reach meets the latency bound.
    unchanged: Performance of the old one with the observed lengths.
    reload_seconds: Seconds to load other layers before it runs; 0 if each device keeps its own.
    """

    config: ExecConfig | None
    performance: Performance | None
    unchanged: Performance
    reload_seconds: float


def replan(
    planned: Timeline,
    observed: Timeline,
    config: ExecConfig,
    latency_bound: float,
    *,
    encode_batches: tuple[int, int] = (1, 256),
) -> Replan:
    """Change a running configuration for observed lengths (ExeGPT, section 7.6).

    RRA changes only its decode iterations, which needs no reload. WAA divides the devices again, which then
    load other layers from host memory (Table 4).

    planned, observed: Timelines with the planned and the observed lengths.
    latency_bound: Seconds for a completion of the observed 99th-percentile length.
    encode_batches: Range of the search for a WAA configuration (see :func:`.search`).
    """
    unchanged = on_planned_devices(planned, observed, config)
    if config.strategy is Strategy.RRA:
        best, throughput = None, -math.inf
        decode_steps = observed.lengths.outputs.high
        for count in range(1, decode_steps + 1):
            changed = replace(config, decode_steps=count)
            probe = observed.rra_row(changed, config.encode_batch).probe(
                config.encode_batch, config.encode_batch
            )
            if (
                probe.latency <= latency_bound
                and math.isfinite(probe.latency)
                and probe.throughput > throughput
            ):
                best, throughput = changed, probe.throughput
        return Replan(best, None if best is None else observed(best), unchanged, 0.0)
    result = search(
        observed,
        config.strategy,
        config.tensor_degree,
        latency_bound,
        encode_batches=encode_batches,
    )
    seconds = 0.0
    if result.config is not None and _layers(result.config, observed(result.config)) != _layers(
        config, unchanged
    ):
        seconds = observed.waa_weight_bytes(result.config) / observed.cluster.host_bandwidth
    return Replan(result.config, result.performance, unchanged, seconds)


def on_planned_devices(planned: Timeline, observed: Timeline, config: ExecConfig) -> Performance:
    """Return a configuration's performance on devices divided for other lengths."""
    if config.strategy is Strategy.RRA or planned.cluster.devices < 2:
        return observed(config)
    encoders = int(planned.encoders(config.strategy, np.array([config.encode_batch]))[0])
    return WorkloadAwareRow(observed, config, encoders, config.encode_batch).performance(config.encode_batch)


def _layers(config: ExecConfig, performance: Performance) -> tuple[object, ...]:
    return (*performance.stages, config.tensor_degree, config.tensor_groups)

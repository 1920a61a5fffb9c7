"""Rows of configurations with bounds for searches, and the costs that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.lengths.pair import LengthPair
from ..iterations.layer_cost import LayerCost
from .completion import Occupancy
from .configuration import Cluster, Performance
from .stage_seconds import StageSeconds

LATENCY_QUANTILE = 0.99
"""Quantile of output lengths for the latency (section 7.1)."""
_TAIL = 2.326
"""99 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Performance of one configuration, and bounds on its row.

    latency, throughput: Its own, seconds and requests a second.
    least_latency: Lower bound for this and larger encoding batches.
    most_throughput: Upper bound for this and smaller encoding batches.
    """

    latency: float
    throughput: float
    least_latency: float
    most_throughput: float


class Row(Protocol):
    """Configurations that differ in the encoding batch alone."""

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return latency and throughput of some encoding batches."""

    def ttft(self, batches: IntArray) -> FloatArray:
        """Return the seconds to the first token of some batches."""

    def probe(self, low: int, at: int) -> Probe:
        """Return a batch's performance, and bounds for larger and smaller ones."""

    def performance(self, batch: int) -> Performance:
        """Return the full performance of an encoding batch."""


class StageCosts:
    """Seconds and memory of one model's stages on one cluster.

    costs: Layer costs by tensor-parallel degree.
    lengths: Length distributions of the requests; outputs are decode iterations.
    """

    def __init__(self, costs: Mapping[int, LayerCost], cluster: Cluster, lengths: LengthPair) -> None:
        self.costs, self.cluster, self.lengths = costs, cluster, lengths
        self.profile = next(iter(costs.values())).profile
        self.shape = self.profile.shape
        self.survival = lengths.survival()
        self.longest = lengths.outputs.quantile(LATENCY_QUANTILE)
        self._stages: dict[tuple[int, int, int], StageSeconds] = {}
        self._occupancy: dict[int, Occupancy] = {}

    def within_memory(self, seconds: FloatArray, device_bytes: FloatArray) -> FloatArray:
        """Return latencies, infinite where a device lacks memory."""
        limit = self.cluster.device_bytes * self.cluster.usable or 1e300
        return np.where(device_bytes <= limit, seconds, math.inf)

    def stage_seconds(self, devices: int, degree: int, groups: int) -> StageSeconds:
        """Return the stages of some devices."""
        groups = min(groups, devices // degree)
        key = (devices, degree, groups)
        if key not in self._stages:
            self._stages[key] = StageSeconds(self.costs, self.cluster, self.lengths, *key)
        return self._stages[key]

    def occupancy(self, decode_steps: int) -> Occupancy:
        """Return a query's share of the decode batch."""
        if decode_steps not in self._occupancy:
            self._occupancy[decode_steps] = Occupancy(self.lengths, decode_steps)
        return self._occupancy[decode_steps]

    def waa_bytes(
        self,
        encode_batch: FloatArray,
        encoders: int,
        batches: int,
        lead: IntArray | int,
        copies: float = 1.0,
    ) -> FloatArray:
        """Return the bytes on the fullest device.

        Encoders hold ``lead`` batches, and decoders ``batches``.
        """
        shape, decoders = self.shape, self.cluster.devices - encoders
        peak = copies * self.peak(self.occupancy(1), encode_batch * batches)
        encoded = (
            copies * encode_batch * self.lengths.inputs.mean * shape.layers * shape.kv_bytes_per_layer_token
        )
        encoder_weights, decoder_weights = self._waa_weights()
        return np.maximum((encoder_weights + lead * encoded) / encoders, (decoder_weights + peak) / decoders)

    def _waa_weights(self) -> tuple[float, float]:
        """Return the bytes of encoding and of decoding layers.

        A decoder-only model has all twice.
        """
        shape = self.shape
        if not shape.encoder_layers:
            return float(shape.weight_bytes), float(shape.weight_bytes)
        encoder = shape.weight_bytes * shape.encoder_layers / (shape.layers + shape.encoder_layers)
        return encoder, shape.weight_bytes - encoder

    def peak(self, occupancy: Occupancy, encode_batch: FloatArray) -> FloatArray:
        """Return the 99 % quantile of the KV cache's bytes."""
        shape, batch = self.shape, np.asarray(encode_batch)[..., None]
        tokens = batch * occupancy.tokens + _TAIL * np.sqrt(batch * occupancy.variance)
        return np.asarray(tokens.max(axis=-1) * shape.layers * shape.kv_bytes_per_layer_token)

    def handover_seconds(self, encode_batch: float) -> float:
        """Return the seconds of moving KV cache through host memory."""
        shape = self.shape
        tokens = encode_batch * self.lengths.inputs.mean
        return tokens * shape.layers * shape.kv_bytes_per_layer_token / self.cluster.host_bandwidth

"""ExeGPT's simulator of throughput and latency."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.lengths.pair import LengthPair
from ..iterations.layer_cost import LayerCost
from .completion import Occupancy
from .configuration import Cluster, ExecConfig, Performance, Strategy
from .round_robin_row import RoundRobinRow
from .stage_seconds import StageSeconds
from .workload_aware_row import WorkloadAwareRow

LATENCY_QUANTILE = 0.99
"""Quantile of output lengths for the latency (section 7.1)."""
_TAIL = 2.326
"""99 % quantile of the standard normal distribution."""


class Timeline:
    """Execution timeline of one model on one cluster.

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
        self._waa_rows: dict[tuple[int, int, int, int], WorkloadAwareRow] = {}

    def __call__(self, config: ExecConfig) -> Performance:
        """Return the performance of a configuration."""
        row = self.row(config, config.encode_batch)
        if row is None:
            return Performance(0.0, math.inf, 0.0, (0, 0), math.inf, 0.0)
        return row.performance(config.encode_batch)

    def row(self, config: ExecConfig, most: int) -> RoundRobinRow | WorkloadAwareRow | None:
        """Return the configurations that differ in the encoding batch.

        config: Any configuration; under WAA its division of the devices holds for the whole row.
        most: Largest encoding batch of the row.
        """
        return (self.rra_row if config.strategy is Strategy.RRA else self.waa_row)(config, most)

    def rra_row(self, config: ExecConfig, most: int) -> RoundRobinRow:
        """Return :meth:`row` of an RRA configuration."""
        return RoundRobinRow(self, config, most)

    def waa_row(self, config: ExecConfig, most: int) -> WorkloadAwareRow | None:
        """Return :meth:`row` of a WAA configuration."""
        if self.cluster.devices < 2:
            return None
        encoders = int(self.encoders(config.strategy, np.array([config.encode_batch]))[0])
        key = (encoders, config.micro_batches, config.tensor_degree, config.tensor_groups)
        known = self._waa_rows.get(key)
        if known is None or known.most < most:
            known = self._waa_rows[key] = WorkloadAwareRow(self, config, encoders, most)
        return known

    def waa_lead(self, config: ExecConfig) -> int:
        """Return how many batches encoders must work ahead."""
        row = self.waa_row(config, config.encode_batch)
        return 0 if row is None else row.lead(config.encode_batch)

    def waa_planned(self, config: ExecConfig) -> float | None:
        """Return the planned decode batch; None if encoding is slower."""
        row = self.waa_row(config, config.encode_batch)
        return None if row is None else row.planned(config.encode_batch)

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

    def encoders(self, strategy: Strategy, encode_batches: IntArray) -> IntArray:
        """Return the encoding devices under WAA, for each encoding batch.

        The paper's WAA-C rounds both shares down, which may leave a device idle or a side without one. Here
        the encoders' share is rounded, and each side has at least one.
        """
        devices, occupancy = self.cluster.devices, self.occupancy(1)
        batches = encode_batches.astype(np.float64)
        if strategy is Strategy.WAA_M:
            counts = np.arange(1, devices)
            loads = [self.waa_bytes(batches, int(count), 1, int(count) + 1) for count in counts]
            return np.asarray(1 + np.argmin(loads, axis=0))
        whole = self.stage_seconds(1, 1, 0)
        encode = whole.encoding(int(encode_batches.max())).mean[0, encode_batches]
        decode = whole.table(batches * occupancy.queries, occupancy.context)
        return np.asarray(
            np.clip(np.rint(devices * encode / (encode + decode)), 1, devices - 1), dtype=np.int64
        )

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

    def waa_weight_bytes(self, config: ExecConfig) -> float:
        """Return the most bytes of weights on a device under WAA."""
        encoders = int(self.encoders(config.strategy, np.array([config.encode_batch]))[0])
        encoder_weights, decoder_weights = self._waa_weights()
        return max(encoder_weights / encoders, decoder_weights / (self.cluster.devices - encoders))

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

"""ExeGPT's simulator of throughput and latency."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ...data.arrays import IntArray
from ...data.lengths.pair import LengthPair
from ..iterations.layer_cost import LayerCost
from .configuration import Cluster, ExecConfig, Performance, Strategy
from .round_robin_row import RoundRobinRow
from .row import StageCosts
from .workload_aware_row import WorkloadAwareRow


class Timeline(StageCosts):
    """Execution timeline of one model on one cluster.

    costs: Layer costs by tensor-parallel degree.
    lengths: Length distributions of the requests; outputs are decode iterations.
    """

    def __init__(self, costs: Mapping[int, LayerCost], cluster: Cluster, lengths: LengthPair) -> None:
        super().__init__(costs, cluster, lengths)
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

    def waa_weight_bytes(self, config: ExecConfig) -> float:
        """Return the most bytes of weights on a device under WAA."""
        encoders = int(self.encoders(config.strategy, np.array([config.encode_batch]))[0])
        encoder_weights, decoder_weights = self._waa_weights()
        return max(encoder_weights / encoders, decoder_weights / (self.cluster.devices - encoders))

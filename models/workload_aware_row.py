"""The timeline of WAA: some devices encode, others decode (ExeGPT, sections 4.1 and 6)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..data.cost import FloatArray, IntArray
from .exec_config import ExecConfig, Performance
from .row import Probe
from .seconds_table import rising, saving
from .stage_seconds import largest

if TYPE_CHECKING:
    from .timeline import Timeline

_HALVINGS = 24
_NODES = np.array([-2.8570, -1.3556, 0.0, 1.3556, 2.8570])
_WEIGHTS = np.array([0.011257, 0.222076, 0.533333, 0.222076, 0.011257])
"""Of the Gauss-Hermite rule: the mean over a normal distribution."""


class WorkloadAwareRow:
    """
    WAA configurations of one number of micro-batches and one allocation of the devices.

    Parameters
    ----------
    timeline
        Costs, cluster and lengths.
    config
        Any of the row.
    encoders
        Devices that encode.
    most
        The largest encoding batch of the row.
    """

    def __init__(self, timeline: Timeline, config: ExecConfig, encoders: int, most: int) -> None:
        self.timeline, self._encoders, self.most = timeline, encoders, most
        decoders = timeline.cluster.devices - encoders
        # Groups are formed among the decoders first: their latency is paid once a token.
        groups = min(config.tensor_groups, decoders // config.tensor_degree)
        degree = config.tensor_degree
        self.decoding = timeline.stage_seconds(decoders, degree, groups)
        self.encoding = timeline.stage_seconds(encoders, degree, config.tensor_groups - groups)
        self.micro = min(config.micro_batches, self.decoding.count)
        # Without micro-batches, as many batches as stages are under way, each decoding every so many slots.
        self.batches = -(-self.decoding.count // self.micro)
        occupancy = timeline.occupancy(1)
        self._length = float(occupancy.queries[0])
        self._deviation = math.sqrt(float(occupancy.spread[0]) / self._length)
        self._context = occupancy.context
        self._handover = timeline.handover_seconds(1.0)
        encoding = self.encoding.encoding(most)
        self._encode, self._slowest = encoding.mean, encoding.slowest
        batches = np.arange(encoding.mean.shape[1], dtype=np.float64)
        planned = self._decode(batches * self._length)
        self._planned = np.stack((planned, rising(planned), saving(batches, planned)))
        slots = self._slot(batches, self._encode[0], planned)
        spans = np.divide(slots, batches, out=np.zeros_like(slots), where=batches > 0)
        # The seconds a request takes up at most, at this encoding batch and at any larger one.
        self._span = np.maximum.accumulate(spans[::-1])[::-1]

    def lead(self, batch: int) -> int:
        """Return how many batches the encoders work ahead: as many as keep the decoders from waiting."""
        slot = self._slot(np.array([float(batch)]), self._encode[0, [batch]], self._planned[0, [batch]])
        return int(self._lead(self._way(0, np.array([batch])), slot)[0])

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return latency and throughput for each of some encoding batches."""
        encode, decode = self._encode[0, batches], self._planned[0, batches]
        slot, way = self._slot(batches, encode, decode), self._way(0, batches)
        sizes: FloatArray = batches * np.float64(self._length)
        lead, throughput = self._lead(way, slot), np.divide(batches, slot)
        # So many batches are on their way, and one is taken up every slot (Little's law).
        waited = lead * slot
        starved = slot > self.micro * decode
        if starved.any():
            decode = np.where(starved, self._settled(throughput, sizes)[1], decode)
            # Encoders that are the slowest never run ahead.
            waited = np.where(encode >= slot, way + self.micro * decode / 2, waited)
        latency = waited + self._decoding_seconds(decode)
        return self.timeline.within_memory(latency, self._bytes(batches, lead)), throughput

    def probe(self, low: int, at: int) -> Probe:
        """Return what a batch says of itself, of larger ones, and of smaller ones from ``low`` on."""
        batches = np.array([at])
        latency, throughput = self.reach(batches)
        slot = self._slot(batches, self._encode[2, batches], self._planned[2, batches])
        rate = 1 / self._span[batches]
        settled = self._settled(rate, np.full(1, math.inf), least=True)[1]
        decode = np.minimum(self._planned[1, batches], settled)
        least = self._way(1, batches) + self.micro * decode / 2 + self._decoding_seconds(decode)
        least = self.timeline.within_memory(least, self._bytes(batches, 0))
        return Probe(float(latency[0]), float(throughput[0]), float(least[0]), at / float(slot[0]))

    def performance(self, batch: int) -> Performance:
        """Return all that is known of an encoding batch."""
        batches = np.array([batch])
        latency, throughput = self.reach(batches)
        slot = self._slot(batches, self._encode[0, batches], self._planned[0, batches])
        size, decode = batch * self._length, float(self._planned[0, batch])
        if float(slot[0]) > self.micro * decode:
            sizes, seconds = self._settled(batches / slot, batches * self._length)
            size, decode = float(sizes[0]), float(seconds[0])
        return Performance(
            float(throughput[0]),
            float(latency[0]),
            size,
            (self.encoding.count, self.decoding.count),
            float(self._bytes(batches, self.lead(batch))[0]),
            float(self._encode[0, batch]),
            decode,
        )

    def _slot(self, batches: FloatArray | IntArray, encode: FloatArray, decode: FloatArray) -> FloatArray:
        """
        Return the seconds between encoded batches.

        Encoding runs ahead of decoding: their mean times count, not the larger one of each slot.
        """
        return np.asarray(np.maximum(np.maximum(self._handover * batches, encode), self.micro * decode))

    def _way(self, kind: int, batches: IntArray) -> FloatArray:
        """Return the seconds from the start of a batch's encoding until the decoders have it."""
        encode = self._encode[kind, batches]
        slowest = np.maximum(encode, self._slowest[kind, batches])
        return np.asarray(encode + (self.encoding.count - 1) * slowest + self._handover * batches)

    def _lead(self, way: FloatArray, slot: FloatArray) -> IntArray:
        # One more for each two stages: uneven batches wait behind each other.
        return np.asarray(np.ceil(way / slot) + 1 + self.encoding.count // 2, dtype=np.int64)

    def _decoding_seconds(self, decode: FloatArray) -> FloatArray:
        """Return the seconds of all iterations of the longest answer, the last through all stages."""
        iterations = (self.timeline.longest - 1) * self.batches * self.micro
        return np.asarray((iterations + self.decoding.count + (self.micro - 1) / 2) * decode)

    def _decode(self, sizes: FloatArray, *, least: bool = False) -> FloatArray:
        """
        Return the mean seconds of a decode stage, for batches of so many requests on average.

        Batches vary as their requests' lengths do; of several under way the largest holds up the others.
        """
        deviation = self._deviation * np.sqrt(sizes) / self.micro
        nodes = largest(self.batches) + _NODES
        sequences = np.maximum(0.0, sizes / self.micro + nodes[:, None] * deviation)
        table = self.decoding.table
        if least:
            return np.asarray(_WEIGHTS @ table.bounded(sequences, table.place(self._context))[..., 1])
        return np.asarray(_WEIGHTS @ table(sequences, self._context))

    def _settled(
        self, rate: FloatArray, planned: FloatArray, *, least: bool = False
    ) -> tuple[FloatArray, FloatArray]:
        r"""
        Return the decode batch, and the seconds of a decode stage, where encoding cannot fill the plan.

        The decoders do not wait: at a rate of :math:`\lambda` requests a second the batch settles where
        :math:`B_D = \lambda S_D B_m t_D(B_D / B_m)`, below the paper's :math:`B_E S_D`.
        """
        tokens = rate * self._length * self.micro
        high = np.minimum(planned, tokens * float(self._planned[0].max()))
        low = np.zeros_like(high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            short = tokens * self._decode(middle, least=least) > middle
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        return low, self._decode(low, least=least)

    def _bytes(self, batches: IntArray, lead: IntArray | int) -> FloatArray:
        return self.timeline.waa_bytes(batches.astype(np.float64), self._encoders, self.batches, lead)

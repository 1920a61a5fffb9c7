"""The timeline of WAA: some devices encode, others decode (ExeGPT, sections 4.1 and 6)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..data.cost import FloatArray, IntArray
from .exec_config import ExecConfig, Performance
from .row import Probe
from .seconds_table import rising
from .stage_seconds import NORMAL, largest

if TYPE_CHECKING:
    from .timeline import Timeline

_KNOTS = 512


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
        self._sizes = self._knots(batches * self._length)
        # What a decode batch of each size takes, and the requests a second it keeps up with.
        self._seconds = self._decode(self._sizes)
        with np.errstate(invalid="ignore", divide="ignore"):
            rates = self._sizes / (self._length * self.micro * self._seconds)
        rates[:, 0] = 0.0
        self._rates, self._most_rate = rates, np.maximum.accumulate(rates[0])
        self._planned = np.interp(batches * self._length, self._sizes, self._seconds[0])
        supply = self._supply(batches, self._encode[0])
        spans = np.divide(supply, batches, out=np.zeros_like(supply), where=batches > 0)
        # The seconds a request takes the encoders at most, at this encoding batch and at any larger one.
        self._span = np.maximum.accumulate(spans[::-1])[::-1]

    def lead(self, batch: int) -> int:
        """Return how many batches the encoders work ahead: as many as keep the decoders from waiting."""
        batches = np.array([batch])
        _, _, slot = self._balance(batches)
        return int(self._lead(self._way(0, batches), slot)[0])

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return latency and throughput for each of some encoding batches."""
        _, decode, slot = self._balance(batches)
        way = self._way(0, batches)
        lead = self._lead(way, slot)
        # So many batches are on their way, and one is taken up every slot (Little's law). Encoders that are
        # the slowest never run ahead.
        slowest = self._encode[0, batches] >= slot
        waited = np.where(slowest, way + self.micro * decode / 2, lead * slot)
        latency = waited + self._decoding_seconds(decode)
        return self.timeline.within_memory(latency, self._bytes(batches, lead)), np.divide(batches, slot)

    def probe(self, low: int, at: int) -> Probe:
        """Return what a batch says of itself, of larger ones, and of smaller ones from ``low`` on."""
        batches = np.array([at])
        latency, throughput = self.reach(batches)
        size = self._settled(1 / self._span[batches], np.full(1, at * self._length), 1)
        decode = np.interp(size, self._sizes, self._seconds[1])
        least = self._way(1, batches) + self.micro * decode / 2 + self._decoding_seconds(decode)
        least = self.timeline.within_memory(least, self._bytes(batches, 0))
        supplied = at / float(self._supply(np.array([float(at)]), self._encode[2, batches])[0])
        beyond = min(int(np.searchsorted(self._sizes, at * self._length)), len(self._sizes) - 1)
        most = min(supplied, float(self._most_rate[beyond]))
        return Probe(float(latency[0]), float(throughput[0]), float(least[0]), most)

    def performance(self, batch: int) -> Performance:
        """Return all that is known of an encoding batch."""
        batches = np.array([batch])
        latency, throughput = self.reach(batches)
        size, decode, _ = self._balance(batches)
        return Performance(
            float(throughput[0]),
            float(latency[0]),
            float(size[0]),
            (self.encoding.count, self.decoding.count),
            float(self._bytes(batches, self.lead(batch))[0]),
            float(self._encode[0, batch]),
            float(decode[0]),
        )

    def _balance(self, batches: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        r"""
        Return the decode batch, the seconds of a decode stage, and those between encoded batches.

        The decoders do not wait for the encoders: if these bring :math:`\lambda` requests a second, the
        batch settles where it keeps up, :math:`B_D = \lambda S_D B_m t_D(B_D / B_m)`, if that is below the
        paper's :math:`B_E S_D`. Encoding runs ahead of decoding: their means count, not the larger one.
        """
        supply, planned = self._supply(batches, self._encode[0, batches]), batches * np.float64(self._length)
        size = self._settled(np.divide(batches, supply), planned)
        decode = np.interp(size, self._sizes, self._seconds[0])
        slot = np.where(size < planned, supply, np.maximum(supply, self.micro * decode))
        return size, decode, slot

    def _settled(self, rate: FloatArray, planned: FloatArray, kind: int = 0) -> FloatArray:
        """
        Return the largest decode batches, up to the planned, that barely keep up with some requests a second.

        Where seconds grow as fast as batches, several do: what runs may be any of them, and latency is that
        of the largest. With the least seconds (``kind`` 1) none is larger, nor for higher rates or larger
        plans smaller.
        """
        short = (self._rates[kind] < rate[:, None]) & (self._sizes < planned[:, None])
        left = short.shape[1] - 1 - np.argmax(short[:, ::-1], axis=1)
        left = np.minimum(left, len(self._sizes) - 2)
        low, high = self._rates[kind, left], self._rates[kind, left + 1]
        way = np.clip((rate - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
        sizes = self._sizes[left] + way * (self._sizes[left + 1] - self._sizes[left])
        return np.asarray(np.minimum(sizes, planned))

    def _knots(self, planned: FloatArray) -> FloatArray:
        """Return decode batches from none to the largest planned one, the smaller ones closer together."""
        top = float(planned[-1])
        spaced = [np.linspace(0, top, _KNOTS), np.geomspace(1.0, top, _KNOTS)]
        return np.unique(np.concatenate((planned[:_KNOTS], *spaced)))

    def _supply(self, batches: FloatArray | IntArray, encode: FloatArray) -> FloatArray:
        """Return the seconds in which the encoders bring another batch."""
        return np.asarray(np.maximum(self._handover * batches, encode))

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

    def _decode(self, sizes: FloatArray) -> FloatArray:
        """
        Return the mean seconds of a decode stage for decode batches of so many on average, and the least.

        Batches vary as their requests' lengths do; of several under way the largest holds up the others. The
        least seconds, in the second row, never fall as batches grow.
        """
        deviation = self._deviation * np.sqrt(sizes) / self.micro
        nodes = largest(self.batches) + np.array(NORMAL)
        sequences = np.maximum(0.0, sizes / self.micro + nodes[:, None] * deviation)
        mean = self.decoding.table(sequences, self._context).mean(axis=0)
        return np.stack((mean, rising(mean)))

    def _bytes(self, batches: IntArray, lead: IntArray | int) -> FloatArray:
        return self.timeline.waa_bytes(batches.astype(np.float64), self._encoders, self.batches, lead)

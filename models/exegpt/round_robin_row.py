"""Timeline of RRA: encode, then decode for some iterations."""

from __future__ import annotations

import math

import numpy as np

from ...data.arrays import FloatArray, IntArray
from .configuration import ExecConfig, Performance
from .row import Probe, StageCosts
from .run_profile import WARMING_STEPS, seconds_after_encoding
from .seconds_table import SecondsTable, rising, saving
from .stage_seconds import Encoding, largest

_NEVER = 1e-300


class RoundRobinRow:
    """RRA configurations with one number of decode iterations.

    There are as many micro-batches as stages.

    timeline: Costs, cluster and lengths.
    config: Any of the row.
    most: Largest encoding batch.
    """

    def __init__(self, timeline: StageCosts, config: ExecConfig, most: int) -> None:
        self.timeline = timeline
        self.stages = timeline.stage_seconds(
            timeline.cluster.devices, config.tensor_degree, config.tensor_groups
        )
        self._copies = timeline.shape.kv_copies(config.tensor_degree if config.tensor_groups else 1)
        self.occupancy = timeline.occupancy(config.decode_steps)
        count = self.stages.count
        self._encoding = self._with_decode_delay(self.stages.encoding(most, count), config.decode_steps)
        self._mean = self.occupancy.queries / count
        self._deviation = largest(count) * np.sqrt(self.occupancy.spread / count)
        self._context = self.occupancy.context
        self._place = self.stages.table.place(self._context)
        self._phases, self._until = divmod(timeline.longest - 1, config.decode_steps)
        # The request of the latency exists with certainty, while others of its length count by probability.
        survival = timeline.survival
        phases = np.zeros((self._phases + 1, config.decode_steps))
        known = survival[: phases.size]
        phases.ravel()[: len(known)] = known
        self._own = 1.0 - phases.mean(axis=0)

    def _with_decode_delay(self, encoding: Encoding, decode_steps: int) -> Encoding:
        """Add the delay of the decode iterations after an encoding."""
        count, first = self.stages.count, slice(WARMING_STEPS)
        batches = np.arange(encoding.mean.shape[1], dtype=np.float64)
        decoding = batches * self.occupancy.queries[first].mean() / count
        context = float(self.occupancy.context[first].mean())
        added = seconds_after_encoding(self.timeline.profile, decoding, context, decode_steps) / count
        added[0] = 0.0
        if not added.any():
            return encoding
        mean, slowest = encoding.mean[0] + added, encoding.slowest[0] + added
        return Encoding(
            np.stack((mean, rising(mean), saving(batches, mean))),
            np.stack((slowest, rising(slowest), saving(batches, slowest))),
        )

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return latency and throughput of some encoding batches."""
        encoding = self._encoding
        encode, slowest = encoding.mean[0, batches], encoding.slowest[0, batches]
        share, active, queries = self._batch(batches[:, None].astype(np.float64))
        decode = share * self.stages.table(active, self._context)
        tail = self.stages.table(queries, self._context)
        cycle = self._cycle(encode, slowest, decode)
        latency = self._latency(encode, slowest, tail, tail[:, -1])
        return self.timeline.within_memory(latency, self._bytes(batches)), batches / cycle

    def ttft(self, batches: IntArray) -> FloatArray:
        """Return the seconds to the first token of some batches."""
        return np.asarray(self.stages.count * self._encoding.mean[0, batches])

    def probe(self, low: int, at: int) -> Probe:
        """Return a batch's performance, and bounds for larger and smaller ones.

        The bound for smaller batches holds from ``low`` on.
        """
        encoding = self._encoding
        encode, slowest = encoding.bounded(low, at)
        share, active, queries = self._batch(np.array(float(at)))
        seconds = self.stages.table.bounded(np.stack((active, queries)), self._place)
        # Contiguous iterations give the same rounding as sums over a whole row.
        seconds = np.ascontiguousarray(seconds.transpose(2, 0, 1))
        decode, tail = share * seconds[:, 0], seconds[:2, 1]
        # Per prompt, a smaller batch decodes at least as many sequences on average. If it decodes, it also
        # decodes at least as many as this one's largest micro-batch.
        mean, largest_of = at * self._mean, at * self._mean + math.sqrt(at) * self._deviation
        running = self._running(np.array(float(low))) if low < at else share
        decode[SecondsTable.SAVING] *= np.maximum(mean, running * largest_of) / np.maximum(
            share * active, _NEVER
        )
        cycles = self._cycle(encode, slowest, decode)
        last = tail[:, -1].copy()
        # A slower encoding might hide this much of a larger batch's wait.
        last[SecondsTable.RISING] = 0.0
        latency = self._latency(encode[:2], slowest[:2], tail, last)
        latency = self.timeline.within_memory(latency, self._bytes(np.array([at])))
        return Probe(float(latency[0]), at / float(cycles[0]), float(latency[1]), at / float(cycles[2]))

    def performance(self, batch: int) -> Performance:
        """Return the full performance of an encoding batch."""
        probe, count = self.probe(batch, batch), self.stages.count
        encode = float(self._encoding.mean[0, batch])
        planned = batch * float(self.occupancy.queries[0])
        memory = float(self._bytes(np.array([batch]))[0])
        return Performance(probe.throughput, probe.latency, planned, (count, count), memory, encode)

    def _bytes(self, batches: IntArray) -> FloatArray:
        cluster, shape = self.timeline.cluster, self.timeline.shape
        peak = self.timeline.peak(self.occupancy, batches.astype(np.float64))
        token_bytes = shape.layers * shape.kv_bytes_per_layer_token
        too_many = batches * self.occupancy.queries[0] > (cluster.slots or math.inf)
        too_many |= peak > (cluster.kv_tokens or math.inf) * token_bytes
        memory = shape.weight_bytes + self._copies * peak
        return np.where(too_many, math.inf, memory / cluster.devices)

    def _running(self, batch: FloatArray) -> FloatArray:
        """Return each iteration's chance that a sequence is left."""
        return np.asarray(-np.expm1(batch * self.occupancy.idle))

    def _batch(self, batch: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return an iteration's chance to run, and two micro-batch sizes.

        They are of its largest micro-batch: the mean if it runs, and with the request of the latency.
        Micro-batches follow each other through all stages, so every iteration takes as long as the largest.
        """
        mean, share = batch * self._mean, self._running(batch)
        active = np.maximum(mean / np.maximum(share, _NEVER), mean + np.sqrt(batch) * self._deviation)
        return share, active, np.maximum(active, mean + self._own)

    def _cycle(self, encode: FloatArray, slowest: FloatArray, decode: FloatArray) -> FloatArray:
        """Return the seconds between encoding phases.

        A faster micro-batch behind a slower one waits in every stage but one (Figure 4(a)'s bubbles). This is
        paid at each change between encoding and decoding.
        """
        inner, first, last = self.stages.count - 1, decode[..., 0], decode[..., -1]
        waits = inner * (np.maximum(last, encode) + np.maximum(first, slowest))
        return np.asarray(encode + last + waits + (inner + 1) * decode[..., :-1].sum(axis=-1))

    def _latency(
        self, encode: FloatArray, slowest: FloatArray, decode: FloatArray, before: FloatArray
    ) -> FloatArray:
        """Return the latency: whole cycles, and part of the last.

        The first micro-batch waits for all others at the first decode. Micro-batches begin at the distance of
        encodings and end at that of decodes, so on average they take less than the first.
        """
        inner, first, last = self.stages.count - 1, decode[..., 0], decode[..., self._until]
        drops = np.maximum(0.0, before - encode) + np.maximum(0.0, slowest - first) + first - last
        final = (inner + 1) * (encode + decode[..., : self._until + 1].sum(axis=-1))
        final = final + inner * drops - inner / 2 * (encode - last)
        return np.asarray(self._phases * self._cycle(encode, slowest, decode) + final)

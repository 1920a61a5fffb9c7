"""Timeline of WAA: some devices encode, others decode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray, IntArray
from .configuration import ExecConfig, Performance
from .row import Probe, StageCosts
from .seconds_table import rising
from .stage_seconds import largest

_STEP = 0.08
"""Distance of the square roots of tabulated decode batches."""
_AT_ONCE = 8
"""Encoding batches computed at a time, by processor caches."""


@dataclass(frozen=True, slots=True)
class _Balance:
    """Equilibrium of encoders and decoders, shape (batches,).

    size: Mean requests of a decode batch.
    decode, slot: Seconds of a decode stage, and those between encoded batches.
    ahead: Share of iterations in which the decoders, or their link, are slower than the encoders.
    """

    size: FloatArray
    decode: FloatArray
    slot: FloatArray
    ahead: FloatArray


class WorkloadAwareRow:
    """WAA configurations with one division of the devices.

    timeline: Costs, cluster and lengths.
    config: Any of the row.
    most: Largest encoding batch.
    """

    def __init__(self, timeline: StageCosts, config: ExecConfig, encoders: int, most: int) -> None:
        self.timeline, self._encoders, self.most = timeline, encoders, most
        decoders = timeline.cluster.devices - encoders
        # Groups are formed among the decoders first: their latency is paid once a token.
        groups = min(config.tensor_groups, decoders // config.tensor_degree)
        degree = config.tensor_degree
        self._copies = timeline.shape.kv_copies(degree if config.tensor_groups else 1)
        self.decoding = timeline.stage_seconds(decoders, degree, groups)
        self.encoding = timeline.stage_seconds(encoders, degree, config.tensor_groups - groups)
        self.micro = min(config.micro_batches, self.decoding.count)
        # Without micro-batches there are as many batches as stages, and each decodes once per cycle of slots.
        self.batches = -(-self.decoding.count // self.micro)
        occupancy, inputs, outputs = timeline.occupancy(1), timeline.lengths.inputs, timeline.lengths.outputs
        self._length = float(occupancy.queries[0])
        self._deviation = math.sqrt(float(occupancy.spread[0]) / self._length)
        # Short prompts arrive faster per encoding second than long ones, and completions vary, too.
        squares = outputs.mean**2 * (inputs.sd / inputs.mean) ** 2 + outputs.sd**2
        self._noise = squares / (outputs.mean**2 + outputs.sd**2) / self.batches
        self._context = occupancy.context
        self._handover = timeline.handover_seconds(1.0)
        encoding = self.encoding.encoding(most)
        self._encode, self._slowest = encoding.mean, encoding.slowest
        batches = np.arange(encoding.mean.shape[1], dtype=np.float64)
        # A batch deviates in proportion to its square root: between such knots, by the same amount.
        top = math.sqrt(most * self._length) + 3.0
        self._sizes = np.arange(1.0, top, _STEP) ** 2
        # Seconds of a decode batch by size, and the highest request rate it can sustain.
        self._seconds = self._decode(self._sizes)
        self._least_seconds = rising(self._seconds)
        rates = self._sizes / (self._length * self.micro * self._seconds)
        self._most_rate = np.maximum.accumulate(rates)
        widths = np.gradient(self._sizes)
        self._strength = self._length / np.maximum(self._sizes * self._noise, widths**2)
        self._log_widths = np.log(widths * self._strength)
        supply = self._supply(batches, self._encode[0])
        spans = np.divide(supply, batches, out=np.zeros_like(supply), where=batches > 0)
        # Upper bound on encoder seconds per request, at this encoding batch and at any larger one.
        self._span = np.maximum.accumulate(spans[::-1])[::-1]

    def lead(self, batch: int) -> int:
        """Return how many batches encoders must work ahead."""
        batches = np.array([batch])
        return int(self._lead(self._way(0, batches), self._balance(batches).slot)[0])

    def planned(self, batch: int) -> float | None:
        """Return the planned decode batch; None if encoding is slower."""
        planned = batch * self._length
        decode = self.micro * float(np.interp(planned, self._sizes, self._seconds))
        supply = self._supply(np.array([batch]), self._encode[0, [batch]])
        return planned if decode >= float(supply[0]) else None

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return latency and throughput of some encoding batches."""
        if len(batches) > _AT_ONCE:
            parts = [self.reach(batches[at : at + _AT_ONCE]) for at in range(0, len(batches), _AT_ONCE)]
            return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        balance = self._balance(batches)
        way = self._way(0, batches)
        lead = self._lead(way, balance.slot)
        # Batches in transit follow from one admission per slot (Little's law). Encoders that are the slower
        # side never run ahead.
        behind = way + self.micro * balance.decode / 2
        waited = behind + balance.ahead * (lead * balance.slot - behind)
        latency = waited + self._decoding_seconds(balance.decode)
        return self.timeline.within_memory(latency, self._bytes(batches, lead)), batches / balance.slot

    def ttft(self, batches: IntArray) -> FloatArray:
        """Return the seconds to the first token of some batches."""
        return np.asarray(self.encoding.count * self._encode[0, batches])

    def probe(self, low: int, at: int) -> Probe:
        """Return a batch's performance, and bounds for larger and smaller ones."""
        batches = np.array([at])
        latency, throughput = self.reach(batches)
        # A lower drift everywhere makes large decode batches less likely against small ones.
        fewest = self._shares(batches, 1 / self._span[batches])
        decode = _mean(fewest, self._least_seconds)
        least_latency = self._way(1, batches) + self.micro * decode / 2 + self._decoding_seconds(decode)
        least_latency = self.timeline.within_memory(least_latency, self._bytes(batches, 0))
        supplied = batches / self._supply(batches, self._encode[2, batches])
        shares = self._shares(batches, supplied) * self._seconds
        served = float(shares[0] @ self._most_rate / shares.sum())
        return Probe(
            float(latency[0]), float(throughput[0]), float(least_latency[0]), min(float(supplied[0]), served)
        )

    def performance(self, batch: int) -> Performance:
        """Return the full performance of an encoding batch."""
        batches = np.array([batch])
        latency, throughput = self.reach(batches)
        balance = self._balance(batches)
        return Performance(
            float(throughput[0]),
            float(latency[0]),
            float(balance.size[0]),
            (self.encoding.count, self.decoding.count),
            float(self._bytes(batches, self.lead(batch))[0]),
            float(self._encode[0, batch]),
        )

    def _balance(self, batches: IntArray) -> _Balance:
        supply = self._supply(batches, self._encode[0, batches])
        shares = self._shares(batches, batches / supply)
        size, decode = _mean(shares, self._sizes), _mean(shares, self._seconds)
        slot = np.maximum(supply, batches * self._length * self.micro * decode / size)
        encode = self._encode[0, batches]
        # Encoders faster than their link run ahead, however fast the decoders are.
        ahead = _mean(shares, np.maximum(self.micro * self._seconds, supply[:, None]) > encode[:, None])
        return _Balance(size, decode, slot, ahead)

    def _shares(self, batches: IntArray, rate: FloatArray) -> FloatArray:
        r"""Return the distribution of decode batches, shape (batches, sizes).

        The decoders do not wait for the encoders. If these bring :math:`\lambda` requests a second, an
        iteration admits :math:`\min(B_E, \lambda B_m t_D(B_D / B_m))`, and :math:`B_D / S_D` complete. The
        batch drifts towards the paper's :math:`B_E S_D`, or to the size at which the decoders keep up. If
        seconds are nearly proportional to batches, drift is small and chance moves the batch. Over a long
        time :math:`\lambda` requests a second bring iterations of variance :math:`\lambda (Var[S] + c^2
        E[S]^2)`, with :math:`c` the coefficient of variation of prompts, as encoder seconds are proportional
        to prompts. This is the stationary density of a diffusion with that drift. Its noise is chosen so that
        slow changes match those of a batch of such arrivals.
        """
        brought = np.minimum(batches[:, None], rate[:, None] * self.micro * self._seconds)
        slope = (brought - self._sizes / self._length) * self._strength
        steps = (slope[:, 1:] + slope[:, :-1]) * (np.diff(self._sizes) / 2)
        shares = np.zeros_like(slope)
        np.cumsum(steps, axis=1, out=shares[:, 1:])
        shares += self._log_widths
        shares -= shares.max(axis=1, keepdims=True)
        np.exp(shares, out=shares)
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))

    def _supply(self, batches: FloatArray | IntArray, encode: FloatArray) -> FloatArray:
        return np.asarray(np.maximum(self._handover * batches, encode))

    def _way(self, kind: int, batches: IntArray) -> FloatArray:
        """Return the seconds until the decoders have a batch."""
        encode = self._encode[kind, batches]
        slowest = np.maximum(encode, self._slowest[kind, batches])
        return np.asarray(encode + (self.encoding.count - 1) * slowest + self._handover * batches)

    def _lead(self, way: FloatArray, slot: FloatArray) -> IntArray:
        # One more for each two stages: uneven batches wait behind each other.
        return np.asarray(np.ceil(way / slot) + 1 + self.encoding.count // 2, dtype=np.int64)

    def _decoding_seconds(self, decode: FloatArray) -> FloatArray:
        iterations = (self.timeline.longest - 1) * self.batches * self.micro
        return np.asarray((iterations + self.decoding.count + (self.micro - 1) / 2) * decode)

    def _decode(self, sizes: FloatArray) -> FloatArray:
        """Return a decode stage's mean seconds by mean batch.

        Batches vary with their requests' lengths; the largest of several delays the others.
        """
        deviation = self._deviation * np.sqrt(sizes)
        return self.decoding.table((sizes + largest(self.batches) * deviation) / self.micro, self._context)

    def _bytes(self, batches: IntArray, lead: IntArray | int) -> FloatArray:
        sizes = batches.astype(np.float64)
        return self.timeline.waa_bytes(sizes, self._encoders, self.batches, lead, self._copies)


def _mean(shares: FloatArray, values: FloatArray) -> FloatArray:
    """Return row means that round as a single row's."""
    return np.asarray((shares * values).sum(axis=1))

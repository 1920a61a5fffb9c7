"""What ExeGPT is measured against: static batches, and batches that change at every iteration."""

from __future__ import annotations

import math

import numpy as np

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.models.exegpt.timeline import Timeline


class StaticBatching:
    """
    FasterTransformer's way: a batch is encoded, and decoded until its longest answer is done.

    Answers that are done stay in the batch. Caches are held for the longest prompts and answers there are,
    and the latency is that of the longest answer (section 7.1).

    Parameters
    ----------
    timeline
        Costs, cluster and lengths.
    degree
        Of tensor parallelism, by as many devices as there are.
    """

    def __init__(self, timeline: Timeline, degree: int) -> None:
        devices = timeline.cluster.devices
        self.timeline = timeline
        self.stages = timeline.stage_seconds(devices, degree, devices // degree if degree > 1 else 0)

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return latency and throughput for each of some batch sizes."""
        timeline, count = self.timeline, self.stages.count
        encoding = self.stages.encoding(int(batches.max()), count)
        iterations = np.arange(1, timeline.lengths.outputs.high + 1, dtype=np.float64)
        context = np.float64(timeline.lengths.inputs.mean) + iterations
        sizes = batches[:, None] / np.float64(count)
        decode = count * self.stages.table(sizes, context)
        # The chance that the longest of a batch is still there.
        there = 1 - (1 - timeline.survival) ** batches[:, None]
        encode = count * encoding.mean[0, batches] + (count - 1) * encoding.slowest[0, batches]
        shape, lengths = timeline.shape, timeline.lengths
        held = batches * (lengths.inputs.high + lengths.outputs.high) * shape.layers
        share = (shape.weight_bytes + held * shape.kv_bytes_per_layer_token) / timeline.cluster.devices
        latency = timeline.within_memory(encode + decode.sum(axis=1), share)
        return latency, np.asarray(batches / (encode + (decode * there).sum(axis=1)))


class IterationBatching:
    """
    ORCA's way, as vLLM does it: an answer that is done makes room for one prompt, encoded among the decodes.

    An iteration encodes one prompt at most, so a micro-batch holds no more than the mean answer's iterations.
    One that encodes holds up all micro-batches of its iteration (section 2's bubbles).

    Parameters
    ----------
    timeline, degree
        As in :class:`StaticBatching`.
    """

    def __init__(self, timeline: Timeline, degree: int) -> None:
        devices = timeline.cluster.devices
        self.timeline = timeline
        self.stages = timeline.stage_seconds(devices, degree, devices // degree if degree > 1 else 0)

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return latency and throughput for each of some batch sizes."""
        timeline, count, table = self.timeline, self.stages.count, self.stages.table
        occupancy = timeline.occupancy(1)
        iterations = float(occupancy.queries[0])
        active = np.minimum(batches / count, iterations)
        arrives = active / iterations
        decode = table(active, occupancy.context)
        # Decoding tokens share the prompt's reading of the weights; their attention comes on top.
        attention = decode - table(active, np.zeros(1))
        mixed = np.array([self._encode(more) for more in active.tolist()]) + attention
        held_up = 1 - (1 - arrives) ** count
        seconds = count * ((1 - held_up) * decode + held_up * np.maximum(decode, mixed))
        latency = (timeline.longest - 1) * seconds + count * mixed
        peak = timeline.peak(occupancy, active * count / iterations)
        share = (timeline.shape.weight_bytes + peak) / timeline.cluster.devices
        return timeline.within_memory(latency, share), np.asarray(count * arrives / seconds)

    def _encode(self, more: float) -> float:
        """Return the mean seconds in which a stage encodes a prompt and so many tokens beside."""
        mean = self.timeline.lengths.inputs.mean
        beside = self.stages.encode_chunks(np.array([mean + more])) - self.stages.encode_chunks(
            np.array([mean])
        )
        return float(self.stages.encoding(1).mean[0, 1]) + beside


def best_within(
    latency: FloatArray, throughput: FloatArray, latency_bound: float
) -> tuple[float, float, int] | None:
    """Return latency, throughput and place of the most throughput within a latency bound; None for none."""
    met = np.isfinite(latency) & (latency <= latency_bound)
    if not met.any():
        return None
    at = int(np.argmax(np.where(met, throughput, -math.inf)))
    return float(latency[at]), float(throughput[at]), at

"""A discrete simulation of RRA and WAA with sampled requests, to judge the timeline's expectations by."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.data.lengths.pair import LengthPair
from batchbound.heuristics.exegpt.dynamic_batch import DynamicBatch
from batchbound.models.exegpt.configuration import ExecConfig, Strategy
from batchbound.models.exegpt.row import LATENCY_QUANTILE
from batchbound.models.exegpt.stage_seconds import StageSeconds
from batchbound.models.exegpt.timeline import Timeline

_SETTLING = 50
"""Decode iterations of a batch before the measured ones: how full the encoders' lead is has settled."""


@dataclass(frozen=True, slots=True, eq=False)
class PhaseRun:
    """
    What a simulated execution reached in its steady state.

    Parameters
    ----------
    throughput
        Requests a second: decode iterations of all requests together, by as many as one takes on average.
        (Those that begin in a while are longer or shorter, which says nothing of what is reached: an
        indirect estimate, Glynn and Whitt, Operations Research 37, 1989.)
    latency
        Seconds of each request measured, from the start of its encoding to its last token.
    iterations, part
        Decode iterations each of them took, and the micro-batch it was in.
    encode_seconds, decode_seconds
        Of the encoding and the (first) decode stages, as they varied.
    """

    throughput: float
    latency: FloatArray
    iterations: IntArray
    part: IntArray
    encode_seconds: FloatArray
    decode_seconds: FloatArray

    @property
    def tail_latency(self) -> float:
        """The 99th percentile of the latencies."""
        return float(np.quantile(self.latency, LATENCY_QUANTILE))

    def latency_of(self, iterations: int) -> float:
        """Return the mean latency of the requests that took so many iterations; nan if there is none."""
        chosen = self.latency[self.iterations == iterations]
        return float(chosen.mean()) if len(chosen) else float("nan")

    def latency_near(self, iterations: int, decode_steps: int | None = None) -> float:
        """
        Return the latency of a request of so many iterations: few are just as long, so a line is fitted.

        Parameters
        ----------
        iterations
            Of the request; those within a tenth of it are looked at.
        decode_steps
            Iterations of a phase: only requests of as many phases are; None for no phases.
        """
        chosen = np.abs(self.iterations - iterations) <= 0.1 * iterations
        if decode_steps is not None:
            chosen &= (self.iterations - 1) // decode_steps == (iterations - 1) // decode_steps
        lengths, latency, part = self.iterations[chosen] - iterations, self.latency[chosen], self.part[chosen]
        if len(latency) < 2 or lengths.min() == lengths.max():
            return self.latency_of(iterations)
        # Micro-batches begin at different times and end together: which one a request is in says more than
        # its length, and all count alike.
        part = np.unique(part, return_inverse=True)[1]
        count = np.bincount(part)
        length_mean = np.bincount(part, weights=lengths) / count
        latency_mean = np.bincount(part, weights=latency) / count
        spread = lengths - length_mean[part]
        slope = float(spread @ latency) / max(float(spread @ spread), 1.0)
        return float((latency_mean - slope * length_mean).mean())


def simulate_phases(
    timeline: Timeline,
    config: ExecConfig,
    *,
    requests: int = 10_000,
    seed: int = 0,
    threshold: float = 0.1,
    lengths: LengthPair | None = None,
) -> PhaseRun:
    """
    Return what a configuration reaches when its requests have sampled lengths.

    Parameters
    ----------
    timeline
        Costs and cluster, and the lengths it was planned for.
    config
        The configuration.
    requests
        Measured, after as many as fill the decode batch.
    seed
        Of the lengths.
    threshold
        Of the dynamic adjustment (section 5.2); infinite for none.
    lengths
        Those of the requests that come; the planned ones by default.
    """
    sample = _Sample(timeline.lengths if lengths is None else lengths, seed)
    # Batches change by whole prompts: a threshold below one would swing between too few and too many.
    threshold = max(threshold, 1 / config.encode_batch)
    run = _RoundRobin if config.strategy is Strategy.RRA else _WorkloadAware
    return run(timeline, config, sample, threshold).measure(requests)


class _Sample:
    """Requests without end, in order: their inputs, and the decode iterations they need."""

    def __init__(self, lengths: LengthPair, seed: int) -> None:
        self._lengths, self._rng = lengths, np.random.default_rng(seed)
        self.inputs = np.zeros(0, dtype=np.int64)
        self.outputs = np.zeros(0, dtype=np.int64)
        self.taken = 0

    @property
    def longest(self) -> int:
        """Iterations of the longest request."""
        return self._lengths.outputs.high

    @property
    def mean(self) -> float:
        """Iterations of a request on average."""
        return self._lengths.outputs.mean

    def ahead(self, count: int) -> IntArray:
        """Return the inputs of the next requests."""
        while len(self.inputs) < self.taken + count:
            more = max(4096, count)
            self.inputs = np.concatenate((self.inputs, self._lengths.inputs.sample(self._rng, more)))
            self.outputs = np.concatenate((self.outputs, self._lengths.outputs.sample(self._rng, more)))
        return np.asarray(self.inputs[self.taken : self.taken + count])

    def decoding(self, count: int) -> tuple[IntArray, IntArray]:
        """Return the tokens held, and the iterations left, of requests met in mid-decoding."""
        lengths = self._lengths
        chances = lengths.outputs.values * lengths.outputs.probabilities
        # An answer is met as often as it takes iterations, in any of them alike.
        outputs = self._rng.choice(lengths.outputs.values, count, p=chances / chances.sum())
        done = np.floor(self._rng.random(count) * outputs).astype(np.int64)
        return lengths.inputs.sample(self._rng, count) + done, outputs - done

    def encoded(self, count: int) -> tuple[IntArray, IntArray]:
        """Return inputs and outputs of requests encoded some time ago, not those to come."""
        lengths = self._lengths
        return lengths.inputs.sample(self._rng, count), lengths.outputs.sample(self._rng, count)

    def take(self, count: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return number, inputs and outputs of the next requests."""
        rows = slice(self.taken, self.taken + count)
        self.taken += count
        return np.arange(rows.start, rows.stop), self.inputs[rows], self.outputs[rows]


class _Decoding:
    """The requests of one decode batch: number, tokens held, iterations left, and when each was encoded."""

    def __init__(self) -> None:
        self.number = np.zeros(0, dtype=np.int64)
        self.held = np.zeros(0, dtype=np.int64)
        self.left = np.zeros(0, dtype=np.int64)
        self.length = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.number)

    def add(self, number: IntArray, held: IntArray, left: IntArray) -> None:
        self.number = np.concatenate((self.number, number))
        self.held = np.concatenate((self.held, held))
        self.left = np.concatenate((self.left, left))
        self.length = np.concatenate((self.length, left))

    def seconds(self, stages: StageSeconds, decode_steps: int, parts: int = 1) -> FloatArray:
        """Return the seconds a stage takes for each of the next iterations, shape (decode_steps,)."""
        ends = np.minimum(self.left, decode_steps)
        done = np.bincount(ends, minlength=decode_steps + 1)
        active = len(self) - np.concatenate(([0], np.cumsum(done[1:decode_steps])))
        gone = np.bincount(ends, weights=self.held, minlength=decode_steps + 1)
        tokens = self.held.sum() - np.concatenate(([0.0], np.cumsum(gone[1:decode_steps])))
        context = tokens / np.maximum(active, 1) + np.arange(1, decode_steps + 1)
        return stages.decode(active / parts, context)

    def iterations(self, decode_steps: int) -> int:
        """Return the iterations of all requests together in the next decode steps."""
        return int(np.minimum(self.left, decode_steps).sum())

    def advance(self, decode_steps: int) -> tuple[IntArray, IntArray, IntArray]:
        """Run iterations; return the requests done, their lengths, and the iteration of each."""
        done = self.left <= decode_steps
        finished = self.number[done], self.length[done], self.left[done]
        self.length = self.length[~done]
        self.number, self.held, self.left = (
            self.number[~done],
            self.held[~done] + decode_steps,
            self.left[~done] - decode_steps,
        )
        return finished


class _Measured:
    """When each request began to be encoded, and when it was done; the first steps are not measured."""

    def __init__(self, warm_up: int, mean: float) -> None:
        self.mean, self.iterations = mean, 0
        self.began: dict[int, float] = {}
        self.latency: dict[int, float] = {}
        self.length: dict[int, int] = {}
        self.part: dict[int, int] = {}
        self.encode: list[float] = []
        self.decode: list[float] = []
        self.warm_up, self.steps = warm_up, 0
        self.first, self.last, self.start, self.left, self.rate = 0, 0, 0.0, 0, 0.0

    def complete(self, taken: int, clock: float, requests: int) -> bool:
        """Return whether all requests to be measured are done; called before each step."""
        if self.steps == self.warm_up:
            self.first, self.last, self.start, self.left = taken, taken + requests, clock, requests
            self.iterations = 0
            self.encode.clear()
            self.decode.clear()
        self.steps += 1
        if self.steps > self.warm_up and not self.rate and taken >= self.first + requests:
            self.rate = self.iterations / self.mean / (clock - self.start)
        return bool(self.rate) and not self.left

    def encoded(self, number: IntArray, start: float, seconds: float) -> None:
        self.began.update(dict.fromkeys(number.tolist(), start))
        self.encode.append(seconds)

    def finished(self, number: int, length: int, part: int, clock: float) -> None:
        began = self.began.pop(number, 0.0)
        # Requests are numbered in order: those that came before or after the measured ones are not counted.
        if self.first <= number < self.last:
            self.latency[number], self.length[number] = clock - began, length
            self.part[number] = part
            self.left -= 1

    def run(self) -> PhaseRun:
        latency, length = np.array(list(self.latency.values())), np.array(list(self.length.values()))
        part = np.array(list(self.part.values()))
        return PhaseRun(self.rate, latency, length, part, np.array(self.encode), np.array(self.decode))


class _Pipeline:
    """Stages that micro-batches pass through in order, each as soon as the one before it has left."""

    def __init__(self, count: int) -> None:
        self.free = [0.0] * count

    def enter(self, seconds: float, arrives: float) -> tuple[float, float]:
        """Take a micro-batch through; return when it began, and when it left."""
        free = self.free
        start = arrives = max(free[0], arrives)
        for stage in range(len(free)):
            arrives = max(arrives, free[stage]) + seconds
            free[stage] = arrives
        return start, arrives


class _RoundRobin:
    """As many micro-batches as stages pass through the pipeline: encoded, then decoded for some steps."""

    def __init__(self, timeline: Timeline, config: ExecConfig, sample: _Sample, threshold: float) -> None:
        self.stages = timeline.rra_row(config, config.encode_batch).stages
        self.decode_steps, self.sample = config.decode_steps, sample
        count = self.stages.count
        mean, planned = timeline.lengths.inputs.mean, timeline(config).decode_batch
        self.sizes = [
            DynamicBatch(config.encode_batch / count, mean, planned / count, threshold) for _ in range(count)
        ]
        self.batches = [self._begun(config.encode_batch / count) for _ in range(count)]
        self.ready = [0.0] * count
        self.pipeline = _Pipeline(count)
        self.measured = _Measured(2, sample.mean)

    def _begun(self, prompts: float) -> _Decoding:
        """Return the batch that earlier cycles would have left."""
        batch, owed = _Decoding(), 0.0
        for done in range(self.decode_steps, self.sample.longest, self.decode_steps):
            # Half a prompt too many in each cycle would take as long to be gone as a request takes.
            owed += prompts
            inputs, outputs = self.sample.encoded(int(owed))
            owed -= int(owed)
            left = outputs > done
            batch.add(np.full(left.sum(), -1), inputs[left] + done, outputs[left] - done)
        return batch

    def measure(self, requests: int) -> PhaseRun:
        while not self.measured.complete(self.sample.taken, self.pipeline.free[0], requests):
            self._cycle()
        return self.measured.run()

    def _cycle(self) -> None:
        measured, sample = self.measured, self.sample
        for at, batch in enumerate(self.batches):
            count = self.sizes[at].size(sample.ahead(self.sizes[at].most), len(batch))
            number, inputs, outputs = sample.take(count)
            seconds = self.stages.encode_chunks(inputs.astype(np.float64))
            if count:
                start, left = self.pipeline.enter(seconds, 0.0)
                self.ready[at] = max(self.ready[at], left)
                measured.encoded(number, start, seconds)
            batch.add(number, inputs, outputs)
        seconds_of = [batch.seconds(self.stages, self.decode_steps).tolist() for batch in self.batches]
        exits = [[0.0] * self.decode_steps for _ in self.batches]
        for step in range(self.decode_steps):
            for at in range(len(self.batches)):
                if seconds_of[at][step]:
                    self.ready[at] = self.pipeline.enter(seconds_of[at][step], self.ready[at])[1]
                exits[at][step] = self.ready[at]
        for at, batch in enumerate(self.batches):
            measured.decode.append(seconds_of[at][0])
            measured.iterations += batch.iterations(self.decode_steps)
            for number, length, step in zip(*batch.advance(self.decode_steps), strict=True):
                measured.finished(int(number), int(length), at, exits[at][int(step) - 1])


class _WorkloadAware:
    """Encoders work ahead, and each iteration of a decode batch takes up what they have ready."""

    def __init__(self, timeline: Timeline, config: ExecConfig, sample: _Sample, threshold: float) -> None:
        row = timeline.waa_row(config, config.encode_batch)
        if row is None:
            raise ValueError("WAA needs two devices")
        self.encoding, self.decoding, self.micro = row.encoding, row.decoding, row.micro
        self.lead = row.lead(config.encode_batch)
        self.sample, self.handover = sample, timeline.handover_seconds(1.0)
        expected = timeline(config).decode_batch
        planned = row.planned(config.encode_batch)
        self.size = DynamicBatch(config.encode_batch, timeline.lengths.inputs.mean, planned, threshold)
        self.batches = [_Decoding() for _ in range(row.batches)]
        for batch in self.batches:
            held, left = sample.decoding(round(expected))
            batch.add(np.full(len(held), -1), held, left)
        self.measured = _Measured(_SETTLING * len(self.batches) + self.encoding.count, sample.mean)
        self.encoders, self.decoders = _Pipeline(self.encoding.count), _Pipeline(self.decoding.count)
        # Encoded and not yet decoding: numbers, inputs, outputs, and when they are there.
        self.encoded: deque[tuple[IntArray, IntArray, IntArray, float]] = deque()
        self.handed, self.room = 0.0, 0.0
        self.ready = [[0.0] * self.micro for _ in self.batches]

    def measure(self, requests: int) -> PhaseRun:
        # Decoding begun before the first batch is there would empty a batch that fills up slowly again.
        self._encode(len(self.batches[0]))
        self.decoders.free = [self.handed] * self.decoding.count
        slot = 0
        while not self.measured.complete(self.sample.taken, self.decoders.free[0], requests):
            self._slot(slot % len(self.batches))
            slot += 1
        return self.measured.run()

    def _slot(self, which: int) -> None:
        batch, ready = self.batches[which], self.ready[which]
        begins = max(self.decoders.free[0], ready[0])
        while len(self.encoded) < self.lead and self.encoders.free[0] <= begins:
            self._encode(len(batch))
        if not any(len(each) for each in self.batches):
            begins = max(begins, self.encoded[0][3])
        # Where encoding is the slower side, batches would else take turns in another rhythm than it does.
        ahead = len(batch) - min(len(each) for each in self.batches)
        if self.encoded[0][3] <= begins and (
            ahead < len(self.encoded[0][0]) or len(self.encoded) == self.lead
        ):
            if len(self.encoded) == self.lead:
                self.room = begins
            number, inputs, outputs, _ = self.encoded.popleft()
            batch.add(number, inputs, outputs)
        seconds = float(batch.seconds(self.decoding, 1, self.micro)[0])
        for part in range(self.micro):
            ready[part] = self.decoders.enter(seconds, max(begins, ready[part]))[1]
        self.measured.decode.append(seconds)
        self.measured.iterations += batch.iterations(1)
        finish = sum(ready) / self.micro
        for number, length, _ in zip(*batch.advance(1), strict=True):
            self.measured.finished(int(number), int(length), which, finish)

    def _encode(self, active: int) -> None:
        count = self.size.size(self.sample.ahead(self.size.most), active)
        number, inputs, outputs = self.sample.take(count)
        seconds = self.encoding.encode_chunks(inputs.astype(np.float64))
        start, left = self.encoders.enter(seconds, self.room)
        self.handed = max(left, self.handed) + self.handover * count
        self.encoded.append((number, inputs, outputs, self.handed))
        self.measured.encoded(number, start, seconds)

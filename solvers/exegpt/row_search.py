"""Exact search of rows of configurations, without assuming monotone rows."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...models.exegpt.row import Probe, Row

_LOOKS = 4
"""Probes of each row before the best rows are searched further."""
_ROUNDING = 1e-12
"""Relative tolerance of latencies, against rounding in sums."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Part of a row to search: batches ``low`` to ``high``, both included."""

    row: Row
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class RowBest:
    """Best configuration of some rows.

    row, batch: Index of the row, and encoding batch; None if none is better than ``at_least``.
    throughput: Its throughput, or ``at_least``.
    evaluated: Number of simulated configurations.
    """

    row: int | None
    batch: int
    throughput: float
    evaluated: int


def best_of_rows(
    ranges: Sequence[RowRange],
    latency_bound: float,
    *,
    first: int = 0,
    guess: int = 1,
    at_least: float = -math.inf,
    gap: float = 0.0,
) -> RowBest:
    """Find the highest throughput under a latency bound in some rows.

    One probe excludes the smaller encoding batches of its row if the upper bound on their throughput is no
    better than the best. It excludes the larger ones if the lower bound on their latency is too slow. In most
    rows one probe excludes both; its position follows from the rows before.

    ranges: The rows, similar ones next to each other.
    latency_bound: Seconds.
    first, guess: Row to begin with, and an encoding batch of it.
    at_least: Throughput already reached; only better configurations are searched for.
    gap: Relative improvement below which the search ends.
    """
    search = _Rows(ranges, latency_bound, at_least, 1 + gap)
    begin = search.look(first, guess)
    for numbers in (range(first + 1, len(ranges)), range(first - 1, -1, -1)):
        near = begin
        for number in numbers:
            near = search.look(number, near)
    search.finish()
    return RowBest(search.row, search.batch, search.best, search.evaluated)


@dataclass(frozen=True, slots=True, order=True)
class _Block:
    """Batches that may hold a row's best, with the next probe."""

    rank: float
    number: int
    low: int
    high: int
    at: int


class _Rows:
    def __init__(self, ranges: Sequence[RowRange], bound: float, best: float, factor: float) -> None:
        self.ranges, self.bound, self.best, self.factor = ranges, bound, best, factor
        self.row: int | None = None
        self.batch, self.evaluated = 0, 0
        self.left: list[_Block] = []
        # Change per prompt between the last two probes of a row.
        self.latency_slope, self.throughput_slope = 0.0, 0.0

    def look(self, number: int, guess: int) -> int:
        """Probe a row; return the batch of latency nearest to the bound."""
        whole = self.ranges[number]
        at = min(max(guess, whole.low), whole.high)
        blocks = [_Block(-math.inf, number, whole.low, whole.high, at)]
        nearest, closest = guess, math.inf
        before: tuple[int, Probe] | None = None
        for _ in range(_LOOKS):
            if not blocks:
                return nearest
            block = blocks.pop()
            probe, parts = self._split(block)
            blocks += parts
            if before is not None and math.isfinite(probe.latency) and math.isfinite(before[1].latency):
                self._learn(block.at - before[0], before[1], probe)
            before = (block.at, probe)
            off = abs(probe.least_latency - self.bound)
            if off <= closest:
                nearest, closest = block.at, off
        for block in blocks:
            heapq.heappush(self.left, block)
        return nearest

    def finish(self) -> None:
        """Probe the rest of the rows, the most promising first."""
        while self.left:
            block = heapq.heappop(self.left)
            if -block.rank <= self.best * self.factor:
                return
            for part in self._split(block)[1]:
                heapq.heappush(self.left, part)

    def _split(self, block: _Block) -> tuple[Probe, list[_Block]]:
        """Probe a block; return the probe and the blocks still possible."""
        low, high, at = block.low, block.high, block.at
        probe = self.ranges[block.number].row.probe(low, at)
        self.evaluated += 1
        met = probe.latency <= self.bound and math.isfinite(probe.latency)
        if met and probe.throughput > self.best:
            self.best, self.row, self.batch = probe.throughput, block.number, at
        parts = []
        latency = probe.least_latency * (1 - _ROUNDING)
        excess = probe.most_throughput - self.best * self.factor
        if low < at and excess > 0:
            # An infeasible configuration does not tell how far a feasible one is.
            fits = math.isfinite(probe.latency)
            step = _steps(excess, self.throughput_slope if fits else 0.0, at - low)
            rank = max(block.rank, -probe.most_throughput)
            parts.append(_Block(rank, block.number, low, at - 1, at - step))
        if at < high and latency <= self.bound and math.isfinite(latency):
            step = _steps(self.bound - latency, self.latency_slope, high - at)
            parts.append(_Block(block.rank, block.number, at + 1, high, at + step))
        return probe, parts

    def _learn(self, apart: int, before: Probe, after: Probe) -> None:
        slope = (after.latency - before.latency) / apart
        self.latency_slope = slope if slope > 0 else self.latency_slope
        slope = (after.throughput - before.throughput) / apart
        self.throughput_slope = slope if slope > 0 else self.throughput_slope


def _steps(distance: float, slope: float, most: int) -> int:
    """Return the prompts that cover a distance, or half of ``most``."""
    if slope <= 0 or not math.isfinite(distance):
        return (most + 1) // 2
    return min(max(1, math.ceil(distance / slope)), (most + 1) // 2 if distance / slope > most else most)

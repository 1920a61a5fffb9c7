"""An exact search of rows of configurations, by bounds that hold whether or not a row is monotone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..models.row import Probe, Row


@dataclass(frozen=True, slots=True)
class RowRange:
    """
    The configurations of a row that are searched.

    Parameters
    ----------
    row
        Says what they reach.
    low, high
        Encoding batches, both included.
    """

    row: Row
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class RowBest:
    """
    The best configuration of some rows.

    Parameters
    ----------
    row, batch
        Number of the row, and encoding batch; None if nothing is better than what was known.
    throughput
        Of the best, or what was known.
    evaluated
        Configurations looked at.
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
    """
    Return the configuration of most throughput within a latency bound, whatever is monotone or not.

    A look at one configuration excludes the smaller encoding batches of its row if the row's bound on
    their throughput is no better than the best known, and the larger ones if that on their latency is too
    slow. In most rows one look excludes both: where it is taken follows from the rows before.

    Parameters
    ----------
    ranges
        The rows, like ones next to each other.
    latency_bound
        Seconds.
    first, guess
        The row to begin with, and an encoding batch of it: those of a good configuration.
    at_least
        Throughput already reached: nothing that is no better is looked for.
    gap
        Nothing better by a smaller fraction is looked for.
    """
    search = _Rows(ranges, latency_bound, at_least, 1 + gap)
    begin = search.look(first, guess)
    for numbers in (range(first + 1, len(ranges)), range(first - 1, -1, -1)):
        near = begin
        for number in numbers:
            near = search.look(number, near)
    return RowBest(search.row, search.batch, search.best, search.evaluated)


class _Rows:
    def __init__(self, ranges: Sequence[RowRange], bound: float, best: float, factor: float) -> None:
        self.ranges, self.bound, self.best, self.factor = ranges, bound, best, factor
        self.row: int | None = None
        self.batch, self.evaluated = 0, 0
        # Of the last two looks at a row: what one prompt more changes.
        self.latency_slope, self.throughput_slope = 0.0, 0.0

    def look(self, number: int, guess: int) -> int:
        """Search a row, and return the encoding batch seen whose latency is nearest to the bound."""
        whole = self.ranges[number]
        blocks = [(whole.low, whole.high, min(max(guess, whole.low), whole.high))]
        before, pivot, closest = None, guess, math.inf
        while blocks:
            low, high, at = blocks.pop()
            probe = whole.row.probe(low, at)
            self.evaluated += 1
            met = probe.latency <= self.bound and math.isfinite(probe.latency)
            if met and probe.throughput > self.best:
                self.best, self.row, self.batch = probe.throughput, number, at
            off = abs(probe.least_latency - self.bound)
            if off <= closest:
                pivot, closest = at, off
            if before is not None and math.isfinite(probe.latency):
                self._learn(at - before[0], before[1], probe)
            before = (at, probe) if math.isfinite(probe.latency) else before
            slower = probe.least_latency > self.bound or math.isinf(probe.least_latency)
            worse = probe.most_throughput <= self.best * self.factor
            if low < at and not worse:
                excess = probe.most_throughput - self.best * self.factor
                step = _steps(excess, self.throughput_slope, at - low)
                blocks.append((low, at - 1, at - step))
            if at < high and not slower:
                step = _steps(self.bound - probe.least_latency, self.latency_slope, high - at)
                blocks.append((at + 1, high, at + step))
        return pivot

    def _learn(self, apart: int, before: Probe, after: Probe) -> None:
        slope = (after.latency - before.latency) / apart
        self.latency_slope = slope if slope > 0 else self.latency_slope
        slope = (after.throughput - before.throughput) / apart
        self.throughput_slope = slope if slope > 0 else self.throughput_slope


def _steps(distance: float, slope: float, most: int) -> int:
    """Return how many prompts away a line of this slope points; the middle if it points nowhere."""
    if slope <= 0 or not math.isfinite(distance):
        return (most + 1) // 2
    return min(max(1, math.ceil(distance / slope)), (most + 1) // 2 if distance / slope > most else most)

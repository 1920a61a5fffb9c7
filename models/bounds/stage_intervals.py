"""Argument that requests hold slots for whole intervals between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ..deadline import Deadline
from ..programme import Programme
from .argument import Argument, Curve, Known, Task, exact

PARTS = 65536
"""Parts of a decode step, so that prices are whole numbers."""

KINDS = 4
"""Spans with a price of their own: of one interval, two, and so on."""

INWARDS = 0.35
"""Distance from the best prices to a trial, as a share."""

CLOSE = 1e-6
"""Slot-steps below another decode step at which prices cannot prove it."""


@dataclass(frozen=True, slots=True)
class IntervalPrices:
    """Prices (Lagrange multipliers) that prove decode steps, in parts of a step.

    interval: Charge for each interval that a request is held for.
    spans: Charge for each span of one interval, of two in a row, and so on, that requests are held for, at
        least one price; longer spans are free.
    decode_step: Further charge for each decode step of a span of one interval.
    """

    interval: int
    spans: tuple[int, ...]
    decode_step: int

    @property
    def witness(self) -> Mapping[str, object]:
        """Numbers with which a checker repeats the argument."""
        return {"interval": self.interval, "spans": list(self.spans), "decode_step": self.decode_step}

    def decode_steps(self, charged: int, slots: int, stages: int) -> int:
        """Return the least decode steps of a number of stages."""
        return int(self.curve(charged, slots, np.array([stages]))[0])

    def curve(self, charged: int, slots: int, stages: IntArray) -> IntArray:
        """Return the least decode steps of each number of stages."""
        most_stages = int(stages.max(initial=0))
        largest = charged + most_stages * (slots * self.interval + sum(self.spans))
        stages = exact(stages, largest)
        free = slots * stages * self.interval
        for more, price in enumerate(self.spans):
            free = free + price * np.maximum(0, stages - more)
        steps = np.maximum(0, -(-(charged - free) // (slots * PARTS + self.decode_step)))
        return steps.astype(np.int64)


@dataclass(frozen=True, slots=True)
class IntervalSolution:
    """Cheapest spans that hold all requests, at some prices.

    charged: Least sum of slot time and charges, in parts of a step: no schedule has less.
    held: Slot-steps that requests are held for, in all.
    intervals: Intervals that they are held for, in all.
    spans: Different spans of one interval, of two, and so on.
    short: Decode steps of the different spans of one interval.
    """

    prices: IntervalPrices
    charged: int
    held: int
    intervals: int
    spans: tuple[int, ...]
    short: int


class StageIntervals:
    r"""Requests held for whole intervals between stages, at prices.

    Let :math:`0 = x_0 \le \dots \le x_S = R` be the decode steps at which S stages begin, and the end. An
    interval lies between two neighbours. A slot that serves a request of n steps from one stage on is held to
    a later one, or to the end: for a span of m intervals in a row, of n steps at least. Nothing starts within
    an interval, so J slots are held for J S intervals and J R steps at most. There are S - m + 1 spans of m
    intervals, and the spans of one interval have R steps in all.

    Charge each request g for each interval. Charge each span that requests are held for :math:`u_m` if it has
    m intervals and, if it has one, r for each of its steps. No charge is negative. Then the sum of slot time
    and charges is

    .. math:: L(g, u, r) \le J R + g J S + \sum_m u_m (S - m + 1) + r R

    at most, and at least the sum where every length may be rounded up to any span for these charges. The
    requests of a span are then neighbours by length, as each may take any shorter span that is long
    enough. So a shortest path finds that least sum. Fewer points, empty slots and spans without requests
    only lower the left or raise the right side.

    lengths: Distinct lengths, ascending, positive, shape (distinct,).
    counts: Number of requests of each length, shape (distinct,).
    slots: Slots J there are.
    """

    def __init__(self, lengths: IntArray, counts: IntArray, slots: int) -> None:
        self.lengths, self.slots = lengths, slots
        self._below = np.concatenate(([0], np.cumsum(counts)))

    @property
    def requests(self) -> int:
        """Number of requests."""
        return int(self._below[-1])

    def solved(self, prices: IntervalPrices) -> IntervalSolution:
        """Return the spans of least slot time and charges."""
        size, below, free = len(self.lengths), self._below, len(prices.spans)
        intervals = np.arange(1, free + 2)
        fixed = np.array([*prices.spans, 0])
        cheapest = np.zeros(size + 1, dtype=np.int64)
        before, kinds = np.zeros(size + 1, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
        for i, length in enumerate(self.lengths.tolist(), start=1):
            charges = length * PARTS + intervals * prices.interval
            costs = cheapest[:i] - charges[:, None] * below[:i]
            start = costs.argmin(axis=1)
            whole = costs[intervals - 1, start] + charges * below[i] + fixed
            whole[0] += prices.decode_step * length
            kind = int(whole.argmin())
            cheapest[i], before[i], kinds[i] = whole[kind], start[kind], kind
        slot_steps, in_all, spans, short, i = 0, 0, [0] * (free + 1), 0, size
        while i:
            length, kind, number = int(self.lengths[i - 1]), int(kinds[i]), int(below[i] - below[before[i]])
            slot_steps, in_all = slot_steps + number * length, in_all + number * (kind + 1)
            spans[kind] += 1
            short += length if kind == 0 else 0
            i = int(before[i])
        return IntervalSolution(prices, int(cheapest[size]), slot_steps, in_all, tuple(spans[:free]), short)


class IntervalBound(Argument):
    """Search for prices of intervals by cutting planes (Kelley 1960).

    The slot time and charges of a solution bound those at any other prices and number of stages. So the
    planes of one number serve the next.
    """

    name, part = "stage_intervals", "intervals"
    kind = source = "difference set"

    def __init__(self, intervals: StageIntervals) -> None:
        self._intervals = intervals
        self._planes: list[tuple[int, ...]] = []
        self._best: FloatArray | None = None

    @classmethod
    def of(cls, task: Task) -> Self | None:
        """Return the search if slots bind."""
        return cls(StageIntervals(*task.lengths, task.counts.slots)) if task.prices_lengths else None

    def prove(self, known: Known, deadline: Deadline) -> Curve | None:
        """Return the curve of the prices that prove most."""
        solution = self.best(*known.cheapest, deadline)
        if solution is None:
            return None
        steps = solution.prices.curve(solution.charged, self._intervals.slots, known.stages)
        return Curve(self.part, steps, solution.prices.witness)

    def best(self, stages: int, decode_steps: int, deadline: Deadline) -> IntervalSolution | None:
        """Return the solution that proves most for some stages, or None."""
        best_solution, steps = None, 0
        while deadline.left > 0:
            deadline.count(len(self._planes) * (KINDS + 3))
            prices = self._priced(stages, decode_steps)
            if prices is None:
                break
            inwards = self._best is not None and steps % 3 > 0
            if self._best is not None and inwards:
                prices = self._best + INWARDS * (prices - self._best)
            solution = self._intervals.solved(_whole(prices))
            new = self._add(solution)
            steps += 1
            proven = solution.prices.decode_steps(solution.charged, self._intervals.slots, stages)
            if proven > decode_steps:
                best_solution, decode_steps, self._best = solution, proven, prices
            elif not new and not inwards:
                # The rest lies within a part of a step.
                break
        return best_solution

    def _priced(self, stages: int, decode_steps: int) -> FloatArray | None:
        """Return the prices that refute ``decode_steps`` most clearly."""
        slots = self._intervals.slots
        spans = np.maximum(0, stages - np.arange(KINDS))
        right_sides = np.concatenate(([slots * stages], spans, [decode_steps])).astype(np.float64)
        if not self._planes:
            return np.zeros(len(right_sides))
        # Columns: the prices, and the sum of slot time and charges.
        planes = np.array(self._planes, dtype=np.float64)
        rows = np.hstack((-planes[:, 1:], np.ones((len(planes), 1))))
        longest = float(self._intervals.lengths[-1])
        highest = [longest, *[longest * self._intervals.requests] * KINDS, float(slots)]
        programme = Programme.within(np.append(right_sides, -1.0), rows, planes[:, 0])
        optimum = replace(programme, upper=np.array([*highest, np.inf])).solved()
        if optimum is None or optimum.cost >= -slots * decode_steps - CLOSE:
            return None
        return optimum.x[:-1]

    def _add(self, solution: IntervalSolution) -> bool:
        plane = solution.held, solution.intervals, *solution.spans, solution.short
        new = plane not in self._planes
        if new:
            self._planes.append(plane)
        return new


def _whole(prices: FloatArray) -> IntervalPrices:
    interval, *spans, decode_step = np.rint(PARTS * prices).astype(np.int64).tolist()
    return IntervalPrices(interval, tuple(spans), decode_step)

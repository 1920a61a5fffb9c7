"""Prices of the intervals between prefill stages that prove the most rounds."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from ...data.costs.cost import FloatArray
from ...models.bounds.stage_intervals import PARTS, IntervalPrices, IntervalSolution, StageIntervals
from ...models.programme import Programme

KINDS = 4
"""Spans that have a price of their own: of one interval, of two, and so on."""

INWARDS = 0.35
"""How far from the best prices so far towards the programme's the next ones are tried, two times of three."""

CLOSE = 1e-6
"""Slot-rounds short of another round at which no prices prove it."""


class IntervalPricing:
    """
    A search for the prices of intervals by cutting planes (Kelley 1960).

    What requests are held for at some prices bounds what they come to at any, whatever the number of stages,
    so the planes of one number serve the next.

    Parameters
    ----------
    intervals
        The requests and the slots.
    """

    def __init__(self, intervals: StageIntervals) -> None:
        self._intervals = intervals
        self._planes: list[tuple[int, ...]] = []
        self._best: FloatArray | None = None

    def best(self, stages: int, rounds: int, deadline: float) -> IntervalSolution | None:
        """
        Return the solution whose prices prove the most rounds for a number of stages, or None.

        Parameters
        ----------
        stages
            The number of stages.
        rounds
            Rounds that are proven for it otherwise.
        deadline
            Seconds (:func:`time.perf_counter`) at which it gives up.

        Returns
        -------
        IntervalSolution or None
            None if no prices were found that prove more.
        """
        found, steps = None, 0
        while time.perf_counter() < deadline:
            prices = self._priced(stages, rounds)
            if prices is None:
                break
            inwards = self._best is not None and steps % 3 > 0
            if self._best is not None and inwards:
                prices = self._best + INWARDS * (prices - self._best)
            solution = self._intervals.solved(_whole(prices))
            new = self._add(solution)
            steps += 1
            proven = solution.prices.rounds(solution.charged, self._intervals.slots, stages)
            if proven > rounds:
                found, rounds, self._best = solution, proven, prices
            elif not new and not inwards:
                # What is left lies within a part of a round.
                break
        return found

    def _priced(self, stages: int, rounds: int) -> FloatArray | None:
        """Return the prices at which the planes refute so many rounds most clearly, None if they can't."""
        slots = self._intervals.slots
        spans = np.maximum(0, stages - np.arange(KINDS))
        given = np.concatenate(([slots * stages], spans, [rounds])).astype(np.float64)
        if not self._planes:
            return np.zeros(len(given))
        # Columns: the prices, and what all come to with what is charged.
        planes = np.array(self._planes, dtype=np.float64)
        rows = np.hstack((-planes[:, 1:], np.ones((len(planes), 1))))
        longest = float(self._intervals.lengths[-1])
        highest = [longest, *[longest * self._intervals.requests] * KINDS, float(slots)]
        programme = Programme.within(np.append(given, -1.0), rows, planes[:, 0])
        found = replace(programme, upper=np.array([*highest, np.inf])).solved()
        if found is None or found.cost >= -slots * rounds - CLOSE:
            return None
        return found.x[:-1]

    def _add(self, solution: IntervalSolution) -> bool:
        """Add the plane of a solution, and return whether it is a new one."""
        plane = solution.held, solution.intervals, *solution.spans, solution.short
        new = plane not in self._planes
        if new:
            self._planes.append(plane)
        return new


def _whole(prices: FloatArray) -> IntervalPrices:
    """Return prices in whole parts of a round."""
    interval, *spans, each = np.rint(PARTS * prices).astype(np.int64).tolist()
    return IntervalPrices(interval, tuple(spans), each)
